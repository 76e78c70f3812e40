"""The walk through a store: what is wrong is found, what is not isn't, whatever the damage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import xxhash

from experience_buffer_server.store.interface import (
    OTHER_DIGEST,
    AdvantageRow,
    LeaseRow,
    ProgressRow,
    StoreFailedError,
    StoreFormatError,
)
from experience_buffer_server.store.lmdb.disk.format import (
    Extent,
    Table,
    buffer_key,
    encode_extent,
    freed_key,
    memory_key,
    named_key,
    numbered_key,
    payload_key,
)
from experience_buffer_server.store.lmdb.large.payload_file import NAME
from experience_buffer_server.store.lmdb.snapshots.inventory import problem_of
from experience_buffer_server.store.lmdb.verify.check import Kind, Report, check
from experience_buffer_server.store.lmdb.verify.walk_process import Walk
from experience_buffer_server.store.lmdb.writer_protocol import Translation
from experience_buffer_server.store.payload import checksum
from tests.damaging import changing, flip, flip_key, raw
from tests.unit.store.conftest import OpenStore, buffer_row, make_record
from tests.unit.store.lmdb.large_by_hand import extent_of, put, put_large
from tests.unit.store.lmdb.verify.conftest import LARGE, NUM, key_of, payload, uid

NUM_RECORDS = NUM + len(LARGE)


def kinds(report: Report) -> dict[str, int]:
    return dict(report.totals)


def test_a_sound_store_is_clean_and_counted(filled: Path) -> None:
    told: list[tuple[str, int, int]] = []
    report = check(filled, on_progress=lambda *progress: told.append(progress))
    assert report.is_clean
    assert (kinds(report), report.findings) == ({}, [])
    (buffer,) = report.buffers
    assert (buffer.name, buffer.num_experiences, buffer.num_tombstones) == ("buffer-1", 26, 1)
    assert buffer.payload_bytes == sum(len(payload(seq)) for seq in (*range(1, NUM), *LARGE))
    assert (buffer.num_groups, buffer.num_open_leases, buffer.num_computed) == (14, 1, 22)
    assert {name: report.tables[name].rows for name in ("records", "payloads", "extents")} == {
        "records": NUM_RECORDS,
        "payloads": 22,
        "extents": 4,
    }
    assert {name for name, _, _ in told} == {table.disk_name.decode() for table in Table}
    assert {("payloads", 0, 22), ("extents", 0, 4)} <= set(told)
    again = Report.from_json(json.loads(json.dumps(report.to_json())))
    assert again == report
    assert not list(filled.glob("*.tmp"))


def change_file(path: Path, seq: int) -> None:
    with open(path / NAME, "r+b") as file:
        file.seek(extent_of(path, key_of(seq)).offset + LARGE[seq] // 2)
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
    put_large(path, key_of(26), content)
    put(path, Table.PAYLOADS, key_of(26), payload(26))


def free(path: Path, *, damaged: bool) -> None:
    put(path, Table.FREED, freed_key(77, 1 << 30), (4096).to_bytes(8, "big"))
    if damaged:
        flip(path, Table.FREED, freed_key(77, 1 << 30))


class Case(NamedTuple):
    damage: Callable[[Path], None]
    kinds: dict[str, int]
    table: str = "extents"
    """Of the first finding."""
    is_secondary: bool = False
    """No experience depends on it."""


def flipped(table: Table, key: bytes, *, is_secondary: bool = False, **also: int) -> Case:
    """A bit of a row's checksum, or close to it; with what follows from the damage."""
    return Case(
        lambda p: flip(p, table, key, place=0.9),
        {"damaged_row": 1, **also},
        table.disk_name.decode(),
        is_secondary,
    )


