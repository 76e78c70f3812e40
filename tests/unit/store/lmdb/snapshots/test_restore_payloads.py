"""Restoring large payloads, which lie in a file of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experience_buffer_server.runtime.memory_arena import BLOCK_BYTES
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.large.payload_file import NAME
from experience_buffer_server.store.lmdb.snapshots import restore as snapshot_restore
from experience_buffer_server.store.lmdb.snapshots.copy_process import take
from experience_buffer_server.store.lmdb.snapshots.folder import DATA_NAME, SnapshotFolder
from experience_buffer_server.store.lmdb.snapshots.manifest import SnapshotError
from experience_buffer_server.store.lmdb.snapshots.restore import (
    PARTIAL_NAME,
    check_not_interrupted,
    restore,
)
from tests.unit.store.conftest import MEBI
from tests.unit.store.lmdb.large_by_hand import rows
from tests.unit.store.lmdb.large_payloads import (
    HOLE_BYTES,
    JUNK,
    STORED_BYTES,
    WANTED,
    disk_bytes,
    names,
    payloads_of,
)


def test_a_copy_without_its_holes_is_restored_with_them(filled: Path, tmp_path: Path) -> None:
    """Programs that copy folders may fill them."""
    taken = tmp_path / "to" / take(filled, tmp_path / "to").name
    data = (taken / NAME).read_bytes()
    (taken / NAME).unlink()
    (taken / NAME).write_bytes(data)
    assert disk_bytes(taken / NAME) >= HOLE_BYTES
    restore(taken, tmp_path / "new")
    assert disk_bytes(tmp_path / "new" / NAME) < STORED_BYTES + MEBI
    assert payloads_of(tmp_path / "new") == WANTED


def test_a_restored_store_waits_for_no_reader_of_the_old_one(filled: Path, tmp_path: Path) -> None:
    """Its transactions are counted anew: those of the old one would never be over."""
    taken = tmp_path / "to" / take(filled, tmp_path / "to").name
    restore(taken, tmp_path / "new")
    assert rows(taken, Table.FREED)
    assert not rows(tmp_path / "new", Table.FREED)


def test_a_restore_without_room_leaves_nothing(filled: Path, tmp_path: Path) -> None:
    taken = tmp_path / "to" / take(filled, tmp_path / "to").name
    command = [sys.executable, "-m", "experience_buffer_server", "restore", str(taken)]
    command += ["--data", str(tmp_path / "new")]
    limit = f'ulimit -f {(HOLE_BYTES + MEBI) // 512}; exec "$@"'
    said = subprocess.run(
        ["/bin/sh", "-c", limit, "sh", *command], capture_output=True, text=True, check=False
    )
    assert (said.returncode, "no room for the store" in said.stderr) == (1, True), said
    assert names(tmp_path / "new") == []


def test_what_is_not_whole_is_refused(filled: Path, tmp_path: Path) -> None:
    taken = tmp_path / "to" / take(filled, tmp_path / "to").name
    file, new = taken / NAME, tmp_path / "new"
    whole = (taken / "manifest.json").read_text(encoding="utf-8")
    sound = file.read_bytes()

    def refusal() -> str:
        with pytest.raises(SnapshotError) as caught:
            restore(taken, new)
        assert not new.exists() or not names(new)
        return str(caught.value)

    def change(**changes: object) -> None:
        text = json.dumps(json.loads(whole) | changes)
        (taken / "manifest.json").write_text(text, encoding="utf-8")

    change(payloads_sha256="0" * 64)
    assert f"{file} is damaged, or its copy: its SHA-256" in refusal()
    change(payloads_sha256="")
    assert f"{file} is damaged, or its copy: its SHA-256" in refusal()
    change(payloads_sha256="x")
    assert "payloads_sha256" in refusal()
    change(payloads_bytes=0)
    assert f"{NAME} has {len(sound)} bytes, its manifest says 0" in refusal()
    change()
    for place in (7, len(sound) - BLOCK_BYTES):
        flipped = bytearray(sound)
        flipped[place] ^= 4
        file.write_bytes(flipped)
        assert f"{file} is damaged, or its copy: its SHA-256" in refusal()
    file.write_bytes(sound[:-BLOCK_BYTES])
    assert f"{NAME} has {len(sound) - BLOCK_BYTES} bytes, its manifest says" in refusal()
    (one,) = SnapshotFolder(tmp_path / "to").snapshots()
    assert one.problem.startswith(f"{NAME} has ")
    file.unlink()
    assert f"{NAME}: No such file or directory" in refusal()
    (taken / DATA_NAME).unlink()
    assert f"{DATA_NAME}: No such file or directory; {NAME}: No such" in refusal()


# --- what an interrupted restore leaves


def test_an_interrupted_restore_can_be_repeated(filled: Path, tmp_path: Path) -> None:
    taken, data = tmp_path / "to" / take(filled, tmp_path / "to").name, tmp_path / "new"
    (data / PARTIAL_NAME).mkdir(parents=True)
    (data / PARTIAL_NAME / DATA_NAME).write_bytes((taken / DATA_NAME).read_bytes())
    (data / NAME).write_bytes(JUNK)
    with pytest.raises(SnapshotError) as caught:
        check_not_interrupted(data)
    assert f"remove {data / PARTIAL_NAME} and {data / NAME} to begin" in str(caught.value)
    restore(taken, data)
    check_not_interrupted(data)
    assert names(data) == [DATA_NAME, NAME]
    assert payloads_of(data) == WANTED


def test_payloads_that_are_not_of_a_restore_are_left_alone(filled: Path, tmp_path: Path) -> None:
    taken, data = tmp_path / "to" / take(filled, tmp_path / "to").name, tmp_path / "new"
    data.mkdir()
    (data / NAME).write_bytes(JUNK)
    with pytest.raises(SnapshotError, match=f"isn't empty: it holds {NAME}"):
        restore(taken, data)
    assert (data / NAME).read_bytes() == JUNK


def test_the_store_appears_with_the_last_step(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes before is undone where that fails."""
    taken, data = tmp_path / "to" / take(filled, tmp_path / "to").name, tmp_path / "new"
    seen: list[list[str]] = []

    def fail(path: Path) -> None:
        seen.append(names(path))
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(snapshot_restore, "sync", fail)
        with pytest.raises(SnapshotError, match="Input/output error"):
            restore(taken, data)
    assert seen == [[PARTIAL_NAME, NAME]]
    assert names(data) == []
    restore(taken, data)
    assert payloads_of(data) == WANTED
