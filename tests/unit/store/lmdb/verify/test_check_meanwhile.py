"""A check of a store that is written to: nothing is suspected, whatever comes, moves and goes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest

from experience_buffer_server.store import row_codec
from experience_buffer_server.store.interface import OTHER_DIGEST, AdvantageRow
from experience_buffer_server.store.lmdb.disk.format import SEAL_BYTES, Table, numbered_key
from experience_buffer_server.store.lmdb.verify.check import Report, check
from experience_buffer_server.store.lmdb.verify.walk_process import Walk
from tests.damaging import raw
from tests.unit.store.conftest import OpenStore, buffer_row, committing, make_record
from tests.unit.store.lmdb.large_by_hand import put, put_large
from tests.unit.store.lmdb.verify.conftest import append, key_of, payload, uid


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


async def test_nothing_is_suspected_of_a_store_that_is_being_written(
    open_store: OpenStore, path: Path
) -> None:
    """Experiences come, are computed, annotated and go while it is read part by part."""
    store = await open_store()
    async with committing(store) as batch:
        batch.put_buffer(buffer_row(1))
    checking = True

    async def write() -> None:
        seq = 0
        while checking:
            async with committing(store) as batch:
                for _ in range(9):
                    seq += 1
                    append(batch, seq % 997 + 1, seq=seq, uid=uid(seq), group_id=0)
                    row = AdvantageRow(seq=seq, advantages=b"\1" * 4, returns=b"\1" * 4, details={})
                    batch.put_advantages(1, row)
                    if seq > 99:
                        batch.remove(1, make_record(seq - 99))

    writing = asyncio.ensure_future(write())
    try:
        for _ in range(2):
            report = await asyncio.to_thread(check, path)
            assert report.is_clean, report.findings[:3]
            assert not writing.done()
    finally:
        checking = False
        await writing


CREATE = """
import sys
from pathlib import Path
import msgpack
from experience_buffer_server.store.batch import WriteBatch
from experience_buffer_server.store.interface import BufferRow
from experience_buffer_server.store.lmdb.engine import Engine
from experience_buffer_server.store.lmdb.writer_protocol import Translation
from experience_buffer_server.store.lmdb.writer_protocol import Request
batch = WriteBatch(msgpack.Packer().pack)
batch.put_buffer(BufferRow(id=2, name="new", config="{}", policy_version=None, create_time=0.0))
batch.remember(2, "uid", "one", b"digest", 1.0)
engine = Engine(Path(sys.argv[1]), sync=True, initial_map_bytes=1 << 24, max_map_bytes=1 << 26)
((result,), _) = engine.write([Request(1, 0, Translation(batch.operations).operations)])
assert result.status == 0, result
engine.close()
"""


def test_a_store_that_a_server_starts_on_meanwhile_is_read_again(filled: Path) -> None:
    """Without a lock file nothing keeps the server from writing over what is being read."""
    (filled / "lock.mdb").unlink()
    tables: list[str] = []

    def on_progress(table: str, *_: int) -> None:
        if not tables:
            subprocess.run([sys.executable, "-c", CREATE, str(filled)], check=True)
        if tables[-1:] != [table]:
            tables.append(table)

    report = check(filled, on_progress=on_progress)
    assert report.is_clean, report.findings
    assert report.tables["memory"].rows == 2
    assert tables.count("records") == 2
    (filled / "lock.mdb").unlink()
    assert check(filled).is_clean
    assert not (filled / "lock.mdb").exists(), "a snapshot stays as it is"


def walked_beside(program: str, path: Path) -> Report:
    """What is found while another process runs a program, between the index and the payloads."""
    ended: list[subprocess.CompletedProcess[bytes]] = []

    def say(what: dict[str, Any]) -> None:
        if what.get("at") == "PAYLOADS" and not ended:
            ended.append(subprocess.run([sys.executable, "-c", program, str(path)], check=True))

    (path / "lock.mdb").touch()
    report = Walk(path, frozenset(), say).run()
    assert ended
    return report


def test_a_buffer_that_is_created_meanwhile_is_known(filled: Path) -> None:
    report = walked_beside(CREATE, filled)
    assert report.tables["memory"].rows == 2
    assert report.is_clean, report.findings


MOVES = {
    "out of LMDB": "move_out(path)",
    "into LMDB": "move_in(path, key_of(26))",
    "annotated": "annotate(path)",
    "annotated and moved": "annotate(path); move_in(path, key_of(26))",
}


def annotate(path: Path) -> None:
    """Replace a payload, as an annotation does."""
    key = numbered_key(1, 26)
    record = row_codec.decode_record(raw(path, Table.RECORDS, key)[:-SEAL_BYTES])
    record.fields |= OTHER_DIGEST
    record.payload_bytes = 300_000
    put(path, Table.RECORDS, key, row_codec.encode_record(record, msgpack.Packer().pack))
    put_large(path, key_of(26), b"annotated!" * 30_000)


@pytest.mark.parametrize("name", MOVES)
def test_a_payload_that_changes_its_place_meanwhile_is_not_suspected(
    filled: Path, name: str
) -> None:
    if name == "out of LMDB":
        put(filled, Table.EXTENTS, key_of(26), None)
        put(filled, Table.PAYLOADS, key_of(26), payload(26))
    program = (
        "import sys; from pathlib import Path; "
        "from tests.unit.store.lmdb.verify.test_check_meanwhile import *; "
        "from tests.unit.store.lmdb.large_by_hand import *; "
        f"path = Path(sys.argv[1]); {MOVES[name]}"
    )
    report = walked_beside(program, filled)
    assert report.is_clean, report.findings
    assert check(filled).is_clean
