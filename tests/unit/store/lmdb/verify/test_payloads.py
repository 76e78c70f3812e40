"""Checking large payloads: they are found and missed as rows are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack
import pytest
import xxhash

from experience_buffer_server.store import row_codec
from experience_buffer_server.store.interface import OTHER_DIGEST, GroupRow, StoreFailedError
from experience_buffer_server.store.lmdb.disk.format import (
    Extent,
    Table,
    encode_extent,
    freed_key,
    numbered_key,
    payload_key,
)
from experience_buffer_server.store.lmdb.disk.seal import SEAL_BYTES
from experience_buffer_server.store.lmdb.large.payload_file import NAME
from experience_buffer_server.store.lmdb.snapshots.inventory import problem_of
from experience_buffer_server.store.lmdb.verify.check import Kind, check
from experience_buffer_server.store.lmdb.verify.walk_process import Walk
from experience_buffer_server.store.payload import checksum
from tests.damaging import flip, flip_key, raw
from tests.unit.store.conftest import MakeBuffer, MakeRecord, OpenStore
from tests.unit.store.lmdb.large_by_hand import (
    extent_of,
    move_out,
    put,
    put_large,
)

SIZES: Final = {1: 500, 2: 65_536, 3: 65_537, 4: 300_000, 5: 9, 6: 5 << 20}
LARGE: Final = {2, 3, 4, 6}


def key_of(seq: int) -> bytes:
    return payload_key(1, f"3/math-{seq}/5/7/é")


def payload(seq: int) -> bytes:
    text = f"payload {seq};".encode()
    return (text * (SIZES[seq] // len(text) + 1))[: SIZES[seq]]


@pytest.fixture
async def filled(
    open_store: OpenStore, path: Path, make_record: MakeRecord, buffer_row: MakeBuffer
) -> Path:
    """A closed store with small and large payloads, two to a group."""
    store = await open_store()
    batch = store.batch()
    batch.put_buffer(buffer_row(1))
    for seq, size in SIZES.items():
        digest = xxhash.xxh3_128_intdigest(payload(seq))
        group = (seq + 1) // 2
        given: dict[str, Any] = {"digest_number": digest, "payload_bytes": size, "fields": 0}
        batch.append(1, make_record(seq, group_id=group, **given), payload(seq))
        batch.put_group(1, GroupRow(id=group, key=f"g{group}", size=2, open_time=0.0))
    batch.put_last_seq(1, max(SIZES))
    await store.commit(batch)
    await store.close()
    move_out(path)
    return path


def test_large_payloads_are_read_and_counted(filled: Path) -> None:
    told: list[tuple[str, int, int]] = []
    report = check(filled, on_progress=lambda *progress: told.append(progress))
    assert report.findings == []
    assert report.is_clean
    assert (report.tables["payloads"].rows, report.tables["extents"].rows) == (2, 4)
    assert report.buffers[0].payload_bytes == sum(SIZES.values())
    assert ("extents", 0, 4) in told


def test_a_transaction_is_held_for_some_payloads_only(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "experience_buffer_server.store.lmdb.verify.walk_process._CHUNK_BYTES", 80_000
    )
    told: list[int] = []

    def say(what: dict[str, Any]) -> None:
        if what.get("at") == "EXTENTS":
            told.append(what["rows"])

    assert Walk(filled, frozenset(), say).run().is_clean
    assert told == [0, 2, 3]


# --- damage


def change_file(path: Path, seq: int) -> None:
    with open(path / NAME, "r+b") as file:
        file.seek(extent_of(path, key_of(seq)).offset + SIZES[seq] // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def cut_file(path: Path, seq: int, num_bytes: int) -> None:
    os.truncate(path / NAME, extent_of(path, key_of(seq)).offset + num_bytes)


def shorten(path: Path, seq: int) -> None:
    extent, content = extent_of(path, key_of(seq)), payload(seq)[:-1]
    short = Extent(extent.offset, len(content), checksum(content))
    put(path, Table.EXTENTS, key_of(seq), encode_extent(short))


def put_both(path: Path, content: bytes) -> None:
    put_large(path, key_of(4), content)
    put(path, Table.PAYLOADS, key_of(4), payload(4))


def free(path: Path, *, damaged: bool) -> None:
    put(path, Table.FREED, freed_key(77, 1 << 30), (4096).to_bytes(8, "big"))
    if damaged:
        flip(path, Table.FREED, freed_key(77, 1 << 30))


class Case(NamedTuple):
    damage: Callable[[Path], None]
    kinds: dict[str, int]
    table: str = "extents"
    """Of the first finding."""


CASES: dict[str, Case] = {
    "a byte": Case(lambda p: change_file(p, 4), {"damaged_row": 1}),
    "cut short": Case(lambda p: cut_file(p, 6, 3 << 20), {"damaged_row": 1}),
    "cut within a block": Case(lambda p: cut_file(p, 6, (3 << 20) + 77), {"damaged_row": 1}),
    "no file": Case(lambda p: (p / NAME).unlink(), {"damaged_row": 4}),
    "a row": Case(lambda p: flip(p, Table.EXTENTS, key_of(4), place=0.4), {"damaged_row": 1}),
    "a key": Case(
        lambda p: flip_key(p, Table.EXTENTS, key_of(4), byte=9, bit=1),
        {"damaged_row": 1, "missing_payload": 1},
    ),
    "of nobody": Case(
        lambda p: put_large(p, payload_key(1, "nobody"), b"x" * 70_000), {"orphan_payload": 1}
    ),
    "of no buffer": Case(
        lambda p: put_large(p, payload_key(9, "nobody"), b"x" * 70_000), {"unknown_buffer": 1}
    ),
    "missing": Case(
        lambda p: put(p, Table.EXTENTS, key_of(4), None), {"missing_payload": 1}, "payloads"
    ),
    "another": Case(lambda p: put_large(p, key_of(4), payload(4).upper()), {"wrong_digest": 1}),
    "shorter": Case(lambda p: shorten(p, 4), {"wrong_size": 1}),
    "not an extent": Case(lambda p: put(p, Table.EXTENTS, key_of(4), b"short"), {"damaged_row": 1}),
    "twice": Case(lambda p: put_both(p, payload(4)), {"orphan_payload": 1}),
    "twice, one of them wrong": Case(
        lambda p: put_both(p, payload(4).upper()), {"orphan_payload": 1}
    ),
    "without its record": Case(
        lambda p: flip(p, Table.RECORDS, numbered_key(1, 4)),
        {"damaged_row": 1, "orphan_payload": 1},
        "records",
    ),
    "a freed run": Case(lambda p: free(p, damaged=True), {"damaged_row": 1}, "freed"),
}


@pytest.mark.parametrize("name", CASES)
def test_damage_is_found(filled: Path, name: str) -> None:
    case = CASES[name]
    case.damage(filled)
    report = check(filled)
    assert dict(report.totals) == case.kinds
    assert report.findings[0].table == case.table
    num_damaged = sum(table.damaged for table in report.tables.values())
    assert num_damaged == case.kinds.get("damaged_row", 0)
    assert bool(problem_of(report)) == (name != "a freed run"), "no experience depends on those"


def test_a_file_that_cannot_be_opened_is_no_damage(filled: Path) -> None:
    """Or all large payloads would be said to be lost where an operator's permissions are missing."""
    (filled / NAME).rename(filled / "other")
    (filled / NAME).symlink_to(NAME)
    with pytest.raises(StoreFailedError, match=r"can't open .*payloads\.bin.*let this user"):
        check(filled)
    (filled / NAME).unlink()
    (filled / "other").rename(filled / NAME)
    assert check(filled).is_clean


