"""The file that large payloads lie in, `payloads.bin`: written and read past the system's page cache.

A page of that cache has to be found, cleared and filled before it is written: for large payloads that
takes longer than everything else that is done for them. What lies where is in LMDB (table EXTENTS);
nothing here knows LMDB. Where a file system has no direct access, the file is used as any other.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from experience_buffer_server.runtime.memory_arena import whole_blocks
from experience_buffer_server.store.errors import DamagedRecordError, StoreFailedError
from experience_buffer_server.store.lmdb.disk import private_files

NAME: Final = "payloads.bin"
_BOUNCE_BYTES: Final = 4 << 20
_HUGE_BYTES: Final = 2 << 20
"""Buffers for reading are multiples of it, or smaller powers of two, so that they serve for payloads of
other sizes, too, and take at most twice what is read into them, or `_LEAST_BYTES`."""
_LEAST_BYTES: Final = 64 << 10
"""The smallest of them."""
_MOST_PIECES: Final = 512
"""Of a write; the system takes twice as many."""
_MOST_KEPT_BYTES: Final = 64 << 20
"""Buffers beyond that are given back to the system after use."""


_DAMAGE_CODES: Final = frozenset(
    {errno.ENOENT, errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN}
)
"""What the system says of a file that is lost, or of a disk that can't read it; others, such as for want
of memory or descriptors, say nothing of what is stored."""


def unreadable(what: str, error: OSError) -> DamagedRecordError | StoreFailedError:
    """What an error of reading says of what is stored: that it is lost, or only that it can't be read now."""
    kind = DamagedRecordError if error.errno in _DAMAGE_CODES else StoreFailedError
    return kind(f"{what}: {error.strerror}")


class Aligned(NamedTuple):
    """A payload that lies in memory as it is to lie in the file: from the beginning of a block on."""

    payload: memoryview
    blocks: memoryview
    """The same up to the end of its last block, zeros behind it."""
    checksum: bytes = b""
    """Of the payload, as `seal.checksum` makes it; empty where it isn't known."""


Placed: TypeAlias = tuple[int, memoryview | Aligned]
"""Offset, a multiple of `BLOCK_BYTES`, and bytes of a payload."""


