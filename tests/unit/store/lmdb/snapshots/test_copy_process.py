"""Snapshots of a store: whole or not there, and restored to what they were."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import xxhash

from experience_buffer_server.store.interface import (
    BufferRow,
    ConsumerRow,
    DamagedRecordError,
    GroupRow,
    LeaseRow,
    StoreFormatError,
    StoreFullError,
)
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.reader import LmdbReader
from experience_buffer_server.store.lmdb.snapshots import copy_process
from experience_buffer_server.store.lmdb.snapshots.copy_process import take
from experience_buffer_server.store.lmdb.snapshots.folder import SnapshotFolder
from experience_buffer_server.store.lmdb.snapshots.manifest import (
    SnapshotBusyError,
    SnapshotError,
    read_manifest,
    write_manifest,
)
from experience_buffer_server.store.lmdb.snapshots.restore import (
    PARTIAL_NAME,
    check_not_interrupted,
    restore,
)
from tests.unit.store.conftest import MakeRecord, OpenStore
from tests.unit.store.lmdb.snapshots.conftest import run_copy

PAYLOAD = bytes(range(256)) * 67
NUM = 13


@pytest.fixture
async def filled(
    path: Path, open_store: OpenStore, make_record: MakeRecord, buffer_row: Callable[..., BufferRow]
) -> Path:
    """A closed store with experiences, a tombstone, a group, leases and a trainer at step 17."""
    store = await open_store()
    batch = store.batch()
    batch.put_buffer(buffer_row(3))
    for seq in range(1, NUM + 1):
        record = make_record(
            seq, payload_bytes=len(PAYLOAD), digest_number=_digest(PAYLOAD), group_id=11, fields=0
        )
        batch.append(3, record, PAYLOAD)
    tombstone = make_record(NUM + 1, tombstone=True, payload_bytes=0, group_id=0)
    batch.append(3, tombstone, b"")
    batch.put_group(3, GroupRow(id=11, key="3/math", size=NUM, open_time=5.0, closed="whole"))
    for lease_id, state in ((1, "open"), (2, "acked")):
        row = LeaseRow(id=lease_id, consumer="trainer", units=[[1]], deadline=9.0)
        row.state = "open" if state == "open" else "acked"
        batch.put_lease(3, row)
    batch.put_consumer(3, ConsumerRow(name="trainer", last_step=17, safe_step=7))
    await store.commit(batch)
    await store.close()
    return path


def _digest(payload: bytes) -> int:
    return xxhash.xxh3_128_intdigest(payload)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_snapshot_says_what_it_holds(filled: Path, tmp_path: Path) -> None:
    to = tmp_path / "a" / "snapshots"
    before = datetime.now(UTC)
    answer = take(filled, to, label="before-step-18")
    assert answer.outcome == "taken"
    assert answer.name.endswith("Z-before-step-18")
    assert _names(to / answer.name) == ["data.mdb", "manifest.json"]
    manifest = read_manifest(to / answer.name)
    assert before <= manifest.create_time <= datetime.now(UTC)
    assert manifest.store_format == disk.FORMAT_VERSION
    assert manifest.data_bytes == (to / answer.name / "data.mdb").stat().st_size == answer.num_bytes
    (buffer,) = manifest.buffers
    assert (buffer.name, buffer.policy_version) == ("buffer-3", 37)
    assert (buffer.num_experiences, buffer.num_tombstones) == (NUM, 1)
    assert (buffer.num_groups, buffer.num_open_leases) == (1, 1)
    assert buffer.num_bytes == NUM * len(PAYLOAD)
    assert buffer.config == {"group_size": 8}
    (consumer,) = buffer.consumers
    assert (consumer.name, consumer.last_step, consumer.safe_step) == ("trainer", 17, 7)
    json.loads((to / answer.name / "manifest.json").read_text(encoding="utf-8"))


def test_a_snapshot_is_compact_and_restores_bit_for_bit(filled: Path, tmp_path: Path) -> None:
    answer = take(filled, tmp_path / "to")
    assert answer.num_bytes < (filled / "data.mdb").stat().st_size
    data = tmp_path / "new" / "store"
    seen: list[tuple[int, int]] = []
    manifest = restore(
        tmp_path / "to" / answer.name,
        data,
        verify=True,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (answer.num_bytes, answer.num_bytes)
    assert manifest.num_experiences == NUM
    assert _names(data) == ["data.mdb"]
    with LmdbReader(filled) as old, LmdbReader(data) as new:
        (was,), (is_,) = old.load(), new.load()
        assert (is_.row, is_.records, is_.groups) == (was.row, was.records, was.groups)
        assert (is_.leases[:-1], is_.consumers) == (was.leases, was.consumers)
        uids = [record.uid for record in was.records if not record.tombstone]
        assert new.payloads(3, uids) == [PAYLOAD] * NUM


async def test_a_store_can_be_read_while_it_is_written(
    path: Path,
    open_store: OpenStore,
    make_record: MakeRecord,
    buffer_row: Callable[..., BufferRow],
    tmp_path: Path,
) -> None:
    """By another process: the same may not open it twice."""
    store = await open_store()
    batch = store.batch()
    batch.put_buffer(buffer_row(3))
    batch.append(
        3,
        make_record(1, payload_bytes=len(PAYLOAD), digest_number=_digest(PAYLOAD), group_id=0),
        PAYLOAD,
    )
    await store.commit(batch)
    answer = run_copy(path, tmp_path / "to")
    assert (answer.outcome, answer.num_experiences) == ("taken", 1)


def test_names_are_never_taken_twice(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    time = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    names = []
    for label in ("", "", "a", "a"):
        names.append(folder.publish(folder.begin(label, time)).name)
    stem = "snapshot-20260102T030405Z"
    assert names == [f"{stem}-1", f"{stem}-2", f"{stem}-a", f"{stem}-a-1"]


def test_keep_counts_whole_ones_and_never_removes_the_one_just_taken(
    filled: Path, tmp_path: Path
) -> None:
    to = tmp_path / "to"
    first = take(filled, to, label="a").name
    names = [first, *(f"{first.removesuffix('a')}{label}" for label in "bcd")]
    for name in names[1:]:
        shutil.copytree(to / first, to / name)
    # Not whole: neither counted nor removed.
    os.truncate(to / names[0] / "data.mdb", 4096)
    # The clock was set back since: what was taken later looks older.
    for name in names[1:]:
        manifest = read_manifest(to / name)
        late = manifest.model_copy(update={"create_time": datetime(2999, 1, 1, tzinfo=UTC)})
        write_manifest(to / name, late)
    answer = take(filled, to, label="e", keep=2)
    assert answer.removed == names[1:3]
    assert _names(to) == sorted([names[0], names[3], answer.name])
    listed = {one.name: one.problem for one in SnapshotFolder(to).snapshots()}
    assert listed.pop(names[0]) == (
        f"data.mdb has 4096 bytes, its manifest says {answer.num_bytes}"
    )
    assert set(listed.values()) == {""}


def test_keep_counts_those_of_another_version_by_their_age(filled: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    names = [take(filled, to, label=label).name for label in "abc"]
    for name in names[:2]:
        _change(to / name, manifest_version=1, more="unknown")
    assert take(filled, to, label="d", keep=3).removed == names[:1]
    _change(to / names[1], create_time=None)
    assert take(filled, to, label="e", keep=3).removed == names[1:2]


def test_what_was_interrupted_is_removed_and_nobody_else_s(filled: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    for name in (".partial-snapshot-x", ".partial-removed-snapshot-y", "notes"):
        (to / name).mkdir(parents=True)
        (to / name / "data.mdb").write_bytes(b"half")
    with SnapshotFolder(to).locked(), pytest.raises(SnapshotBusyError, match="another process"):
        take(filled, to)
    assert len(_names(to)) == 3, "the other process may be writing it"
    answer = take(filled, to)
    assert _names(to) == ["notes", answer.name]


def test_no_store_no_snapshot(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="holds no store"):
        take(tmp_path, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_damaged_store_gives_no_snapshot(filled: Path, tmp_path: Path) -> None:
    data = bytearray((filled / "data.mdb").read_bytes())
    place = data.index(PAYLOAD[:200])
    data[place + 100] ^= 1
    (filled / "data.mdb").write_bytes(data)
    with pytest.raises(DamagedRecordError, match="payloads"):
        take(filled, tmp_path / "to")
    assert _names(tmp_path / "to") == []
    answer = run_copy(filled, tmp_path / "to")
    assert answer.outcome == "damaged"
    assert "experience-buffer verify" in answer.message


def test_a_full_disk_gives_no_snapshot(filled: Path, tmp_path: Path) -> None:
    answer = run_copy(filled, tmp_path / "to", max_file_bytes=65536)
    assert answer.outcome == "full", answer
    assert "no room for the copy" in answer.message
    assert _names(tmp_path / "to") == []


def test_a_disk_that_would_be_full_is_left_alone(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_process, "_SPARE_BYTES", 1 << 60)
    with pytest.raises(StoreFullError, match="must stay so"):
        take(filled, tmp_path / "to")
    assert _names(tmp_path / "to") == []


def test_the_process_ends_with_its_owner_and_leaves_nothing_whole(
    filled: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "experience_buffer_server.store.lmdb.snapshots.copy_process"]
    command += ["--data", str(filled), "--to", str(tmp_path / "to")]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.read()
    assert (process.returncode, said) == (1, b"")
    assert SnapshotFolder(tmp_path / "to").snapshots() == []


# --- restoring


def _change(taken: Path, **changes: Any) -> None:
    manifest = json.loads((taken / "manifest.json").read_text(encoding="utf-8"))
    (taken / "manifest.json").write_text(json.dumps(manifest | changes), encoding="utf-8")


def test_what_is_not_whole_is_refused(filled: Path, tmp_path: Path) -> None:
    taken = tmp_path / "to" / take(filled, tmp_path / "to").name
    whole = (taken / "manifest.json").read_text(encoding="utf-8")
    sound = (taken / "data.mdb").read_bytes()
    new = tmp_path / "new"

    def refusal() -> str:
        with pytest.raises(SnapshotError) as caught:
            restore(taken, new)
        assert not new.exists() or not _names(new)
        return str(caught.value)

    _change(taken, manifest_version=3, server_version="9.7")
    assert (
        "manifest_version 3, this server reads 2; restore it with server version 9.7" in refusal()
    )
    _change(taken, manifest_version=2, store_format=97)
    assert "format version 97" in refusal()
    _change(taken, store_format=disk.FORMAT_VERSION, sha256="0" * 64)
    assert "SHA-256" in refusal()
    _change(taken, sha256="x")
    assert "sha256" in refusal()
    (taken / "manifest.json").write_text(whole[: len(whole) // 2], encoding="utf-8")
    assert "manifest.json is damaged" in refusal()
    (taken / "manifest.json").write_text(whole, encoding="utf-8")
    (taken / "data.mdb").write_bytes(sound[:-4096])
    assert "its manifest says" in refusal()
    flipped = bytearray(sound)
    flipped[len(flipped) // 2] ^= 4
    (taken / "data.mdb").write_bytes(flipped)
    assert "SHA-256" in refusal()
    (taken / "data.mdb").unlink()
    assert "No such file" in refusal()
    (taken / "manifest.json").unlink()
    assert "has no manifest.json" in refusal()
    assert "has no manifest.json" in _restore_error(tmp_path / "nowhere", new)


def _restore_error(taken: Path, data: Path) -> str:
    with pytest.raises(SnapshotError) as caught:
        restore(taken, data)
    return str(caught.value)


def test_verify_finds_what_was_damaged_before_the_snapshot(filled: Path, tmp_path: Path) -> None:
    """A checksum of the file vouches for the file only."""
    taken = tmp_path / "to" / take(filled, tmp_path / "to").name
    data = bytearray((taken / "data.mdb").read_bytes())
    data[data.index(PAYLOAD[:200]) + 100] ^= 1
    (taken / "data.mdb").write_bytes(data)
    _change(taken, sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(SnapshotError, match="is damaged: 1 findings"):
        restore(taken, tmp_path / "new", verify=True)
    assert not _names(tmp_path / "new")
    restore(taken, tmp_path / "new")


def test_a_store_is_never_put_beside_something(filled: Path, tmp_path: Path) -> None:
    taken = tmp_path / "to" / take(filled, tmp_path / "to").name
    assert "holds a store already" in _restore_error(taken, filled)
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").touch()
    assert "it holds thesis.tex" in _restore_error(taken, full)
    assert "is no folder" in _restore_error(taken, full / "thesis.tex")
    assert _names(full) == ["thesis.tex"]


def test_an_interrupted_restore_opens_nowhere_and_can_be_repeated(
    filled: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "to" / take(filled, tmp_path / "to").name
    data = tmp_path / "new"
    check_not_interrupted(data)
    (data / PARTIAL_NAME).mkdir(parents=True)
    (data / PARTIAL_NAME / "data.mdb").write_bytes((taken / "data.mdb").read_bytes()[:8192])
    with pytest.raises(SnapshotError, match="was interrupted"):
        check_not_interrupted(data)
    with pytest.raises(StoreFormatError):
        LmdbReader(data / PARTIAL_NAME)
    (data / PARTIAL_NAME / "lock.mdb").unlink(missing_ok=True)
    restore(taken, data)
    check_not_interrupted(data)
    assert _names(data) == ["data.mdb"]
