"""From a snapshot to a store: what it was, or nothing."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from experience_buffer_server.runtime.memory_arena import BLOCK_BYTES
from experience_buffer_server.store.interface import LEASES_PER_SECOND, StoreFormatError
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.large.payload_file import NAME
from experience_buffer_server.store.lmdb.reader import LmdbReader
from experience_buffer_server.store.lmdb.snapshots import restore as snapshot_restore
from experience_buffer_server.store.lmdb.snapshots.copy_process import take
from experience_buffer_server.store.lmdb.snapshots.folder import DATA_NAME, SnapshotFolder
from experience_buffer_server.store.lmdb.snapshots.manifest import MANIFEST_NAME, SnapshotError
from experience_buffer_server.store.lmdb.snapshots.restore import (
    PARTIAL_NAME,
    check_not_interrupted,
    restore,
)
from experience_buffer_server.store.lmdb.store import LmdbStore
from experience_buffer_server.store.lmdb.verify.check import check
from experience_buffer_server.store.lmdb.writer_process import hold_lock
from tests.unit.store.conftest import MEBI
from tests.unit.store.lmdb.large_by_hand import rows
from tests.unit.store.lmdb.snapshots.conftest import (
    HOLE_BYTES,
    JUNK,
    LITTLE,
    NUM,
    STORED_BYTES,
    WANTED,
    disk_bytes,
    names,
    payloads_of,
)
from tests.unit.store.lmdb.snapshots.test_folder import change


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return tmp_path / "above" / "new"


def refusal(taken: Path, new: Path) -> str:
    with pytest.raises(SnapshotError) as caught:
        restore(taken, new)
    return str(caught.value)


def test_a_store_comes_back_bit_for_bit(filled: Path, taken: Path, new: Path) -> None:
    seen: list[tuple[int, int]] = []
    manifest = restore(
        taken, new, verify=True, on_progress=lambda done, total: seen.append((done, total))
    )
    assert seen == sorted(seen)
    assert seen[-1] == (manifest.num_bytes, manifest.num_bytes)
    assert manifest.num_experiences == NUM
    assert names(new) == [DATA_NAME, NAME]
    with LmdbReader(filled) as old, LmdbReader(new) as restored:
        was, is_ = next(old.load()), next(restored.load())
    assert (is_.row, is_.records, is_.groups) == (was.row, was.records, was.groups)
    assert (is_.leases[:-1], is_.consumers) == (was.leases, was.consumers)
    assert payloads_of(new) == WANTED


def test_a_copy_without_its_holes_is_restored_with_them(taken: Path, new: Path) -> None:
    """Programs that copy folders may fill them."""
    data = (taken / NAME).read_bytes()
    (taken / NAME).unlink()
    (taken / NAME).write_bytes(data)
    assert disk_bytes(taken / NAME) >= HOLE_BYTES
    restore(taken, new)
    assert disk_bytes(new / NAME) < STORED_BYTES + MEBI
    assert payloads_of(new) == WANTED


def test_a_restored_store_waits_for_no_reader_of_the_old_one(taken: Path, new: Path) -> None:
    """Its transactions are counted anew: those of the old one would never be over."""
    restore(taken, new)
    assert rows(taken, Table.FREED)
    assert not rows(new, Table.FREED)


def test_a_restore_without_room_leaves_nothing(taken: Path, new: Path) -> None:
    command = [sys.executable, "-m", "experience_buffer_server", "restore", str(taken)]
    command += ["--data", str(new)]
    limit = f'ulimit -f {(HOLE_BYTES + MEBI) // 512}; exec "$@"'
    said = subprocess.run(
        ["/bin/sh", "-c", limit, "sh", *command], capture_output=True, text=True, check=False
    )
    assert (said.returncode, "no room for the store" in said.stderr) == (1, True), said
    assert names(new) == []


# --- what isn't whole

MANIFESTS: list[tuple[dict[str, object], str]] = [
    (
        {"manifest_version": 3, "server_version": "9.7"},
        "manifest_version 3, this server reads 2; restore it with server version 9.7",
    ),
    ({"store_format": 97}, "format version 97"),
    ({"sha256": "0" * 64}, f"{DATA_NAME} is damaged, or its copy: its SHA-256"),
    ({"sha256": "x"}, "sha256: "),
    ({"payloads_sha256": "0" * 64}, f"{NAME} is damaged, or its copy: its SHA-256"),
    ({"payloads_sha256": ""}, f"{NAME} is damaged, or its copy: its SHA-256"),
    ({"payloads_sha256": "x"}, "payloads_sha256: "),
    ({"payloads_bytes": 0}, "bytes, its manifest says 0"),
]


def test_a_manifest_that_is_of_another_snapshot_is_refused(taken: Path, new: Path) -> None:
    whole = (taken / MANIFEST_NAME).read_text(encoding="utf-8")
    for changes, text in MANIFESTS:
        change(taken, **(json.loads(whole) | changes))
        assert text in refusal(taken, new)
    (taken / MANIFEST_NAME).write_text(whole[: len(whole) // 2], encoding="utf-8")
    assert "manifest.json is damaged" in refusal(taken, new)
    (taken / MANIFEST_NAME).unlink()
    assert "has no manifest.json" in refusal(taken, new)
    assert "has no manifest.json" in refusal(taken.parent / "nowhere", new)
    assert names(new) == []


@pytest.mark.parametrize("name", [DATA_NAME, NAME])
def test_a_file_that_is_not_the_one_of_the_manifest_is_refused(
    taken: Path, new: Path, name: str
) -> None:
    file = taken / name
    sound = file.read_bytes()
    for place in (7, len(sound) - BLOCK_BYTES):
        flipped = bytearray(sound)
        flipped[place] ^= 4
        file.write_bytes(flipped)
        assert f"{file} is damaged, or its copy: its SHA-256" in refusal(taken, new)
    file.write_bytes(sound[:-BLOCK_BYTES])
    size = len(sound) - BLOCK_BYTES
    assert f"{name} has {size} bytes, its manifest says {len(sound)}" in refusal(taken, new)
    (one,) = SnapshotFolder(taken.parent).snapshots()
    assert one.problem.startswith(f"{name} has ")
    file.unlink()
    assert f"{name}: No such file or directory" in refusal(taken, new)
    assert names(new) == []


def test_verify_finds_what_was_damaged_before_the_snapshot(taken: Path, new: Path) -> None:
    """A checksum of the file vouches for the file only."""
    data = bytearray((taken / DATA_NAME).read_bytes())
    data[data.index(LITTLE[:200]) + 100] ^= 1
    (taken / DATA_NAME).write_bytes(data)
    change(taken, sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(SnapshotError, match="is damaged: 1 findings"):
        restore(taken, new, verify=True)
    assert names(new) == []
    restore(taken, new)


def test_a_copy_that_is_not_what_was_read_is_refused(taken: Path, new: Path) -> None:
    def spoil(done: int, total: int) -> None:
        # Behind everything: what was copied may not have left the writer's memory yet.
        with open(new / PARTIAL_NAME / DATA_NAME, "r+b") as file:
            file.truncate(total + 1)

    with pytest.raises(SnapshotError, match="or its copy: its SHA-256"):
        restore(taken, new, on_progress=spoil)
    assert [path.name for path in new.iterdir()] == ["writer.lock"]


# --- the folder that it goes to


def test_a_store_is_never_put_beside_something(filled: Path, taken: Path, new: Path) -> None:
    assert "holds a store already" in refusal(taken, filled)
    new.mkdir(parents=True)
    for name in ("thesis.tex", NAME):
        (new / name).write_bytes(JUNK)
        assert f"isn't empty: it holds {name}" in refusal(taken, new)
        assert "is no folder" in refusal(taken, new / name)
        assert (new / name).read_bytes() == JUNK
        (new / name).unlink()


def test_an_interrupted_restore_opens_nowhere_and_can_be_repeated(taken: Path, new: Path) -> None:
    check_not_interrupted(new)
    partial = new / PARTIAL_NAME
    partial.mkdir(parents=True)
    (partial / DATA_NAME).write_bytes((taken / DATA_NAME).read_bytes()[:8192])
    (new / NAME).write_bytes(JUNK)
    with pytest.raises(SnapshotError, match=f"interrupted.*remove {partial} and {new / NAME} to"):
        check_not_interrupted(new)
    with pytest.raises(StoreFormatError):
        LmdbReader(partial)
    restore(taken, new)
    check_not_interrupted(new)
    assert names(new) == [DATA_NAME, NAME]
    assert payloads_of(new) == WANTED


def test_the_store_appears_with_the_last_step(
    taken: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes before is undone where that fails."""
    seen: list[list[str]] = []

    def fail(path: Path) -> None:
        seen.append(names(path))
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(snapshot_restore, "sync", fail)
        with pytest.raises(SnapshotError, match="Input/output error"):
            restore(taken, new)
    assert seen == [[PARTIAL_NAME, NAME]]
    assert names(new) == []
    restore(taken, new)
    assert payloads_of(new) == WANTED