class PayloadWriter:
    """The file as its one writer has it. Belongs to one thread.

    It is made with the first payload.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file = -1
        self._is_dirty = False
        self._bounce: memoryview | None = None
        """Aligned, as direct access needs it."""

    def write(self, payloads: Iterable[Placed]) -> None:
        """Write payloads at their offsets, in as few pieces as they allow.

        Raises:
            OSError: No room, or the disk fails; what was written then is undefined.
        """
        for is_aligned, alike in groupby(payloads, key=_is_aligned):
            if is_aligned:
                self._write_aligned(alike)
            else:
                self._write_copied(alike)

    def _write_aligned(self, payloads: Iterable[Placed]) -> None:
        """Write payloads from where they are."""
        pieces: list[memoryview] = []
        begin = end = 0
        for offset, payload in payloads:
            assert isinstance(payload, Aligned)
            if pieces and (offset != end or len(pieces) == _MOST_PIECES):
                self._write(begin, pieces)
                pieces = []
            if not pieces:
                begin = offset
            pieces.append(payload.blocks)
            end = offset + len(payload.blocks)
        if pieces:
            self._write(begin, pieces)

    def _write_copied(self, payloads: Iterable[Placed]) -> None:
        """Write payloads that lie anywhere, through memory that is aligned."""
        if self._bounce is None:
            self._bounce = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))
        bounce = self._bounce
        begin = filled = 0
        for offset, payload in payloads:
            assert isinstance(payload, memoryview)
            if filled and offset != begin + filled:
                self._write(begin, [bounce[:filled]])
                filled = 0
            done = 0
            while done < len(payload):
                if filled == _BOUNCE_BYTES:
                    self._write(begin, [bounce])
                    filled = 0
                if not filled:
                    begin = offset + done
                count = min(_BOUNCE_BYTES - filled, len(payload) - done)
                bounce[filled : filled + count] = payload[done : done + count]
                filled += count
                done += count
            end = whole_blocks(filled)
            bounce[filled:end] = bytes(end - filled)
            filled = end
        if filled:
            self._write(begin, [bounce[:filled]])

    def _write(self, offset: int, pieces: list[memoryview]) -> None:
        """Write pieces of whole blocks one after the other; the list is used up."""
        if self._file < 0:
            file = _open(self._path, os.O_RDWR | os.O_CREAT)
            try:
                # A new file survives a power failure only once its folder is on disk, too.
                private_files.sync(self._path.parent)
            except OSError:
                os.close(file)
                raise
            self._file = file
        self._is_dirty = True
        is_given_up = False
        while pieces:
            try:
                count = os.pwritev(self._file, pieces, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or is_given_up:
                    raise
                is_given_up = True
                _give_up_direct(self._file)
                continue
            if not count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            offset += count
            _drop_front(pieces, count)

    def sync_all(self) -> None:
        """Have on the disk what earlier writers have left to the system.

        Raises:
            OSError: The disk fails.
        """
        with suppress(FileNotFoundError):
            self._file = _open(self._path, os.O_RDWR)
            os.fdatasync(self._file)

    @property
    def num_bytes(self) -> int:
        """Size of the file, 0 without one, as far as this has opened it."""
        return 0 if self._file < 0 else os.fstat(self._file).st_size

    def sync(self) -> None:
        """Have on the disk what was written.

        Raises:
            OSError: The disk fails.
        """
        if self._is_dirty:
            os.fdatasync(self._file)
            self._is_dirty = False

    def cut(self, end: int) -> None:
        """Give back the room of what was written behind the end and isn't stored."""
        if self._file >= 0:
            with suppress(OSError):  # It costs room, nothing else.
                os.truncate(self._file, end)

    def close(self) -> None:
        """Release the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class PayloadReader:
    """The file as others read it, from any thread."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file = -1
        self._lock = threading.Lock()
        self._kept: list[mmap.mmap] = []
        """Buffers for reuse: new memory takes longer than the reading."""
        self._kept_bytes = 0

    @contextmanager
    def read(self, offset: int, num_bytes: int) -> Iterator[memoryview]:
        """Read a payload, or all that lies between two; blocks for the disk.

        Args:
            offset: A multiple of `BLOCK_BYTES`.
            num_bytes: Behind the end of the file there are zeros: whoever asks has a checksum.

        Returns:
            A view, valid within the block.

        Raises:
            OSError: There is no file, or the disk fails.
        """
        buffer = self._take(num_bytes)
        with memoryview(buffer) as whole, whole[: whole_blocks(num_bytes)] as blocks:
            self._read(blocks, offset)
            payload = blocks[:num_bytes]
        yield payload
        # Not after an error, nor where somebody looks at the view itself: that memory isn't used again.
        with suppress(BufferError):
            payload.release()
            self._give_back(buffer)

    def _read(self, buffer: memoryview, offset: int) -> None:
        with self._lock:
            if self._file < 0:
                self._file = _open(self._path, os.O_RDONLY)
            file = self._file
        done, is_given_up = 0, False
        while done < len(buffer):
            try:
                count = os.preadv(file, [buffer[done:]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or is_given_up:
                    raise
                is_given_up = True
                _give_up_direct(file)
                continue
            if not count:
                buffer[done:] = bytes(len(buffer) - done)
                return
            done += count

    def _take(self, num_bytes: int) -> mmap.mmap:
        size = _buffer_bytes(num_bytes)
        with self._lock:
            for place, buffer in enumerate(self._kept):
                if size <= len(buffer) <= 2 * size:
                    self._kept_bytes -= len(buffer)
                    return self._kept.pop(place)
        buffer = mmap.mmap(-1, size)
        if size >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # A kernel without them.
                buffer.madvise(mmap.MADV_HUGEPAGE)
        return buffer

    def _give_back(self, buffer: mmap.mmap) -> None:
        with self._lock:
            self._kept.append(buffer)
            self._kept_bytes += len(buffer)
            while self._kept_bytes > _MOST_KEPT_BYTES:
                self._kept_bytes -= len(self._kept.pop(0))

    def close(self) -> None:
        """Release the file. Idempotent."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            self._kept.clear()
            self._kept_bytes = 0


def _is_aligned(placed: Placed) -> bool:
    return isinstance(placed[1], Aligned)


def _drop_front(pieces: list[memoryview], num_bytes: int) -> None:
    """Drop so many bytes, all of them if there are no more."""
    done = 0
    while done < len(pieces) and num_bytes >= len(pieces[done]):
        num_bytes -= len(pieces[done])
        done += 1
    del pieces[:done]
    if num_bytes:
        pieces[0] = pieces[0][num_bytes:]


def _buffer_bytes(num_bytes: int) -> int:
    """The size of a buffer that so many bytes are read into."""
    if num_bytes > _HUGE_BYTES // 2:
        return -(-num_bytes // _HUGE_BYTES) * _HUGE_BYTES
    return max(1 << (num_bytes - 1).bit_length(), _LEAST_BYTES)


def _open(path: Path, flags: int) -> int:
    """Open the file, for direct access where there is one."""
    for direct in (getattr(os, "O_DIRECT", 0), 0):
        try:
            return os.open(path, flags | direct | os.O_CLOEXEC, private_files.FILE_MODE)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
    raise AssertionError


def _give_up_direct(file: int) -> None:
    """Go on without direct access: the disk's blocks are larger than ours."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
