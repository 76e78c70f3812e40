"""Snapshots and restores that meet trouble: what costs nothing, and what is said of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from experience_buffer_server.buffer.settings_checks import MAX_CONFIG_BYTES
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.settings.server import ServerSection
from experience_buffer_server.store.interface import (
    LEASES_PER_SECOND,
    ConsumerRow,
    LeaseRow,
    ProgressRow,
)
from experience_buffer_server.store.lmdb.disk import private_files
from experience_buffer_server.store.lmdb.disk.format import (
    Table,
    buffer_key,
    named_key,
    numbered_key,
)
from experience_buffer_server.store.lmdb.disk.private_files import make_folder
from experience_buffer_server.store.lmdb.reader import LmdbReader
from experience_buffer_server.store.lmdb.snapshots import manifest
from experience_buffer_server.store.lmdb.snapshots.copy_process import answer_to, take
from experience_buffer_server.store.lmdb.snapshots.folder import SnapshotFolder
from experience_buffer_server.store.lmdb.snapshots.manifest import SnapshotError
from experience_buffer_server.store.lmdb.snapshots.restore import restore
from experience_buffer_server.store.lmdb.store import LmdbStore
from experience_buffer_server.store.lmdb.verify.check import check
from experience_buffer_server.store.lmdb.writer_process import hold_lock
from tests.damaging import flip
from tests.unit.store.conftest import MakeRecord, OpenStore

BUFFERS = (3, 4)


@pytest.fixture
async def filled(
    path: Path, open_store: OpenStore, make_record: MakeRecord, buffer_row: Callable[..., object]
) -> Path:
    """A closed store of two buffers; the first has a row in every table that matters here."""
    store = await open_store()
    batch = store.batch()
    for buffer_id in BUFFERS:
        batch.put_buffer(buffer_row(buffer_id))  # type: ignore[arg-type]
    for seq in (1, 2):
        batch.append(3, make_record(seq, tombstone=True, payload_bytes=0, group_id=0), b"")
    batch.put_last_seq(3, 2)
    batch.put_lease(3, LeaseRow(id=1, consumer="c", units=[], deadline=9.0, state="acked"))
    batch.put_lease(3, LeaseRow(id=2, consumer="c", units=[[1]], deadline=9.0))
    batch.put_progress(3, ProgressRow(seq=1, acked=["c"]))
    batch.put_consumer(3, ConsumerRow(name="c", last_step=17))
    batch.remember(3, "uid", "x", b"digest", 5.0)
    await store.commit(batch)
    await store.close()
    return path


# --- the manifest


def test_as_many_buffers_as_there_may_be_fit_into_a_manifest() -> None:
    """Each with 64 consumers; with the longest settings that are taken, too."""
    consumers = [{"name": f"{number:064}", "staleness": {"max_lag": 4}} for number in range(64)]
    settings = BufferSettings.model_validate({"consumers": consumers})
    length, written = len(settings.model_dump_json()), len(settings.model_dump_json(indent=6))
    assert written / length * MAX_CONFIG_BYTES * ServerSection().max_buffers < manifest.MAX_BYTES


def test_a_manifest_that_could_not_be_read_is_not_written(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = take(filled, tmp_path / "to")
    num_bytes = (tmp_path / "to" / kept.name / manifest.MANIFEST_NAME).stat().st_size
    monkeypatch.setattr(manifest, "MAX_BYTES", num_bytes)
    take(filled, tmp_path / "to")
    monkeypatch.setattr(manifest, "MAX_BYTES", num_bytes - 1)
    answer = answer_to(filled, tmp_path / "to", label="", keep=0)
    assert answer.outcome == "failed"
    assert f"the settings of 2 buffers, would have {num_bytes} bytes" in answer.message
    assert len(list((tmp_path / "to").glob("*snapshot*"))) == 2


# --- the folder of snapshots


def test_a_link_goes_and_what_it_leads_to_stays(filled: Path, tmp_path: Path) -> None:
    to, away = tmp_path / "to", tmp_path / "away"
    first = take(filled, to, label="a").name
    shutil.move(to / first, away)
    (to / first).symlink_to(away)
    (to / ".partial-removed-old").symlink_to(away)
    (to / ".partial-removed-nothing").symlink_to(tmp_path / "nowhere")
    for label in ("b", "c"):
        answer = take(filled, to, label=label, keep=1)
        assert (answer.outcome, answer.message, len(answer.removed)) == ("taken", "", 1)
    assert [path.name for path in to.iterdir() if path.name != ".lock"] == [answer.name]
    assert sorted(path.name for path in away.iterdir()) == ["data.mdb", "manifest.json"]


def test_what_can_not_be_removed_costs_no_snapshot(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again with the next."""
    to = tmp_path / "to"
    first = take(filled, to, label="a").name
    removed = shutil.rmtree

    def refuse(path: Path) -> None:
        if "removed" in path.name:
            raise PermissionError(13, "Permission denied")
        removed(path)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    for label in ("b", "c"):
        answer = answer_to(filled, to, label=label, keep=2)
        assert answer.outcome == "taken", answer
    assert "can't remove" in answer.message
    assert f".partial-removed-{first}: Permission denied" in answer.message
    monkeypatch.undo()
    answer = answer_to(filled, to, label="d", keep=0)
    assert (answer.outcome, answer.message) == ("taken", "")
    assert len(SnapshotFolder(to).snapshots()) == 3
    assert not list(to.glob(".partial-*"))