CASES: dict[str, Case] = {
    "buffer": flipped(Table.BUFFERS, buffer_key(1), is_secondary=True),
    "copy": flipped(Table.BUFFER_COPIES, buffer_key(1), is_secondary=True),
    "counter": flipped(Table.COUNTERS, buffer_key(1), is_secondary=True),
    "record": flipped(Table.RECORDS, numbered_key(1, 7), orphan_payload=1),
    "group": flipped(Table.GROUPS, numbered_key(1, 4)),
    "lease": flipped(Table.LEASES, numbered_key(1, 1), is_secondary=True),
    "progress": flipped(Table.PROGRESS, numbered_key(1, 5), is_secondary=True),
    "consumer": flipped(Table.CONSUMERS, named_key(1, "trainer"), is_secondary=True),
    "payload": flipped(Table.PAYLOADS, key_of(19)),
    "payload on pages of its own": flipped(Table.PAYLOADS, key_of(22)),
    "advantages": flipped(Table.ADVANTAGES, numbered_key(1, 8)),
    "magnitude": flipped(Table.MAGNITUDES, numbered_key(1, 8), is_secondary=True),
    "memory": flipped(Table.MEMORY, memory_key(1, "uid", "gone"), is_secondary=True),
    "a byte": Case(lambda p: change_file(p, 26), {"damaged_row": 1}),
    "cut short": Case(lambda p: cut_file(p, 27, 3 << 20), {"damaged_row": 1}),
    "cut within a block": Case(lambda p: cut_file(p, 27, (3 << 20) + 77), {"damaged_row": 1}),
    "no file": Case(lambda p: (p / NAME).unlink(), {"damaged_row": 4}),
    "a row": Case(lambda p: flip(p, Table.EXTENTS, key_of(26), place=0.4), {"damaged_row": 1}),
    "a key": Case(
        lambda p: flip_key(p, Table.EXTENTS, key_of(26), byte=9, bit=1),
        {"damaged_row": 1, "missing_payload": 1},
    ),
    "of nobody": Case(
        lambda p: put_large(p, payload_key(1, "nobody"), b"x" * 70_000), {"orphan_payload": 1}
    ),
    "of no buffer": Case(
        lambda p: put_large(p, payload_key(9, "nobody"), b"x" * 70_000), {"unknown_buffer": 1}
    ),
    "missing": Case(
        lambda p: put(p, Table.EXTENTS, key_of(26), None), {"missing_payload": 1}, "payloads"
    ),
    "another": Case(lambda p: put_large(p, key_of(26), payload(26).upper()), {"wrong_digest": 1}),
    "shorter": Case(lambda p: shorten(p, 26), {"wrong_size": 1}),
    "not an extent": Case(
        lambda p: put(p, Table.EXTENTS, key_of(26), b"short"), {"damaged_row": 1}
    ),
    "twice": Case(lambda p: put_both(p, payload(26)), {"orphan_payload": 1}),
    "twice, one of them wrong": Case(
        lambda p: put_both(p, payload(26).upper()), {"orphan_payload": 1}
    ),
    "without its record": Case(
        lambda p: flip(p, Table.RECORDS, numbered_key(1, 26)),
        {"damaged_row": 1, "orphan_payload": 1},
        "records",
    ),
    "a freed run": Case(lambda p: free(p, damaged=True), {"damaged_row": 1}, "freed", True),
}


@pytest.mark.parametrize("name", CASES)
def test_damage_is_found(filled: Path, name: str) -> None:
    case = CASES[name]
    case.damage(filled)
    report = check(filled)
    assert kinds(report) == case.kinds
    assert not report.is_clean
    assert report.findings[0].table == case.table
    num_damaged = sum(table.damaged for table in report.tables.values())
    assert num_damaged == case.kinds.get("damaged_row", 0)
    assert bool(problem_of(report)) != case.is_secondary


async def test_what_does_not_fit_together_is_found(filled: Path, open_store: OpenStore) -> None:
    store = await open_store()
    batch = store.batch()
    operations: list[tuple[Table, bytes, bytes | None]] = [
        (Table.PAYLOADS, key_of(1), None),
        (Table.PAYLOADS, payload_key(1, "nobody"), b"orphan"),
        (Table.PAYLOADS, key_of(2), payload(2)[:-1]),
        (Table.PAYLOADS, key_of(3), payload(3).upper()),
        (Table.PAYLOADS, key_of(4), payload(4).upper()),
        (Table.GROUPS, numbered_key(1, 6), None),
        (Table.ADVANTAGES, numbered_key(1, 14), None),
        (Table.MAGNITUDES, numbered_key(1, 15), None),
        (Table.GROUPS, numbered_key(997, 1), b"of no buffer"),
    ]
    batch.put_record(
        1, make_record(4, payload_bytes=len(payload(4)), group_id=2, fields=OTHER_DIGEST)
    )
    batch.put_lease(1, LeaseRow(id=2, consumer="trainer", units=[[997]], deadline=9e9))
    batch.put_progress(1, ProgressRow(seq=998))
    batch.put_record(
        1,
        make_record(
            5,
            digest_number=xxhash.xxh3_128_intdigest(payload(5)),
            payload_bytes=len(payload(5)),
            group_id=3,
            fields=0,
            note="set aside before",
        ),
    )
    translation = Translation(batch.operations)
    translation.operations[:0] = [(int(table), key, value) for table, key, value in operations]
    await store._submit(translation)
    await store.close()
    report = check(filled)
    assert kinds(report) == {
        "missing_payload": 1,
        "orphan_payload": 1,
        "wrong_size": 1,
        "wrong_digest": 1,
        "missing_group": 1,
        "missing_advantages": 1,
        "orphan_advantages": 1,
        "unknown_buffer": 1,
        "set_aside": 1,
        "leftover": 2,
    }
    rows = {finding.kind: finding.row for finding in report.findings}
    assert (rows[Kind.MISSING_PAYLOAD], rows[Kind.ORPHAN_PAYLOAD]) == (uid(1), "nobody")
    assert (rows[Kind.WRONG_SIZE], rows[Kind.WRONG_DIGEST]) == (uid(2), uid(3))


