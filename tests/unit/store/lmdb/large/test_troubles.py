"""What becomes of large payloads when something is missing: their file, room, memory, a row."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from pickle import PickleBuffer
from typing import cast

import lmdb
import pytest

from experience_buffer_server.store.interface import (
    DamagedRecordError,
    StoreFailedError,
    StoreFormatError,
)
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk import private_files
from experience_buffer_server.store.lmdb.disk.format import SEAL_BYTES, Extent, Table
from experience_buffer_server.store.lmdb.engine import Engine
from experience_buffer_server.store.lmdb.large import writes
from experience_buffer_server.store.lmdb.large.payload_file import (
    NAME,
    PayloadReader,
    PayloadWriter,
)
from experience_buffer_server.store.lmdb.large.reads import (
    MOST_AT_ONCE_BYTES,
    LargePayloads,
    Place,
    Together,
    is_as_written,
    side_by_side,
)
from experience_buffer_server.store.lmdb.reader import LmdbReader
from experience_buffer_server.store.lmdb.writer_protocol import REMOVE, Request, Status
from experience_buffer_server.store.payload import LARGE_PAYLOAD_BYTES, checksum
from tests.damaging import flip
from tests.unit.store.conftest import MEBI

LIMIT = 64 * MEBI
_bytes = random.Random(7).randbytes


class Engines:
    """Opens the store again and again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: list[Engine] = []

    def open(self, limit: int = LIMIT) -> Engine:
        engine = Engine(self._path, sync=True, initial_map_bytes=limit, max_map_bytes=limit)
        self._opened.append(engine)
        return engine

    def store(self, *names: str, num_bytes: int = MEBI) -> None:
        """Put payloads, and close."""
        assert put(self.open(), *names, num_bytes=num_bytes) == [Status.OK] * len(names)
        self.close()

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    engines = Engines(tmp_path)
    yield engines
    engines.close()


def put(engine: Engine, *names: str, num_bytes: int = MEBI) -> list[int]:
    requests = [
        Request(
            number=number,
            append_bytes=num_bytes + 8192,
            operations=[(Table.PAYLOADS, key(name), memoryview(bytearray(_payload(num_bytes))))],
        )
        for number, name in enumerate(names)
    ]
    return [result.status for result in engine.write(requests)[0]]


def _payload(num_bytes: int) -> bytes:
    return _bytes(num_bytes) + bytes(SEAL_BYTES)


def remove(engine: Engine, *names: str) -> None:
    for number, name in enumerate(names):
        row = (REMOVE, disk.numbered_key(1, number), key(name))
        (result,), _ = engine.write([Request(number=number, append_bytes=0, operations=[row])])
        assert result.status is Status.OK


def fill(engine: Engine, num_bytes: int) -> list[str]:
    """What was stored until it was full."""
    stored: list[str] = []
    while put(engine, name := f"{num_bytes}-{len(stored)}", num_bytes=num_bytes) == [Status.OK]:
        stored.append(name)
    return stored


def key(name: str) -> bytes:
    return disk.payload_key(1, name)


def commits(engine: Engine) -> int:
    return int(engine._env.info()["last_txnid"])


# --- the file


@pytest.mark.parametrize("left", [None, 0, MEBI])
def test_a_store_without_the_file_of_its_payloads_does_not_start(
    tmp_path: Path, engines: Engines, left: int | None
) -> None:
    """It would set aside what only has to be put back."""
    engines.store("a", "b")
    file = tmp_path / NAME
    content = file.read_bytes()
    if left is None:
        file.unlink()
    else:
        os.truncate(file, left)
    with pytest.raises(StoreFormatError, match=f"{NAME} is missing or cut short: .*put it back"):
        engines.open()
    assert file.exists() == (left is not None)
    file.write_bytes(content)
    assert put(engines.open(), "c") == [Status.OK]


