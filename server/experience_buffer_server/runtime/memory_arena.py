"""Memory that processes of one machine share, and what lies where in it.

Who made it puts bytes there and says to the others where; they say when they have done with them.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from experience_buffer._transport.free_runs import Runs

Buffer: TypeAlias = bytes | memoryview
BLOCK_BYTES: Final = 4096
"""Payloads begin at multiples of it: what disks and systems ask of direct access."""
_STEP_BYTES: Final = 2 << 20
"""Memory is taken in such steps, as far as it is needed."""


class Place(NamedTuple):
    """Where in the memory a value is, in whole blocks."""

    start: int
    end: int


def whole_blocks(num_bytes: int) -> int:
    """The bytes of the blocks that so many bytes take."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def make_memory(name: str, num_bytes: int) -> int:
    """Make memory that others can have; its descriptor. It is taken from the system as it is used.

    Nobody can change its size: to read behind the end of what a file has ends a process.

    Raises:
        OSError: The system has none.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), "memfd_create")
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Arena:
    """Shared memory as its maker has it. Belongs to one thread.

    Args:
        name: For those who look at the process.
        num_bytes: Its size, whole blocks.

    Raises:
        OSError: The system has none.
    """

    def __init__(self, name: str, num_bytes: int) -> None:
        self.descriptor = make_memory(name, num_bytes)
        """Of the memory, for others; negative once it is closed."""
        try:
            self._memory = mmap.mmap(self.descriptor, num_bytes)
        except OSError:
            os.close(self.descriptor)
            raise
        self._view = memoryview(self._memory)
        self._num_bytes = num_bytes
        self._backed_bytes = 0
        """So far there is memory for certain: a system that promises too much ends who uses it."""
        self._free = Runs()
        self._free.add(0, num_bytes)

    @property
    def free_bytes(self) -> int:
        """What could be put there, if it were in one piece."""
        return self._free.num_bytes

    def put(self, pieces: Sequence[Buffer]) -> Place | None:
        """Join pieces in whole blocks, zeros up to the end of the last one; None: there is no room.

        They stay until they are taken out.
        """
        size = whole_blocks(sum(map(len, pieces)))
        # From the beginning on: the same pages serve again and again, and few others are ever used.
        start = self._free.take(size, near=0)
        if start is None:
            return None
        place = Place(start, start + size)
        try:
            self._back(place.end)
            self._join(pieces, place)
        except OSError:
            self.take_out([place])
            return None
        except BaseException:
            self.take_out([place])
            raise
        return place

    def _back(self, end: int) -> None:
        """See that there is memory up to there.

        Raises:
            OSError: There is none.
        """
        if end > self._backed_bytes:
            upto = min(-(-end // _STEP_BYTES) * _STEP_BYTES, self._num_bytes)
            os.posix_fallocate(self.descriptor, self._backed_bytes, upto - self._backed_bytes)
            self._backed_bytes = upto

    def _join(self, pieces: Sequence[Buffer], place: Place) -> None:
        view, at = self._view, place.start
        for piece in pieces:
            end = at + len(piece)
            view[at:end] = piece
            at = end
        view[at : place.end] = bytes(place.end - at)

    def take_out(self, places: Iterable[Place | None]) -> None:
        """Nobody needs any more what is there."""
        for place in places:
            if place is not None:
                self._free.add(*place)

    def close(self) -> None:
        """Release the memory; others keep it as long as they need it. Idempotent."""
        if self.descriptor < 0:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        self._free = Runs()
        self._view.release()
        self._memory.close()