def test_a_page_that_lmdb_cannot_read_is_a_finding(filled: Path) -> None:
    """Whether LMDB says so, or ends the process: the other tables are looked at all the same."""
    for data, start in changing(filled, raw(filled, Table.PAYLOADS, key_of(1))):
        page = start // 4096 * 4096
        data[page + 10 : page + 16] = b"\xff" * 6
    report = check(filled)
    assert report.totals[Kind.CRASH] + report.totals[Kind.DAMAGED_PAGE] == 1
    assert report.tables["records"].rows == NUM_RECORDS
    assert not report.totals[Kind.MISSING_PAYLOAD], "what wasn't read isn't missed"


def test_a_file_cut_short_is_refused_with_its_length(filled: Path) -> None:
    file = filled / "data.mdb"
    size = file.stat().st_size
    with open(file, "r+b") as out:
        out.truncate(32768)
    with pytest.raises(StoreFormatError, match="cut short: it has 32768 bytes") as caught:
        check(filled)
    assert "restore the store from a snapshot" in str(caught.value)
    assert size > 32768


async def test_a_damaged_meta_page_is_named(filled: Path, open_store: OpenStore) -> None:
    file = filled / "data.mdb"
    data = bytearray(file.read_bytes())
    data[4096 + 16] ^= 1
    file.write_bytes(data)
    text = r"its meta page 1 is damaged \(it isn't marked as one\), the other one is of commit \d"
    with pytest.raises(StoreFormatError, match=text):
        check(filled)
    with pytest.raises(StoreFormatError, match=text):
        await open_store()


def test_no_store_is_no_crash(tmp_path: Path) -> None:
    with pytest.raises((StoreFormatError, StoreFailedError)):
        check(tmp_path / "nowhere")


def test_a_table_that_ends_the_process_is_a_finding(filled: Path) -> None:
    """The node of a large payload says that it is longer than the map: whoever reads it dies."""
    for data, start in changing(filled, key_of(22)):
        # Before the key: size (4 bytes, the upper half last), flags and length of the key.
        data[start - 6 : start - 4] = b"\xff\x7f"
    report = check(filled)
    (finding,) = report.findings
    assert (finding.kind, finding.table) == (Kind.CRASH, "payloads")
    assert "ended the process that read it (SIG" in finding.message
    assert report.tables["advantages"].rows == NUM - 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_walk_that_somebody_ended_says_nothing_of_the_store(
    filled: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """As the system does where memory runs out."""
    started = subprocess.Popen

    def ended(*args: Any, **options: Any) -> Any:
        process = started(*args, **options)
        process.send_signal(number)
        return process

    monkeypatch.setattr("experience_buffer_server.store.lmdb.verify.check.subprocess.Popen", ended)
    with pytest.raises(StoreFailedError, match=f"{number.name}; this says nothing of the store"):
        check(filled)


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


async def test_what_has_left_and_is_not_archived_is_sound_and_counted(
    open_store: OpenStore, path: Path
) -> None:
    """Small and large, also one whose uid is used again; its damage is found like any other."""
    store = await open_store()
    records = [make_record(seq) for seq in (1, 2, 3)]
    again = make_record(4)
    again.uid = records[0].uid
    contents = [b"small", b"l" * 100_000, b"third", b"again"]
    for record, content in zip((*records, again), contents, strict=True):
        record.payload_bytes = len(content)
        record.digest_number = int.from_bytes(xxhash.xxh3_128_digest(content), "big")
    batch = store.batch()
    batch.put_buffer(buffer_row(1))
    for record, content in zip(records, contents, strict=False):
        record.group_id = 0
        batch.append(1, record, content)
        computed = AdvantageRow(seq=record.seq, advantages=b"", returns=b"", details={})
        batch.put_advantages(1, computed)
    await store.commit(batch)
    batch = store.batch()
    for record in records[:2]:
        batch.depart(1, record, b"why")
    batch.free_uid(1, 1, again.uid)
    again.group_id = 0
    batch.append(1, again, contents[3])
    await store.commit(batch)
    await store.close()
    report = check(path)
    assert (report.findings, problem_of(report)) == ([], "")
    (buffer,) = report.buffers
    assert (buffer.num_experiences, buffer.num_departed) == (2, 2)
    flip(path, Table.DEPARTED, numbered_key(1, 2))
    report = check(path)
    assert report.tables["departed"].damaged == 1
    # Of what it was, nobody knows any more: its payload and its advantages are nobody's.
    assert problem_of(report)
