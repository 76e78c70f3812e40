"""Snapshots of a store: whole or not there, also where something is missing or damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import xxhash

from experience_buffer_server.buffer.settings_checks import MAX_CONFIG_BYTES
from experience_buffer_server.runtime.memory_arena import BLOCK_BYTES
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.settings.server import ServerSection
from experience_buffer_server.store.interface import (
    DamagedRecordError,
    StoreFailedError,
    StoreFullError,
)
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import (
    Table,
    buffer_key,
    named_key,
    numbered_key,
)
from experience_buffer_server.store.lmdb.large.payload_file import NAME
from experience_buffer_server.store.lmdb.reader import LmdbReader
from experience_buffer_server.store.lmdb.snapshots import copy_process, manifest
from experience_buffer_server.store.lmdb.snapshots import payloads as snapshot_payloads
from experience_buffer_server.store.lmdb.snapshots.copy_process import answer_to, take
from experience_buffer_server.store.lmdb.snapshots.folder import DATA_NAME, SnapshotFolder
from experience_buffer_server.store.lmdb.snapshots.manifest import (
    SnapshotBusyError,
    SnapshotError,
    read_manifest,
)
from experience_buffer_server.store.lmdb.snapshots.restore import restore
from tests.damaging import changing, flip
from tests.unit.store.conftest import MEBI, OpenStore, buffer_row, committing, make_record
from tests.unit.store.lmdb.snapshots.conftest import (
    HOLE_BYTES,
    HUGE,
    LITTLE,
    NUM,
    OTHER,
    PLACES,
    SMALL,
    STORED_BYTES,
    WANTED,
    disk_bytes,
    names,
    payloads_of,
    run_copy,
)

FILE_BYTES = HOLE_BYTES + 9 * MEBI + BLOCK_BYTES
"""Of large payloads, holes included."""


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "to"


def test_a_snapshot_says_what_it_holds(filled: Path, to: Path) -> None:
    before = datetime.now(UTC)
    answer = take(filled, to, label="before-step-18")
    taken = to / answer.name
    assert answer.outcome == "taken"
    assert answer.name.endswith("Z-before-step-18")
    assert names(taken) == [DATA_NAME, "manifest.json", NAME]
    assert payloads_of(taken) == WANTED
    found = read_manifest(taken)
    assert before <= found.create_time <= datetime.now(UTC)
    assert found.store_format == disk.FORMAT_VERSION
    sizes = [(taken / name).stat().st_size for name in (DATA_NAME, NAME)]
    assert [found.data_bytes, found.payloads_bytes] == sizes
    assert found.data_bytes < (filled / DATA_NAME).stat().st_size, "it is compact"
    assert found.payloads_stored_bytes == STORED_BYTES
    assert answer.num_bytes == found.num_bytes == found.data_bytes + STORED_BYTES
    files = [taken / DATA_NAME, taken / NAME]
    said = subprocess.run(["sha256sum", *files], check=True, capture_output=True, text=True)
    assert said.stdout.split()[::2] == [found.sha256, found.payloads_sha256]
    buffer, empty = found.buffers
    assert (buffer.name, buffer.policy_version) == ("buffer-3", 37)
    assert (buffer.num_experiences, buffer.num_tombstones) == (NUM, 1)
    assert (buffer.num_groups, buffer.num_open_leases) == (1, 1)
    assert buffer.num_bytes == sum(map(len, WANTED.values()))
    assert buffer.config == {"group_size": 8}
    (consumer,) = buffer.consumers
    assert (consumer.name, consumer.last_step, consumer.safe_step) == ("trainer", 17, 7)
    assert (empty.name, empty.num_experiences) == ("buffer-4", 0)


def test_only_payloads_are_copied_and_nobody_else_may_read_them(
    taken: Path, tmp_path: Path
) -> None:
    """Neither holes nor what is free in the file."""
    new = tmp_path / "new"
    restore(taken, new)
    for file in (taken / NAME, new / NAME):
        assert file.stat().st_size == FILE_BYTES
        assert STORED_BYTES <= disk_bytes(file) < STORED_BYTES + MEBI
        assert file.stat().st_mode & 0o777 == 0o600
        data = file.read_bytes()
        assert not any(data[PLACES["3/other/5/7/a"][0] + 102_400 : HOLE_BYTES])


async def test_what_a_server_stored_is_restored(
    path: Path, open_store: OpenStore, to: Path, tmp_path: Path
) -> None:
    """With records, by another process, while the store is open."""
    store = await open_store()
    async with committing(store) as batch:
        batch.put_buffer(buffer_row(3))
        payloads = {1: SMALL, 2: b"little", 3: HUGE, 4: OTHER}
        records = [
            make_record(
                seq,
                payload_bytes=len(payload),
                digest_number=xxhash.xxh3_128_intdigest(payload),
                group_id=0,
            )
            for seq, payload in payloads.items()
        ]
        for record in records:
            batch.append(3, record, payloads[record.seq])
    async with committing(store) as batch:
        batch.remove(3, records.pop(2))
    answer = run_copy(path, to)
    assert (answer.outcome, answer.num_experiences) == ("taken", 3), answer
    restore(to / answer.name, tmp_path / "new", verify=True)
    with LmdbReader(tmp_path / "new") as reader:
        found = reader.payloads(3, [record.uid for record in records])
    assert found == [payloads[record.seq] for record in records]


def test_what_was_interrupted_is_removed_and_nobody_else_s(filled: Path, to: Path) -> None:
    for name in (".partial-snapshot-x", ".partial-removed-snapshot-y", "notes"):
        (to / name).mkdir(parents=True)
        (to / name / DATA_NAME).write_bytes(b"half")
    with SnapshotFolder(to).locked(), pytest.raises(SnapshotBusyError, match="another process"):
        take(filled, to)
    assert len(names(to)) == 3, "the other process may be writing it"
    answer = take(filled, to)
    assert names(to) == ["notes", answer.name]
    again = take(filled, to, keep=1)
    assert (again.message, again.removed) == ("", [answer.name])


def test_what_could_not_be_removed_is_said(
    taken: Path, filled: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SnapshotFolder, "_removed", lambda *_: False)
    monkeypatch.setattr(SnapshotFolder, "clean", lambda folder: folder.problems.append("stuck"))
    answer = answer_to(filled, to, label="", keep=1)
    assert (answer.outcome, answer.message, answer.removed) == ("taken", "stuck", [])


def test_no_store_no_snapshot(tmp_path: Path, to: Path) -> None:
    with pytest.raises(SnapshotError, match="holds no store"):
        take(tmp_path, to)
    assert not to.exists()


def test_the_process_ends_with_its_owner_and_leaves_nothing_whole(filled: Path, to: Path) -> None:
    command = [sys.executable, "-m", "experience_buffer_server.store.lmdb.snapshots.copy_process"]
    command += ["--data", str(filled), "--to", str(to)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.read()
    assert (process.returncode, said) == (1, b"")
    assert SnapshotFolder(to).snapshots() == []


# --- the manifest


def test_as_many_buffers_as_there_may_be_fit_into_a_manifest() -> None:
    """Each with 64 consumers; with the longest settings that are taken, too."""
    consumers = [{"name": f"{number:064}", "staleness": {"max_lag": 4}} for number in range(64)]
    settings = BufferSettings.model_validate({"consumers": consumers})
    length, written = len(settings.model_dump_json()), len(settings.model_dump_json(indent=6))
    assert written / length * MAX_CONFIG_BYTES * ServerSection().max_buffers < manifest.MAX_BYTES


def test_a_manifest_that_could_not_be_read_is_not_written(
    taken: Path, filled: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = (taken / manifest.MANIFEST_NAME).stat().st_size
    monkeypatch.setattr(manifest, "MAX_BYTES", num_bytes)
    take(filled, to)
    monkeypatch.setattr(manifest, "MAX_BYTES", num_bytes - 1)
    answer = answer_to(filled, to, label="", keep=0)
    assert answer.outcome == "failed"
    assert f"the settings of 2 buffers, would have {num_bytes} bytes" in answer.message
    assert len(list(to.glob("*snapshot*"))) == 2


# --- beside a writer

_READERS = "import lmdb, sys; print(lmdb.open(sys.argv[1], readonly=True).readers())"
_GROW = """
import lmdb, sys
from experience_buffer_server.store.lmdb.disk.commit_number import sign_commit
with lmdb.open(sys.argv[1], map_size=256 << 20, max_dbs=32) as env:
    db = env.open_db(b"payloads")
    meta = env.open_db(b"meta")
    with env.begin(write=True) as txn:
        txn.put(b"x", bytes(64 << 20), db=db)
    with env.begin(write=True) as txn:
        txn.delete(b"x", db=db)
        sign_commit(txn, meta)  # The pages stay: the file never shrinks.
