"""The folder of snapshots: their names, and which of them go. Without a store: it looks at sizes."""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from experience_buffer_server.store.lmdb.disk import private_files
from experience_buffer_server.store.lmdb.disk.private_files import make_folder
from experience_buffer_server.store.lmdb.snapshots.folder import DATA_NAME, SnapshotFolder
from experience_buffer_server.store.lmdb.snapshots.manifest import Manifest, write_manifest
from tests.unit.store.lmdb.snapshots.conftest import names

TIME = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STEM = "snapshot-20260102T030405Z"


@pytest.fixture
def folder(tmp_path: Path) -> SnapshotFolder:
    return SnapshotFolder(tmp_path)


def put(folder: SnapshotFolder, label: str, *, seconds: float = 0.0) -> Path:
    """A snapshot that looks whole, taken then."""
    partial = folder.begin(label, TIME)
    (partial / DATA_NAME).write_bytes(bytes(8192))
    manifest = Manifest(
        store_format=5,
        server_version="1.0",
        create_time=TIME + timedelta(seconds=seconds),
        label=label,
        data_bytes=8192,
        sha256="0" * 64,
        payloads_bytes=0,
        payloads_stored_bytes=0,
        payloads_sha256="",
        buffers=(),
    )
    write_manifest(partial, manifest)
    return folder.publish(partial)


def change(taken: Path, **changes: Any) -> None:
    manifest = json.loads((taken / "manifest.json").read_text(encoding="utf-8"))
    (taken / "manifest.json").write_text(json.dumps(manifest | changes), encoding="utf-8")


def test_names_are_never_taken_twice(folder: SnapshotFolder) -> None:
    found = [put(folder, label).name for label in ("", "", "a", "a")]
    assert found == [f"{STEM}-1", f"{STEM}-2", f"{STEM}-a", f"{STEM}-a-1"]


def test_keep_counts_whole_ones_and_never_removes_the_one_just_taken(
    folder: SnapshotFolder,
) -> None:
    # The clock was set back since: what was taken last looks older than all.
    torn, *others = [put(folder, label, seconds=100.0) for label in "abcd"]
    os.truncate(torn / DATA_NAME, 4096)
    last = put(folder, "e")
    assert folder.keep_newest(2, taken=last) == [path.name for path in others[:2]]
    assert names(folder.path) == [torn.name, others[2].name, last.name]
    listed = {one.name: one.problem for one in folder.snapshots()}
    assert listed.pop(torn.name) == "data.mdb has 4096 bytes, its manifest says 8192"
    assert set(listed.values()) == {""}
    assert folder.keep_newest(0, taken=last) == [], "0 keeps all"


def test_keep_counts_those_of_another_version_by_their_age(folder: SnapshotFolder) -> None:
    paths = [put(folder, label, seconds=number) for number, label in enumerate("abcd")]
    for path in paths[:2]:
        change(path, manifest_version=1, more="unknown")
    assert folder.keep_newest(3, taken=paths[3]) == [paths[0].name]
    change(paths[1], create_time=None)
    assert folder.keep_newest(3, taken=put(folder, "e", seconds=9)) == [paths[1].name]


def test_a_link_goes_and_what_it_leads_to_stays(
    folder: SnapshotFolder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    away = tmp_path_factory.mktemp("elsewhere") / "away"
    first = put(folder, "a")
    shutil.move(first, away)
    first.symlink_to(away)
    (folder.path / ".partial-removed-old").symlink_to(away)
    (folder.path / ".partial-removed-nothing").symlink_to(away / "nowhere")
    assert folder.clean() == [".partial-removed-nothing", ".partial-removed-old"]
    last = put(folder, "b")
    assert folder.keep_newest(1, taken=last) == [first.name]
    assert names(folder.path) == [last.name]
    assert names(away) == [DATA_NAME, "manifest.json"]


def test_what_can_not_be_removed_costs_no_snapshot(
    folder: SnapshotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again with the next."""
    first, last = put(folder, "a"), put(folder, "b", seconds=1.0)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        assert folder.keep_newest(1, taken=last) == []
    removed = folder.path / f".partial-removed-{first.name}"
    assert folder.problems == [f"can't remove {removed}: Permission denied"]
    assert folder.clean() == [removed.name]
    assert names(folder.path) == [last.name]


def test_the_names_of_new_folders_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(private_files, "sync", synced.append)
    make_folder(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 3
