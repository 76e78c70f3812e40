"""Snapshots of large payloads, which lie in a file of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from experience_buffer_server.runtime.memory_arena import BLOCK_BYTES
from experience_buffer_server.store.interface import (
    BufferRow,
    DamagedRecordError,
    StoreFailedError,
    StoreFullError,
)
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.large.payload_file import NAME
from experience_buffer_server.store.lmdb.reader import LmdbReader
from experience_buffer_server.store.lmdb.snapshots import copy_process
from experience_buffer_server.store.lmdb.snapshots import payloads as snapshot_payloads
from experience_buffer_server.store.lmdb.snapshots.copy_process import answer_to, take
from experience_buffer_server.store.lmdb.snapshots.folder import DATA_NAME
from experience_buffer_server.store.lmdb.snapshots.manifest import read_manifest
from experience_buffer_server.store.lmdb.snapshots.restore import restore
from tests.damaging import flip
from tests.unit.store.conftest import MEBI, MakeRecord, OpenStore
from tests.unit.store.lmdb.large_payloads import (
    HOLE_BYTES,
    HUGE,
    OTHER,
    PLACES,
    SMALL,
    STORED_BYTES,
    WANTED,
    disk_bytes,
    names,
    payloads_of,
)
from tests.unit.store.lmdb.snapshots.conftest import run_copy


def test_large_payloads_come_back_byte_for_byte(filled: Path, tmp_path: Path) -> None:
    answer = take(filled, tmp_path / "to")
    taken = tmp_path / "to" / answer.name
    assert names(taken) == [DATA_NAME, "manifest.json", NAME]
    assert payloads_of(taken) == WANTED
    manifest = read_manifest(taken)
    assert manifest.payloads_bytes == (taken / NAME).stat().st_size
    assert manifest.payloads_stored_bytes == STORED_BYTES
    assert answer.num_bytes == manifest.num_bytes == manifest.data_bytes + STORED_BYTES
    said = subprocess.run(["sha256sum", taken / NAME], check=True, capture_output=True, text=True)
    assert said.stdout.split()[0] == manifest.payloads_sha256
    seen: list[tuple[int, int]] = []
    new = tmp_path / "new"
    restore(taken, new, verify=True, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (answer.num_bytes, answer.num_bytes)
    assert names(new) == [DATA_NAME, NAME]
    assert payloads_of(new) == WANTED


def test_only_payloads_are_copied_and_nobody_else_may_read_them(
    filled: Path, tmp_path: Path
) -> None:
    """Neither holes nor what is free in the file."""
    taken = tmp_path / "to" / take(filled, tmp_path / "to").name
    new = tmp_path / "new"
    restore(taken, new)
    for file in (taken / NAME, new / NAME):
        assert file.stat().st_size == HOLE_BYTES + 9 * MEBI + BLOCK_BYTES
        assert STORED_BYTES <= disk_bytes(file) < STORED_BYTES + MEBI
        assert file.stat().st_mode & 0o777 == 0o600
        data = file.read_bytes()
        assert not any(data[PLACES["3/other/5/7/a"][0] + 102_400 : HOLE_BYTES])


async def test_what_a_server_stored_is_restored(
    path: Path,
    open_store: OpenStore,
    make_record: MakeRecord,
    buffer_row: Callable[[int], BufferRow],
    tmp_path: Path,
) -> None:
    """With records, by another process, while the store is open."""
    store = await open_store()
    batch = store.batch()
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
    await store.commit(batch)
    batch = store.batch()
    batch.remove(3, records.pop(2))
    await store.commit(batch)
    answer = run_copy(path, tmp_path / "to")
    assert (answer.outcome, answer.num_experiences) == ("taken", 3), answer
    restore(tmp_path / "to" / answer.name, tmp_path / "new", verify=True)
    with LmdbReader(tmp_path / "new") as reader:
        found = reader.payloads(3, [record.uid for record in records])
    assert found == [payloads[record.seq] for record in records]


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
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []

    def copy(source: Path, to: Path) -> int:
        readers.append(_beside(_READERS, filled))
        return snapshot_payloads.copy_payloads(source, to)

    monkeypatch.setattr(copy_process, "copy_payloads", copy)
    take(filled, tmp_path / "to")
    (said,) = readers
    # A line per process: its id, its thread, and the transaction that it has open.
    open_ = [row.split() for row in said.splitlines()[1:] if row]
    assert [row[0] for row in open_ if row[2] != "-"] == [str(os.getpid())], said


def test_a_map_that_grows_meanwhile_is_taken_over(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No transaction may be open then: the copy begins again with another."""
    check_room = copy_process._check_room
    calls: list[int] = []

    def grow(txn: Any, tables: Any, to: Path) -> None:
        calls.append(txn.id())
        if len(calls) == 1:
            _beside(_GROW, filled)
        check_room(txn, tables, to)

    monkeypatch.setattr(copy_process, "_check_room", grow)
    taken = tmp_path / "to" / take(filled, tmp_path / "to").name
    assert calls == [calls[0], calls[0] + 2]
    assert payloads_of(taken) == WANTED


# --- no room


def test_a_full_disk_gives_no_snapshot(filled: Path, tmp_path: Path) -> None:
    """The first file fits, the second doesn't."""
    answer = run_copy(filled, tmp_path / "to", max_file_bytes=HOLE_BYTES + MEBI)
    assert answer.outcome == "full", answer
    assert "no room for the copy" in answer.message
    assert names(tmp_path / "to") == []


def test_a_disk_that_would_be_full_is_left_alone(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = copy_process._SPARE_BYTES
    monkeypatch.setattr(copy_process, "free_bytes", lambda path: spare + STORED_BYTES)
    with pytest.raises(StoreFullError, match="must stay so"):
        take(filled, tmp_path / "to")
    assert names(tmp_path / "to") == []
    # Neither holes nor junk count.
    monkeypatch.setattr(copy_process, "free_bytes", lambda path: spare + STORED_BYTES + MEBI)
    take(filled, tmp_path / "to")


# --- damage


def test_a_store_that_has_lost_payloads_gives_no_snapshot(filled: Path, tmp_path: Path) -> None:
    to, file = tmp_path / "to", filled / NAME
    os.truncate(file, HOLE_BYTES)
    answer = answer_to(filled, to, label="", keep=0)
    assert answer.outcome == "damaged", answer
    end = HOLE_BYTES + 9 * MEBI + BLOCK_BYTES
    assert f"{file} is cut short: it has {HOLE_BYTES} bytes, its payloads reach to {end}" in (
        answer.message
    )
    file.unlink()
    with pytest.raises(DamagedRecordError, match=f"{file} can't be read: No such file"):
        take(filled, to)
    assert names(to) == []


def test_a_disk_that_can_not_be_read_is_said(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter((5, 24))

    def fail(*arguments: object) -> int:
        code = next(codes)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(DamagedRecordError, match="can't be read: Input/output error"):
        take(filled, tmp_path / "to")
    with pytest.raises(StoreFailedError, match="can't be read: Too many open files"):
        take(filled, tmp_path / "to")
    assert names(tmp_path / "to") == []


def test_a_row_that_does_not_say_where_its_payload_lies_blocks_it(
    filled: Path, tmp_path: Path
) -> None:
    flip(filled, Table.EXTENTS, disk.payload_key(3, "3/other/5/7/a"))
    answer = answer_to(filled, tmp_path / "to", label="", keep=0)
    assert answer.outcome == "damaged", answer
    assert answer.message.startswith("extents: buffer 3 row 3/other/5/7/a can't be read back")
    assert names(tmp_path / "to") == []