"""


def _beside(script: str, path: Path) -> str:
    """Run a script on a store in another process: one must not open it twice."""
    command = [sys.executable, "-c", script, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_what_is_copied_is_not_written_over_meanwhile(
    filled: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []

    def copy(source: Path, partial: Path) -> int:
        readers.append(_beside(_READERS, filled))
        return snapshot_payloads.copy_payloads(source, partial)

    monkeypatch.setattr(copy_process, "copy_payloads", copy)
    take(filled, to)
    (said,) = readers
    # A line per process: its id, its thread, and the transaction that it has open.
    open_ = [row.split() for row in said.splitlines()[1:] if row]
    assert [row[0] for row in open_ if row[2] != "-"] == [str(os.getpid())], said


def test_a_map_that_grows_meanwhile_is_taken_over(
    filled: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No transaction may be open then: the copy begins again with another."""
    check_room = copy_process._check_room
    calls: list[int] = []

    def grow(txn: Any, tables: Any, partial: Path) -> None:
        calls.append(txn.id())
        if len(calls) == 1:
            _beside(_GROW, filled)
        check_room(txn, tables, partial)

    monkeypatch.setattr(copy_process, "_check_room", grow)
    taken = to / take(filled, to).name
    assert calls == [calls[0], calls[0] + 2]
    assert payloads_of(taken) == WANTED


