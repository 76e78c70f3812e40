"""The walk through a store: what is wrong is found, what is not isn't, whatever the damage."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash

from experience_buffer_server.store.interface import (
    OTHER_DIGEST,
    AdvantageRow,
    ConsumerRow,
    GroupRow,
    LeaseRow,
    ProgressRow,
    Record,
    StoreFailedError,
    StoreFormatError,
)
from experience_buffer_server.store.lmdb.disk.format import (
    Table,
    buffer_key,
    memory_key,
    named_key,
    numbered_key,
    payload_key,
)
from experience_buffer_server.store.lmdb.translation import Translation
from experience_buffer_server.store.lmdb.verify.check import Kind, Report, check
from experience_buffer_server.store.lmdb.verify.walk_process import Walk
from tests.damaging import flip, raw
from tests.unit.store.conftest import MakeBuffer, MakeRecord, OpenStore

NUM = 23


def payload(seq: int) -> bytes:
    return f"payload {seq};".encode() * (seq * 37)


def append(batch: Any, make_record: MakeRecord, seq: int, /, **changes: Any) -> Record:
    """An experience that fits its payload; two of them are a group."""
    given = {
        "digest_number": xxhash.xxh3_128_intdigest(payload(seq)),
        "payload_bytes": len(payload(seq)),
        "group_id": (seq + 1) // 2,
        "fields": 0,
    }
    record = make_record(**({"seq": seq} | given | changes))
    batch.append(1, record, payload(seq))
    return record


@pytest.fixture
async def filled(
    open_store: OpenStore, path: Path, make_record: MakeRecord, buffer_row: MakeBuffer
) -> Path:
    """A closed store with some of everything."""
    store = await open_store()
    batch = store.batch()
    batch.put_buffer(buffer_row(1))
    for seq in range(1, NUM):
        append(batch, make_record, seq)
        row = AdvantageRow(
            seq=seq,
            advantages=b"\1\2\3\4" * seq,
            returns=b"\2" * 4 * seq,
            details={"mean_magnitude": seq / 7},
        )
        batch.put_advantages(1, row, magnitude=seq / 7)
        batch.put_group(
            1, GroupRow(id=(seq + 1) // 2, key=str(seq), size=2, open_time=0.0, closed="whole")
        )
    batch.append(1, make_record(NUM, tombstone=True, group_id=0, payload_bytes=0), b"")
    batch.put_lease(1, LeaseRow(id=1, consumer="trainer", units=[[3, 4]], deadline=9e9))
    batch.put_progress(1, ProgressRow(seq=5, acked=["trainer"]))
    batch.put_consumer(1, ConsumerRow(name="trainer", last_step=3))
    batch.put_last_seq(1, NUM)
    batch.remember(1, "uid", "gone", b"digest", 73.5)
    await store.commit(batch)
    await store.close()
    return path


def uid(seq: int) -> str:
    return f"3/math-{seq}/5/7/é"


def kinds(report: Report) -> dict[str, int]:
    return dict(report.totals)


def test_a_sound_store_is_clean_and_counted(filled: Path) -> None:
    told: list[tuple[str, int, int]] = []
    report = check(filled, on_progress=lambda *progress: told.append(progress))
    assert report.is_clean
    assert (kinds(report), report.findings) == ({}, [])
    (buffer,) = report.buffers
    assert (buffer.name, buffer.num_experiences, buffer.num_tombstones) == ("buffer-1", 22, 1)
    assert buffer.payload_bytes == sum(len(payload(seq)) for seq in range(1, NUM))
    assert (buffer.num_groups, buffer.num_open_leases, buffer.num_computed) == (11, 1, 22)
    assert report.tables["records"].rows == NUM
    assert {name for name, _, _ in told} == {table.disk_name.decode() for table in Table}
    assert ("payloads", 0, 22) in told
    again = Report.from_json(json.loads(json.dumps(report.to_json())))
    assert again == report
    assert not list(filled.glob("*.tmp"))


ROWS: dict[str, tuple[Table, bytes]] = {
    "buffer": (Table.BUFFERS, buffer_key(1)),
    "copy": (Table.BUFFER_COPIES, buffer_key(1)),
    "counter": (Table.COUNTERS, buffer_key(1)),
    "record": (Table.RECORDS, numbered_key(1, 7)),
    "group": (Table.GROUPS, numbered_key(1, 4)),
    "lease": (Table.LEASES, numbered_key(1, 1)),
    "progress": (Table.PROGRESS, numbered_key(1, 5)),
    "consumer": (Table.CONSUMERS, named_key(1, "trainer")),
    "payload": (Table.PAYLOADS, payload_key(1, uid(19))),
    "large payload": (Table.PAYLOADS, payload_key(1, uid(22))),
    "advantages": (Table.ADVANTAGES, numbered_key(1, 8)),
    "magnitude": (Table.MAGNITUDES, numbered_key(1, 8)),
    "memory": (Table.MEMORY, memory_key(1, "uid", "gone")),
}
ALSO = {"record": {"orphan_payload": 1}}
"""What follows from the damage."""


@pytest.mark.parametrize("name", ROWS)
def test_damage_is_found(filled: Path, name: str) -> None:
    table, key = ROWS[name]
    flip(filled, table, key, place=0.9)
    report = check(filled)
    assert kinds(report) == {"damaged_row": 1} | ALSO.get(name, {})
    assert not report.is_clean
    assert report.tables[table.disk_name.decode()].damaged == 1
    found = next(finding for finding in report.findings if finding.kind is Kind.DAMAGED_ROW)
    assert (found.table, found.buffer) == (table.disk_name.decode(), 1)


async def test_what_does_not_fit_together_is_found(
    filled: Path, open_store: OpenStore, make_record: MakeRecord
) -> None:
    store = await open_store()
    batch = store.batch()
    operations: list[tuple[Table, bytes, bytes | None]] = [
        (Table.PAYLOADS, payload_key(1, uid(1)), None),
        (Table.PAYLOADS, payload_key(1, "nobody"), b"orphan"),
        (Table.PAYLOADS, payload_key(1, uid(2)), payload(2)[:-1]),
        (Table.PAYLOADS, payload_key(1, uid(3)), payload(3).upper()),
        (Table.PAYLOADS, payload_key(1, uid(4)), payload(4).upper()),
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


async def test_nothing_is_suspected_of_a_store_that_is_being_written(
    open_store: OpenStore, path: Path, make_record: MakeRecord, buffer_row: MakeBuffer
) -> None:
    """Experiences come, are computed, annotated and go while it is read part by part."""
    store = await open_store()
    batch = store.batch()
    batch.put_buffer(buffer_row(1))
    await store.commit(batch)
    checking = True

    async def write() -> None:
        seq = 0
        while checking:
            batch = store.batch()
            for _ in range(9):
                seq += 1
                append(batch, make_record, seq % 997 + 1, seq=seq, uid=uid(seq), group_id=0)
                row = AdvantageRow(seq=seq, advantages=b"\1" * 4, returns=b"\1" * 4, details={})
                batch.put_advantages(1, row)
                if seq > 99:
                    batch.remove(1, make_record(seq - 99))
            await store.commit(batch)

    writing = asyncio.ensure_future(write())
    try:
        for _ in range(2):
            report = await asyncio.to_thread(check, path)
            assert report.is_clean, report.findings[:3]
            assert not writing.done()
    finally:
        checking = False
        await writing


def test_a_page_that_lmdb_cannot_read_is_a_finding(filled: Path) -> None:
    """Whether LMDB says so, or ends the process: the other tables are looked at all the same."""
    stored = raw(filled, Table.PAYLOADS, payload_key(1, uid(1)))
    file = filled / "data.mdb"
    data = bytearray(file.read_bytes())
    start = data.find(stored)
    while start >= 0:
        page = start // 4096 * 4096
        data[page + 10 : page + 16] = b"\xff" * 6
        start = data.find(stored, start + 1)
    file.write_bytes(data)
    report = check(filled)
    assert report.totals[Kind.CRASH] + report.totals[Kind.DAMAGED_PAGE] == 1
    assert report.tables["records"].rows == NUM
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
    file, key = filled / "data.mdb", payload_key(1, uid(22))
    data = bytearray(file.read_bytes())
    start = data.find(key)
    while start >= 0:
        # Before the key: size (4 bytes, the upper half last), flags and length of the key.
        data[start - 6 : start - 4] = b"\xff\x7f"
        start = data.find(key, start + 1)
    file.write_bytes(data)
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


CREATE = """
import sys
from pathlib import Path
import msgpack
from experience_buffer_server.store.batch import WriteBatch
from experience_buffer_server.store.interface import BufferRow
from experience_buffer_server.store.lmdb.engine import Engine
from experience_buffer_server.store.lmdb.translation import Translation
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


def test_a_buffer_that_is_created_meanwhile_is_known(filled: Path) -> None:
    created: list[subprocess.CompletedProcess[bytes]] = []

    def say(what: dict[str, Any]) -> None:
        if what.get("at") == "PAYLOADS" and not created:
            created.append(subprocess.run([sys.executable, "-c", CREATE, str(filled)], check=True))

    (filled / "lock.mdb").touch()
    report = Walk(filled, frozenset(), say).run()
    assert created
    assert report.tables["memory"].rows == 2
    assert report.is_clean, report.findings