def test_a_table_that_was_not_read_is_not_missed(filled: Path) -> None:
    """What the other one holds is compared all the same."""
    put_large(filled, payload_key(1, "nobody"), b"x" * 70_000)
    report = Walk(filled, frozenset({Table.PAYLOADS}), lambda what: None).run()
    assert [(finding.kind, finding.row) for finding in report.findings] == [
        (Kind.ORPHAN_PAYLOAD, "nobody")
    ]
    assert Walk(filled, frozenset({Table.EXTENTS}), lambda what: None).run().is_clean


# --- while a server writes

MOVES = {
    "out of LMDB": "move_out(path)",
    "into LMDB": "move_in(path, key_of(4))",
    "annotated": "annotate(path)",
    "annotated and moved": "annotate(path); move_in(path, key_of(4))",
}


def annotate(path: Path) -> None:
    """Replace a payload, as an annotation does."""
    key = numbered_key(1, 4)
    record = row_codec.decode_record(raw(path, Table.RECORDS, key)[:-SEAL_BYTES])
    record.fields |= OTHER_DIGEST
    record.payload_bytes = 300_000
    put(path, Table.RECORDS, key, row_codec.encode_record(record, msgpack.Packer().pack))
    put_large(path, key_of(4), b"annotated!" * 30_000)


@pytest.mark.parametrize("name", MOVES)
def test_a_payload_that_changes_its_place_meanwhile_is_not_suspected(
    filled: Path, name: str
) -> None:
    if name == "out of LMDB":
        put(filled, Table.EXTENTS, key_of(4), None)
        put(filled, Table.PAYLOADS, key_of(4), payload(4))
    program = (
        "import sys; from pathlib import Path; "
        "from tests.unit.store.lmdb.verify.test_payloads import *; "
        "from tests.unit.store.lmdb.large_by_hand import *; "
        f"path = Path(sys.argv[1]); {MOVES[name]}"
    )
    moved: list[subprocess.CompletedProcess[bytes]] = []

    def say(what: dict[str, Any]) -> None:
        if what.get("at") == "PAYLOADS" and not moved:
            moved.append(subprocess.run([sys.executable, "-c", program, str(filled)], check=True))

    (filled / "lock.mdb").touch()
    report = Walk(filled, frozenset(), say).run()
    assert moved
    assert report.is_clean, report.findings
    assert check(filled).is_clean