def test_what_is_whole_in_a_file_that_was_cut_is_kept(tmp_path: Path, engines: Engines) -> None:
    engines.store("a", num_bytes=MEBI + 9)
    os.truncate(tmp_path / NAME, MEBI + 9)
    engines.store("b")
    with LmdbReader(tmp_path) as reader:
        assert all(isinstance(payload, bytes) for payload in reader.payloads(1, ["a", "b"]))


def test_a_new_store_is_not_made_beside_the_payloads_of_another(
    tmp_path: Path, engines: Engines
) -> None:
    engines.store("a")
    (tmp_path / "data.mdb").rename(tmp_path / "elsewhere")
    content = (tmp_path / NAME).read_bytes()
    with pytest.raises(StoreFormatError, match=r"no data\.mdb .*: put that back"):
        engines.open()
    assert (tmp_path / NAME).read_bytes() == content


def test_a_folder_that_cannot_be_synced_is_synced_with_the_next_payload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    errors = [OSError(errno.ENOSPC, "no room")]

    def sync(folder: Path) -> None:
        if errors:
            raise errors.pop()
        synced.append(folder)

    monkeypatch.setattr(private_files, "sync", sync)
    writer = PayloadWriter(tmp_path)
    with pytest.raises(OSError, match="no room"):
        writer.write([(0, memoryview(b"x"))])
    writer.write([(0, memoryview(b"x"))])
    writer.close()
    assert synced == [tmp_path]


