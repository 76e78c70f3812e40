"""What a store's file has room for, and what is done ahead of appends."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgpack
import pytest

from experience_buffer_server.store.lmdb import writer_protocol
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.disk_room import Room
from experience_buffer_server.store.lmdb.disk.format import Table, unseal
from experience_buffer_server.store.lmdb.disk.opening import begin, open_to_read
from experience_buffer_server.store.lmdb.engine import Engine
from experience_buffer_server.store.lmdb.writer_inbox import Inbox
from experience_buffer_server.store.lmdb.writer_process import _Loop
from experience_buffer_server.store.lmdb.writer_protocol import Request, Status
from tests.unit.store.conftest import MEBI

SMALL = 24 * 1024
IN_USE = 3 * MEBI
MakeRoom = Callable[..., Room]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file in which every page says that it is in use."""
    path = tmp_path / "data.mdb"
    path.write_bytes(b"\xff" * IN_USE)
    return path


@pytest.fixture
def make_room(file: Path) -> Iterator[MakeRoom]:
    made: list[Room] = []

    def make(*, live_bytes: int = 0, max_map_bytes: int = 1024 * MEBI) -> Room:
        room = Room(file, max_map_bytes=max_map_bytes, measure=lambda: live_bytes)
        room.update(file_bytes=IN_USE)
        made.append(room)
        return room

    yield make
    for room in made:
        room.close()


def test_zeros_go_behind_what_is_in_use_and_nowhere_else(make_room: MakeRoom, file: Path) -> None:
    room = make_room()
    assert room.refusal(SMALL) == ""
    num_bytes = file.stat().st_size
    room.write_ahead(SMALL)
    assert file.read_bytes()[:IN_USE] == b"\xff" * IN_USE
    assert file.stat().st_size == num_bytes, "only what was set aside before is written"
    written = room.zeroed_bytes
    assert IN_USE + 2 * SMALL < written <= num_bytes


def test_zeros_are_written_again_only_when_they_are_used_up(make_room: MakeRoom) -> None:
    room = make_room()
    room.refusal(SMALL)
    room.write_ahead(SMALL)
    written = room.zeroed_bytes
    room.update(file_bytes=written - 2 * SMALL)
    room.write_ahead(SMALL)
    assert room.zeroed_bytes == written
    room.update(file_bytes=written - SMALL)
    room.write_ahead(SMALL)
    assert room.zeroed_bytes > written


def test_what_others_wrote_is_never_zeroed(make_room: MakeRoom, file: Path) -> None:
    """LMDB takes pages where zeros were written, and beyond: nothing of them may be lost."""
    room = make_room()
    room.refusal(SMALL)
    room.write_ahead(SMALL)
    for end in (room.zeroed_bytes - SMALL, room.zeroed_bytes + 5 * SMALL):
        with file.open("r+b") as data:
            data.write(b"\xff" * end)
        room.update(file_bytes=end)
        room.write_ahead(SMALL)
        assert file.read_bytes()[:end] == b"\xff" * end


def test_large_appends_aren_t_written_twice(make_room: MakeRoom) -> None:
    room = make_room()
    room.refusal(MEBI)
    room.write_ahead(MEBI)
    assert room.zeroed_bytes == 0


def test_nothing_is_written_where_nothing_was_set_aside(make_room: MakeRoom, file: Path) -> None:
    room = make_room()
    room.write_ahead(SMALL)
    assert file.stat().st_size == IN_USE


def test_a_disk_that_fails_is_said(make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    room = make_room()
    room.refusal(SMALL)

    def fails(file: int) -> None:
        raise OSError(errno.EIO, "no disk")

    monkeypatch.setattr(os, "fdatasync", fails)
    with pytest.raises(OSError, match="no disk"):
        room.write_ahead(SMALL)


def test_a_full_disk_only_keeps_from_writing_ahead(
    make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where overwriting takes new space: pushes are refused then, and everything else goes on."""
    room = make_room()
    room.refusal(SMALL)

    def full(file: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwrite", full)
    room.write_ahead(SMALL)


def test_pages_are_counted_only_near_the_limit(file: Path) -> None:
    counted: list[int] = []

    def measure() -> int:
        counted.append(IN_USE)
        return IN_USE

    room = Room(file, max_map_bytes=100 * MEBI, measure=measure)
    room.update(file_bytes=IN_USE)
    assert room.refusal(SMALL) == ""
    assert not counted
    room.update(file_bytes=98 * MEBI)
    assert room.refusal(SMALL) == "", "what was in use once can be used again"
    assert room.refusal(SMALL) == ""
    assert len(counted) == 1, "once for each commit"
    room.update(file_bytes=98 * MEBI)
    assert "would pass the limit" in room.refusal(96 * MEBI)
    assert len(counted) == 2
    room.close()


def _append(number: int, num_bytes: int = 5000) -> Request:
    key = disk.payload_key(1, f"uid-{number:09d}")
    return Request(number, 8192, [(int(Table.PAYLOADS), key, os.urandom(num_bytes))])


@pytest.mark.parametrize("sync", [True, False])
def test_zeros_are_written_only_where_commits_wait_for_the_disk(tmp_path: Path, sync: bool) -> None:
    engine = Engine(tmp_path, sync=sync, initial_map_bytes=64 * MEBI, max_map_bytes=64 * MEBI)
    engine.make_ready()
    assert engine._room.zeroed_bytes == 0, "nobody has appended anything"
    requests = [_append(number) for number in range(200)]
    for request in requests:
        results, _ = engine.write([request])
        assert results[0].status == Status.OK
        engine.make_ready()
        assert (engine._room.zeroed_bytes > engine._room.file_bytes) == sync
    engine.close()
    env, tables = open_to_read(tmp_path)
    with begin(env) as txn:
        for request in requests:
            ((table, key, value),) = request.operations
            stored = txn.get(key, db=tables[Table.PAYLOADS])
            assert stored is not None
            assert unseal(table, key, stored) == value
    env.close()


def test_nothing_is_written_after_a_transaction_that_failed(tmp_path: Path) -> None:
    """What the file holds then isn't known for sure."""
    engine = Engine(tmp_path, sync=True, initial_map_bytes=64 * MEBI, max_map_bytes=64 * MEBI)
    engine.write([_append(1)])
    too_long = Request(2, 8192, [(int(Table.PAYLOADS), bytes(1000), b"")])
    results, _ = engine.write([too_long])
    assert results[0].status == Status.REFUSED
    engine.make_ready()
    assert engine._room.zeroed_bytes == 0
    engine.close()


def test_the_writer_makes_ready_once_it_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Inbox, "is_idle", True)
    ours, theirs = socket.socketpair()
    ours.settimeout(30.0)
    engine = Engine(tmp_path, sync=True, initial_map_bytes=64 * MEBI, max_map_bytes=64 * MEBI)
    with ours, theirs, closing(Inbox(theirs)) as inbox, ThreadPoolExecutor(1) as owner:
        writing = owner.submit(_push_two, ours)
        assert _Loop(theirs, inbox, engine, 0.0).run() == 0
        writing.result()
    assert engine._room.zeroed_bytes > engine._room.file_bytes
    engine.close()


def _push_two(connection: socket.socket) -> None:
    with connection:
        for number in range(2):
            document = msgpack.packb((*_append(number), ()))
            connection.sendall(writer_protocol.PARTS.pack(len(document), 0, 0) + document)
            # The second is answered after all that follows the answer to the first.
            assert connection.recv(1 << 16)
