"""The file of large payloads on a real disk: bytes, runs, errors, and systems without direct access."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from experience_buffer_server.runtime import memory_arena
from experience_buffer_server.runtime.memory_arena import BLOCK_BYTES, whole_blocks
from experience_buffer_server.store.lmdb.large import payload_file
from experience_buffer_server.store.lmdb.large.payload_file import (
    NAME,
    Aligned,
    PayloadReader,
    PayloadWriter,
)

SIZES = (1, BLOCK_BYTES, BLOCK_BYTES + 1, 65_536, 129_083, (9 << 20) + 5)


def placed(sizes: Sequence[int], gap: int = 0) -> list[tuple[int, bytes]]:
    offset, found = 0, []
    for size in sizes:
        found.append((offset, os.urandom(size)))
        offset += whole_blocks(size) + gap
    return found


def written(folder: Path, payloads: Sequence[tuple[int, bytes]]) -> None:
    writer = PayloadWriter(folder)
    writer.write([(offset, memoryview(payload)) for offset, payload in payloads])
    writer.sync()
    writer.close()


def read(reader: PayloadReader, payloads: Sequence[tuple[int, bytes]]) -> list[bytes | str]:
    found: list[bytes | str] = []
    for offset, payload in payloads:
        try:
            with reader.read(offset, len(payload)) as view:
                found.append(bytes(view))
        except OSError as error:
            found.append(str(error.strerror))
    return found


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[PayloadReader]:
    reader = PayloadReader(tmp_path)
    yield reader
    reader.close()


@pytest.mark.parametrize("gap", [0, BLOCK_BYTES])
@pytest.mark.parametrize("sizes", [SIZES, SIZES[::-1], (65_536,) * 200])
def test_payloads_are_read_back(
    tmp_path: Path, reader: PayloadReader, sizes: Sequence[int], gap: int
) -> None:
    payloads = placed(sizes, gap)
    written(tmp_path, payloads)
    assert read(reader, payloads) == [payload for _, payload in payloads]
    assert read(reader, payloads[::-2]) == [payload for _, payload in payloads[::-2]]
    assert read(reader, []) == []
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


def aligned(payload: bytes) -> Aligned:
    """As it lies in the outbox."""
    size = whole_blocks(len(payload))
    memory = memoryview(mmap.mmap(-1, size))
    memory[: len(payload)] = payload
    return Aligned(memory[: len(payload)], memory)


@pytest.mark.parametrize("gap", [0, BLOCK_BYTES])
@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("most", [1, 7, 1 << 20, 1 << 40])
def test_aligned_payloads_are_written_from_where_they_are(
    tmp_path: Path,
    reader: PayloadReader,
    monkeypatch: pytest.MonkeyPatch,
    gap: int,
    every: int,
    most: int,
) -> None:
    """Also beside others, and where the system takes only a part of a write."""
    real, num_writes = os.pwritev, 0

    def pwritev(file: int, pieces: Sequence[memoryview], offset: int) -> int:
        nonlocal num_writes
        num_writes += 1
        assert len(pieces) <= most
        if most >= 1 << 20:
            return real(file, pieces, offset)
        return real(file, [pieces[0][: most * BLOCK_BYTES]], offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(payload_file, "_MOST_PIECES", most)
    payloads = placed([65_536, 70_001, 129_083] * 9, gap)
    writer = PayloadWriter(tmp_path)
    writer.write(
        [
            (offset, memoryview(payload) if place % every else aligned(payload))
            for place, (offset, payload) in enumerate(payloads)
        ]
    )
    writer.sync()
    writer.close()
    assert read(reader, payloads) == [payload for _, payload in payloads]
    if every == 1 and most >= 1 << 20:
        assert num_writes == (len(payloads) if gap else 1)


def test_what_was_there_stays_and_what_is_written_over_is_new(
    tmp_path: Path, reader: PayloadReader
) -> None:
    payloads = placed([65_536] * 6)
    written(tmp_path, payloads)
    payloads[2] = (payloads[2][0], os.urandom(60_001))
    written(tmp_path, payloads[2:3])
    assert read(reader, payloads) == [payload for _, payload in payloads]


def test_a_page_cache_isn_t_filled(tmp_path: Path) -> None:
    """Where the file system has direct access, as those of servers do."""
    flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
    try:
        os.close(os.open(tmp_path / "probe", flags))
    except OSError:
        pytest.skip("no direct access here")
    written(tmp_path, placed([1 << 20] * 8))
    with open(tmp_path / NAME, "rb") as file:
        residency = _resident_pages(file.fileno(), 8 << 20)
    assert residency == 0


def _resident_pages(file: int, num_bytes: int) -> int:
    pages = (ctypes.c_ubyte * (num_bytes // mmap.PAGESIZE))()
    with mmap.mmap(file, num_bytes, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(start))
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(num_bytes), pages) == 0
        del start
    return sum(page & 1 for page in pages)


@pytest.mark.parametrize("refuses", ["open", "use"])
def test_a_file_system_without_direct_access_will_do(
    tmp_path: Path, reader: PayloadReader, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    if refuses == "open":
        real_open = os.open

        def open_(path: str, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real_open(path, flags, mode)

        monkeypatch.setattr(os, "open", open_)
    else:
        # What a disk with larger blocks says of each.
        monkeypatch.setattr(memory_arena, "BLOCK_BYTES", 512)
    payloads = [(0, os.urandom(70_001)), (70_144, os.urandom(66_001))]
    written(tmp_path, payloads)
    assert read(reader, payloads) == [payload for _, payload in payloads]


def test_a_missing_or_short_file_costs_what_was_in_it(
    tmp_path: Path, reader: PayloadReader
) -> None:
    payloads = placed([65_536] * 4)
    assert read(reader, payloads) == ["No such file or directory"] * 4
    written(tmp_path, payloads)
    os.truncate(tmp_path / NAME, 100_000)
    found = read(reader, payloads)
    assert found[0] == payloads[0][1]
    assert found[1:] != [payload for _, payload in payloads[1:]]


def test_a_disk_that_fails_in_one_place_costs_nothing_elsewhere(
    tmp_path: Path, reader: PayloadReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads = placed([65_536] * 3, gap=BLOCK_BYTES)
    written(tmp_path, payloads)
    real, bad = os.preadv, payloads[1][0]

    def preadv(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    first, _, last = payloads
    assert read(reader, payloads) == [first[1], "Input/output error", last[1]]


def test_threads_read_at_once(tmp_path: Path, reader: PayloadReader) -> None:
    payloads = placed([129_083] * 64)
    written(tmp_path, payloads)
    wrong: list[int] = []

    def look(start: int) -> None:
        for _ in range(20):
            mine = payloads[start::4]
            if read(reader, mine) != [payload for _, payload in mine]:
                wrong.append(start)

    threads = [threading.Thread(target=look, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("num_bytes", [1, 65_537, 129_083, 300_000, (1 << 20) + 1, (3 << 20) - 1])
def test_memory_for_reading_is_little_more_than_what_is_read(
    tmp_path: Path, reader: PayloadReader, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """A batch has many payloads in memory at once: those just large enough may not take much more."""
    payloads = placed([num_bytes] * 12)
    written(tmp_path, payloads)
    made: list[int] = []
    real = mmap.mmap

    def counted(file: int, size: int) -> mmap.mmap:
        made.append(size)
        return real(file, size)

    monkeypatch.setattr(mmap, "mmap", counted)
    for _ in range(3):
        with ExitStack() as stack:
            for offset, payload in payloads:
                read = stack.enter_context(reader.read(offset, num_bytes))
                assert bytes(read) == payload
    assert sum(made) <= 12 * max(2 * num_bytes, 64 << 10)
    assert len(made) == 12, "memory isn't used again"


def test_room_behind_the_end_is_given_back(tmp_path: Path) -> None:
    writer = PayloadWriter(tmp_path)
    writer.cut(0)  # There is no file.
    writer.write([(0, memoryview(bytes(1 << 20)))])
    writer.cut(8192)
    assert (tmp_path / NAME).stat().st_size == 8192
    writer.close()