# --- memory and descriptors


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_what_cannot_be_read_for_want_of_something_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Damaged experiences are set aside, which stays."""

    def fail(self: PayloadReader, num_bytes: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(PayloadReader, "_take", fail)
    payloads = LargePayloads(tmp_path)
    extent = Extent(0, 1, checksum(b"x"))
    with pytest.raises(StoreFailedError, match=os.strerror(code)), payloads.read(b"key", extent):
        pytest.fail("it can't be read")


def test_a_disk_that_fails_is_asked_once(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.store("a", "b")
    asked: list[int] = []

    def fail(self: PayloadReader, buffer: memoryview, offset: int) -> None:
        asked.append(offset)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(PayloadReader, "_read", fail)
    with LmdbReader(tmp_path) as reader:
        (found,) = fetched(reader, monkeypatch, "a").payloads
        assert isinstance(found, DamagedRecordError)
        (payload,) = reader.payloads(1, ["a"])
    assert payload is found
    assert len(asked) == 1


def places(reader: LmdbReader, *names: str) -> list[Place]:
    """Where those of them lie that are large."""
    return [place for place in reader.places(1, names) if place is not None]


def fetched(reader: LmdbReader, monkeypatch: pytest.MonkeyPatch, *names: str) -> Together:
    """Payloads in memory, where the reader finds them from now on."""
    found = reader._large.fetch(places(reader, *names))
    held = dict(zip(places(reader, *names), found.payloads, strict=True))
    monkeypatch.setattr(reader._fetching, "find", held.get)
    return found


def test_what_was_written_over_while_it_was_read_is_left_to_who_asks(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.store("a", "b", num_bytes=MEBI - 1)
    real = PayloadReader._read
    asked: list[tuple[int, int]] = []

    def read(self: PayloadReader, buffer: memoryview, offset: int) -> None:
        real(self, buffer, offset)
        if not asked:
            buffer[9] ^= 1
        asked.append((offset, len(buffer)))

    with LmdbReader(tmp_path) as reader:
        stored = reader.payloads(1, ["a", "b"])
        monkeypatch.setattr(PayloadReader, "_read", read)
        fetched(reader, monkeypatch, "a", "b")
        assert reader.payloads(1, ["a", "b"]) == stored
    assert asked == [(0, 2 * MEBI), (0, MEBI)], "both at once, and only what wasn't right again"


def test_one_of_neighbours_that_cannot_be_read_costs_the_others_nothing(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b", "c"]
    engines.store(*names, num_bytes=MEBI - 1)
    real = PayloadReader._read

    def read(self: PayloadReader, buffer: memoryview, offset: int) -> None:
        if offset < MEBI + 4096 <= offset + len(buffer):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(self, buffer, offset)

    monkeypatch.setattr(PayloadReader, "_read", read)
    with LmdbReader(tmp_path) as reader:
        found = reader._large.fetch(places(reader, *names))
        _, bad, _ = found.payloads
        assert isinstance(bad, DamagedRecordError)
        assert str(bad).endswith(f"can't be read from {NAME}: Input/output error")
        for number, place in enumerate(places(reader, *names)):
            payload = found.payloads[number]
            assert payload is bad or is_as_written(place, cast(memoryview, payload))
            found.release(number)


def test_memory_of_neighbours_is_used_again_once_all_were_released(
    tmp_path: Path, engines: Engines
) -> None:
    engines.store("a", "b", num_bytes=MEBI)
    with LmdbReader(tmp_path) as reader:
        memory = reader._large._file._kept
        found = reader._large.fetch(places(reader, "a", "b"))
        first, second = found.payloads
        found.release(0)
        assert memory == []
        assert is_as_written(places(reader, "b")[0], cast(memoryview, second))
        found.release(1)
        assert len(memory) == 1
        again = reader._large.fetch(places(reader, "a", "b"))
        still = PickleBuffer(cast(memoryview, again.payloads[0]))
        again.release(0)
        again.release(1)
        del again
        assert memory == [], "somebody still looks at it"
        assert len(still.raw()) == MEBI
        with pytest.raises(ValueError, match="released"):
            bytes(cast(memoryview, first))


def extents(*blocks: tuple[int, int]) -> list[Place]:
    """Payloads of so many bytes at these blocks."""
    return [(b"%d" % block, Extent(block * 4096, size, b"")) for block, size in blocks]


def test_what_lies_side_by_side_is_found_in_any_order() -> None:
    apart = [(300, 4096)]
    together = [(0, 4096), (1, 4097), (3, 1), (4, 8192), (6 + 64, 4096)]
    after = [(71 + 65, 4096)]
    found = list(side_by_side(extents(*apart, *reversed(together), *after)))
    assert found == [extents(*together), extents(*after), extents(*apart)]
    assert list(side_by_side([])) == []


def test_no_more_is_read_at_once_than_is_worth_it() -> None:
    blocks = MOST_AT_ONCE_BYTES // 4096
    halves = [(0, MOST_AT_ONCE_BYTES // 2), (blocks // 2, MOST_AT_ONCE_BYTES // 2)]
    huge = [(blocks, MOST_AT_ONCE_BYTES * 3)]
    last = [(blocks * 4, 1), (blocks * 4 + 1, 1)]
    found = list(side_by_side(extents(*halves, *huge, *last)))
    assert found == [extents(*halves), extents(*huge), extents(*last)]


def test_payloads_of_one_size_lie_in_either_place_when_the_limit_has_changed(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = LARGE_PAYLOAD_BYTES
    with monkeypatch.context() as patch:
        patch.setattr(writes, "LARGE_PAYLOAD_BYTES", num_bytes + 1)
        assert put(engines.open(), "a", num_bytes=num_bytes) == [Status.OK]
        engines.close()
    engine = engines.open()
    assert put(engine, "b", num_bytes=num_bytes) == [Status.OK]
    assert put(engine, "c", num_bytes=num_bytes - 1) == [Status.OK]
    engines.close()
    with LmdbReader(tmp_path) as reader:
        assert [place is not None for place in reader.places(1, "abc")] == [False, True, False]
        assert [isinstance(each, bytes) for each in reader.payloads(1, "abc")] == [True] * 3
    remove(engines.open(), "a", "b")
    engines.close()
    with LmdbReader(tmp_path) as reader:
        assert [each is None for each in reader.payloads(1, "abc")] == [True, True, False]


# --- room


def test_the_file_keeps_to_the_limit(tmp_path: Path, engines: Engines) -> None:
    """Whatever is left between payloads that stay, which larger ones don't fit into."""
    engine = engines.open()
    for num_bytes in range(MEBI, 3 * MEBI, MEBI // 4):
        stored = fill(engine, num_bytes)
        assert (tmp_path / NAME).stat().st_size <= LIMIT
        remove(engine, *stored[::2])
    assert engine.measure().live_bytes < LIMIT


def test_what_is_refused_costs_no_commit_while_a_reader_keeps_room(engines: Engines) -> None:
    engine = engines.open()
    stored = fill(engine, MEBI)
    reading = engine._env.begin()
    remove(engine, stored[0])
    before = commits(engine)
    assert set(put(engine, *"abcdefgh")) == {Status.FULL}
    assert commits(engine) == before
    reading.abort()
    assert put(engine, "i") == [Status.OK]


def test_what_was_removed_is_not_counted_as_stored(engines: Engines) -> None:
    engine = engines.open()
    stored = fill(engine, MEBI)
    full = engine.measure().live_bytes
    remove(engine, *stored[1:])
    assert engine.measure().live_bytes < full - (len(stored) - 2) * MEBI


def test_a_disk_without_room_refuses_and_ends_nothing(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where it is the taking back of room that finds none."""
    engine = engines.open()
    stored = fill(engine, MEBI)
    remove(engine, *stored[:4])

    def reclaim(txn: lmdb.Transaction[bytes]) -> None:
        raise lmdb.MapFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine._large, "reclaim", reclaim)
        assert put(engine, "a") == [Status.FULL]
    assert not engine.failed
    assert put(engine, "a") == [Status.OK]


# --- rows


def test_a_copy_counts_its_transactions_anew(tmp_path: Path, engines: Engines) -> None:
    """Its room is used again, and its next start finds the last commit."""
    engine = engines.open()
    assert put(engine, "a", "b") == [Status.OK, Status.OK]
    for _ in range(9):
        put(engine, "c")
    remove(engine, "a", "b")
    copy = tmp_path / "copy"
    copy.mkdir()
    engine._env.copy(str(copy), compact=True)
    (copy / NAME).write_bytes((tmp_path / NAME).read_bytes())
    for _ in range(3):
        copied = Engine(copy, sync=True, initial_map_bytes=LIMIT, max_map_bytes=LIMIT)
        copied.close()
    copied = Engine(copy, sync=True, initial_map_bytes=LIMIT, max_map_bytes=LIMIT)
    size = (copy / NAME).stat().st_size
    assert put(copied, "d", "e") == [Status.OK, Status.OK]
    assert (copy / NAME).stat().st_size == size
    with copied._env.begin(db=copied._tables[Table.FREED]) as txn:
        assert txn.stat(copied._tables[Table.FREED])["entries"] == 0
    copied.close()


def test_room_within_the_file_is_used_under_a_limit_that_was_lowered(
    tmp_path: Path, engines: Engines
) -> None:
    engine = engines.open()
    names = [str(number) for number in range(24)]
    assert put(engine, *names) == [Status.OK] * 24
    remove(engine, *names[:-1])
    engines.close()
    engine = engines.open(16 * MEBI)
    size = (tmp_path / NAME).stat().st_size
    assert size >= 24 * MEBI
    assert put(engine, "a") == [Status.OK]
    assert put(engine, "b", num_bytes=2 * MEBI) == [Status.OK]
    assert put(engine, "c", num_bytes=40 * MEBI) == [Status.FULL]
    assert (tmp_path / NAME).stat().st_size == size


def test_where_a_row_is_damaged_nothing_is_written_over(tmp_path: Path, engines: Engines) -> None:
    """What it names can be found by who mends the store."""
    engine = engines.open()
    assert put(engine, "a", "b", "c") == [Status.OK] * 3
    remove(engine, "a")
    engines.close()
    content = (tmp_path / NAME).read_bytes()
    flip(tmp_path, Table.EXTENTS, key("b"), place=0.5)
    assert put(engines.open(), "d", "e") == [Status.OK, Status.OK]
    assert (tmp_path / NAME).read_bytes()[MEBI : 2 * MEBI] == content[MEBI : 2 * MEBI]