def test_two_restores_to_one_folder_do_not_mix(taken: Path, new: Path) -> None:
    problems: set[str] = set()
    restore(taken, new, on_progress=lambda done, total: problems.add(refusal(taken, new)))
    assert problems == {
        f"another restore to {new}, or a server, is at work there; wait for it, or give another "
        "folder"
    }
    with LmdbReader(new) as reader:
        assert len(list(reader.load())) == 2


def test_a_folder_that_a_server_is_opening_is_refused(taken: Path, new: Path) -> None:
    new.mkdir(parents=True)
    with hold_lock(new, timeout_seconds=0.0):
        assert "is at work" in refusal(taken, new)


# --- its leases


async def test_no_life_of_a_store_gives_the_leases_of_another(
    taken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last_leases(name: str, snapshot: Path, now: Callable[[], float]) -> list[int]:
        """Of both buffers, after a restore at a time."""
        with monkeypatch.context() as patch:
            patch.setattr("time.time", now)
            restore(snapshot, tmp_path / name)
        with LmdbReader(tmp_path / name) as reader:
            rows = [state.leases[-1] for state in reader.load()]
        assert all(row.state == "expired" and not row.units for row in rows)
        return [row.id for row in rows]

    last: list[int] = []
    # The third is on a machine whose clock is wrong.
    for number, now in enumerate((time.time, lambda: 2e9, lambda: 5.0)):
        first, second = last_leases(f"new{number}", taken, now)
        assert first == second
        last.append(first)
        with LmdbReader(tmp_path / f"new{number}") as reader:
            assert [row.id for row in next(reader.load()).leases[:-1]] == [1, 2]
        assert check(tmp_path / f"new{number}").is_clean
    assert [number // LEASES_PER_SECOND for number in last[1:]] == [int(2e9), 5]
    assert last[0] > int(1.7e9) * LEASES_PER_SECOND
    assert last[1] < 2**53
    # Two within one second: the same once in half a million.
    assert last_leases("twin", taken, lambda: 5.0) != [last[2]] * 2
    # A life that was restored before the clock was set back.
    again = tmp_path / "to" / take(tmp_path / "new1", tmp_path / "to").name
    assert last_leases("again", again, lambda: 5.0) == [last[1] + 1] * 2
    store = await LmdbStore.open(tmp_path / "again")
    assert not store.damaged
    await store.close()