# --- no room


@pytest.mark.parametrize("max_file_bytes", [65536, HOLE_BYTES + MEBI], ids=["first", "second"])
def test_a_full_disk_gives_no_snapshot(filled: Path, to: Path, max_file_bytes: int) -> None:
    """Neither where the first file doesn't fit, nor where the second doesn't."""
    answer = run_copy(filled, to, max_file_bytes=max_file_bytes)
    assert answer.outcome == "full", answer
    assert "no room for the copy" in answer.message
    assert names(to) == []


def test_a_disk_that_would_be_full_is_left_alone(
    filled: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = copy_process._SPARE_BYTES
    monkeypatch.setattr(copy_process, "free_bytes", lambda path: spare + STORED_BYTES)
    with pytest.raises(StoreFullError, match="must stay so"):
        take(filled, to)
    assert names(to) == []
    # Neither holes nor junk count.
    monkeypatch.setattr(copy_process, "free_bytes", lambda path: spare + STORED_BYTES + MEBI)
    take(filled, to)


# --- damage


def test_a_damaged_store_gives_no_snapshot(filled: Path, to: Path) -> None:
    for data, start in changing(filled, LITTLE[:200]):
        data[start + 100] ^= 1
    with pytest.raises(DamagedRecordError, match="payloads"):
        take(filled, to)
    assert names(to) == []
    answer = run_copy(filled, to)
    assert answer.outcome == "damaged"
    assert "experience-buffer verify" in answer.message


def test_a_store_that_has_lost_payloads_gives_no_snapshot(filled: Path, to: Path) -> None:
    file = filled / NAME
    os.truncate(file, HOLE_BYTES)
    answer = answer_to(filled, to, label="", keep=0)
    assert answer.outcome == "damaged", answer
    assert (
        f"{file} is cut short: it has {HOLE_BYTES} bytes, its payloads reach to {FILE_BYTES}"
        in (answer.message)
    )
    file.unlink()
    with pytest.raises(DamagedRecordError, match=f"{file} can't be read: No such file"):
        take(filled, to)
    assert names(to) == []


def test_a_disk_that_can_not_be_read_is_said(
    filled: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter((5, 24))

    def fail(*arguments: object) -> int:
        code = next(codes)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(DamagedRecordError, match="can't be read: Input/output error"):
        take(filled, to)
    with pytest.raises(StoreFailedError, match="can't be read: Too many open files"):
        take(filled, to)
    assert names(to) == []


def test_a_row_that_does_not_say_where_its_payload_lies_blocks_it(filled: Path, to: Path) -> None:
    flip(filled, Table.EXTENTS, disk.payload_key(3, "3/other/5/7/a"))
    answer = answer_to(filled, to, label="", keep=0)
    assert answer.outcome == "damaged", answer
    assert answer.message.startswith("extents: buffer 3 row 3/other/5/7/a can't be read back")
    assert names(to) == []


BUFFER_PLACE = 0.99
"""A buffer's row and its copy differ in their checksums alone."""
SECONDARY = {
    "lease": (Table.LEASES, numbered_key(3, 1), 0.5),
    "progress": (Table.PROGRESS, numbered_key(3, 1), 0.5),
    "consumer": (Table.CONSUMERS, named_key(3, "trainer"), 0.5),
    "counter": (Table.COUNTERS, buffer_key(3), 0.5),
    "copy": (Table.BUFFER_COPIES, buffer_key(3), BUFFER_PLACE),
    "buffer": (Table.BUFFERS, buffer_key(3), BUFFER_PLACE),
}


@pytest.mark.parametrize("name", SECONDARY)
def test_a_row_that_no_experience_depends_on_blocks_no_snapshot(
    filled: Path, to: Path, tmp_path: Path, name: str
) -> None:
    table, key, place = SECONDARY[name]
    flip(filled, table, key, place=place)
    answer = answer_to(filled, to, label="", keep=0)
    assert answer.outcome == "taken", answer
    assert answer.message.startswith(
        f"1 damaged row of table {table.disk_name.decode()} went into the copy"
    )
    manifest = restore(to / answer.name, tmp_path / "new", verify=True)
    assert [buffer.name for buffer in manifest.buffers] == ["buffer-3", "buffer-4"]
    with LmdbReader(tmp_path / "new") as reader:
        states = list(reader.load())
    assert [len(state.records) for state in states] == [NUM + 1, 0]


def test_a_record_blocks_it_as_before_and_a_buffer_without_any_row(filled: Path, to: Path) -> None:
    for table in (Table.BUFFERS, Table.BUFFER_COPIES):
        flip(filled, table, buffer_key(4), place=BUFFER_PLACE)
    answer = answer_to(filled, to, label="", keep=0)
    assert (answer.outcome, "2 findings" in answer.message) == ("damaged", True), answer
    flip(filled, Table.RECORDS, numbered_key(3, NUM + 1))
    answer = answer_to(filled, to, label="", keep=0)
    assert (answer.outcome, "3 findings" in answer.message) == ("damaged", True), answer