def test_the_names_of_new_folders_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(private_files, "sync", synced.append)
    make_folder(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 3


# --- damage that costs no experience

SECONDARY = {
    "lease": (Table.LEASES, numbered_key(3, 1)),
    "progress": (Table.PROGRESS, numbered_key(3, 1)),
    "consumer": (Table.CONSUMERS, named_key(3, "c")),
    "counter": (Table.COUNTERS, buffer_key(3)),
    "copy": (Table.BUFFER_COPIES, buffer_key(3)),
    "buffer": (Table.BUFFERS, buffer_key(3)),
}


@pytest.mark.parametrize("name", SECONDARY)
def test_a_row_that_no_experience_depends_on_blocks_no_snapshot(
    filled: Path, tmp_path: Path, name: str
) -> None:
    table, key = SECONDARY[name]
    if name in ("copy", "buffer"):
        _flip_in_table(filled, table, key)
    else:
        flip(filled, table, key)
    answer = answer_to(filled, tmp_path / "to", label="", keep=0)
    assert answer.outcome == "taken", answer
    assert answer.message.startswith(
        f"1 damaged row of table {table.disk_name.decode()} went into the copy"
    )
    manifest = restore(tmp_path / "to" / answer.name, tmp_path / "new", verify=True)
    assert [buffer.name for buffer in manifest.buffers] == ["buffer-3", "buffer-4"]
    with LmdbReader(tmp_path / "new") as reader:
        states = list(reader.load())
    assert [len(state.records) for state in states] == [2, 0]


def _flip_in_table(path: Path, table: Table, key: bytes) -> None:
    """A buffer's row and its copy differ in their checksums alone."""
    flip(path, table, key, place=0.99)


def test_a_record_blocks_it_as_before_and_a_buffer_without_any_row(
    filled: Path, tmp_path: Path
) -> None:
    _flip_in_table(filled, Table.BUFFERS, buffer_key(4))
    _flip_in_table(filled, Table.BUFFER_COPIES, buffer_key(4))
    answer = answer_to(filled, tmp_path / "to", label="", keep=0)
    assert (answer.outcome, "2 findings" in answer.message) == ("damaged", True), answer
    flip(filled, Table.RECORDS, numbered_key(3, 2))
    answer = answer_to(filled, tmp_path / "to", label="", keep=0)
    assert (answer.outcome, "3 findings" in answer.message) == ("damaged", True), answer


# --- restoring


def _taken(filled: Path, to: Path) -> Path:
    return to / take(filled, to).name


def test_two_restores_to_one_folder_do_not_mix(filled: Path, tmp_path: Path) -> None:
    taken, new = _taken(filled, tmp_path / "to"), tmp_path / "new"
    problems: list[str] = []

    def meanwhile(done: int, total: int) -> None:
        try:
            restore(taken, new)
        except SnapshotError as error:
            problems.append(str(error))

    restore(taken, new, on_progress=meanwhile)
    assert problems
    assert set(problems) == {
        f"another restore to {new}, or a server, is at work there; wait for it, or give another "
        "folder"
    }
    with LmdbReader(new) as reader:
        assert len(list(reader.load())) == 2
    with pytest.raises(SnapshotError, match="holds a store already"):
        restore(taken, new)


def test_a_folder_that_a_server_is_opening_is_refused(filled: Path, tmp_path: Path) -> None:
    taken, new = _taken(filled, tmp_path / "to"), tmp_path / "new"
    new.mkdir()
    with hold_lock(new, timeout_seconds=0.0), pytest.raises(SnapshotError, match="is at work"):
        restore(taken, new)


def test_a_copy_that_is_not_what_was_read_is_refused(filled: Path, tmp_path: Path) -> None:
    taken, new = _taken(filled, tmp_path / "to"), tmp_path / "new"

    def spoil(done: int, total: int) -> None:
        # Behind everything: what was copied may not have left the writer's memory yet.
        with open(new / ".partial-restore" / "data.mdb", "r+b") as file:
            file.truncate(total + 1)

    with pytest.raises(SnapshotError, match="or its copy: its SHA-256"):
        restore(taken, new, on_progress=spoil)
    assert [path.name for path in new.iterdir()] == ["writer.lock"]


async def test_no_life_of_a_store_gives_the_leases_of_another(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = _taken(filled, tmp_path / "to")
    last: list[int] = []
    for number in range(3):
        # The third is on a machine whose clock is wrong.
        now = (time.time, lambda: 2e9, lambda: 5.0)[number]
        monkeypatch.setattr("time.time", now)
        restore(taken, tmp_path / f"new{number}", verify=True)
        monkeypatch.undo()
        with LmdbReader(tmp_path / f"new{number}") as reader:
            states = list(reader.load())
        rows = [state.leases[-1] for state in states]
        assert all(row.state == "expired" and not row.units for row in rows)
        assert [row.id for row in states[0].leases[:-1]] == [1, 2]
        assert rows[0].id == rows[1].id
        assert check(tmp_path / f"new{number}").is_clean
        last.append(rows[0].id)
    assert [number // LEASES_PER_SECOND for number in last[1:]] == [int(2e9), 5]
    assert last[0] > int(1.7e9) * LEASES_PER_SECOND
    assert last[1] < 2**53
    # Two within one second: the same once in half a million.
    monkeypatch.setattr("time.time", lambda: 5.0)
    restore(taken, tmp_path / "twin")
    monkeypatch.undo()
    with LmdbReader(tmp_path / "twin") as reader:
        assert [state.leases[-1].id for state in reader.load()] != [last[2]] * 2
    # A life that was restored before the clock was set back.
    again = _taken(tmp_path / "new1", tmp_path / "to")
    monkeypatch.setattr("time.time", lambda: 5.0)
    restore(again, tmp_path / "again")
    monkeypatch.undo()
    with LmdbReader(tmp_path / "again") as reader:
        assert [state.leases[-1].id for state in reader.load()] == [last[1] + 1] * 2
    store = await LmdbStore.open(tmp_path / "again")
    assert not store.damaged
    await store.close()
