"""Payloads on their way to the writer process, in memory that it shares with the owner.

The owner joins a large payload there, at the beginning of a block, and the writer process has the disk
take it from there: a socket would copy it twice, and a third copy would align it. What there is no room
for takes the socket. Where the system has no such memory, everything does.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Final

from experience_buffer_server.store.base import LARGE_PAYLOAD_BYTES
from experience_buffer_server.store.frames import Place
from experience_buffer_server.store.payload_file import whole_blocks
from experience_buffer_server.store.runs import Runs
from experience_buffer_server.store.scattered import Buffer

_log = logging.getLogger(__name__)

OUTBOX_BYTES: Final = 32 << 20
"""Two turns of the writer: one that it writes, and one that waits."""
_STEP_BYTES: Final = 2 << 20
"""Memory is taken in such steps, as far as it is needed."""


class Outbox:
    """The owner's side. Belongs to one thread.

    Args:
        num_bytes: Its size, whole blocks.
    """

    def __init__(self, num_bytes: int = OUTBOX_BYTES) -> None:
        self._free = Runs()
        self._num_bytes = num_bytes
        self._backed_bytes = 0
        """So far there is memory for certain: a system that promises too much ends who uses it."""
        self.descriptor = -1
        """Of the memory, for `attach` in the writer process; negative: there is none."""
        self._memory: mmap.mmap | None = None
        try:
            self._memory = self._get()
        except OSError as error:
            self._close_descriptor()
            _log.warning("large payloads go to the writer process over its socket: %s", error)
        else:
            self._free.add(0, num_bytes)
        self._view = memoryview(self._memory or b"")

    def _get(self) -> mmap.mmap:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), "memfd_create")
        self.descriptor = os.memfd_create("outbox", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self._num_bytes)
        return mmap.mmap(self.descriptor, self._num_bytes)

    @property
    def free_bytes(self) -> int:
        """What could be put there, if it were in one piece."""
        return self._free.num_bytes

    def put_all(self, values: Sequence[Sequence[Buffer]]) -> list[Place | None]:
        """Do what `put` does for the large payloads among values; None in the place of others."""
        places: list[Place | None] = []
        try:
            for value in values:
                is_large = sum(map(len, value)) >= LARGE_PAYLOAD_BYTES
                places.append(self.put(value) if is_large else None)
        except BaseException:
            self.take_out(places)
            raise
        return places

    def put(self, pieces: Sequence[Buffer]) -> Place | None:
        """Join the pieces of a payload, zeros up to the end of its last block; None: there is no room.

        It stays until it is taken out.
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
        """The writer has done with payloads."""
        for place in places:
            if place is not None:
                self._free.add(*place)

    def close(self) -> None:
        """Release the memory; the writer process keeps it as long as it needs it. Idempotent."""
        self._close_descriptor()
        self._free = Runs()
        self._view.release()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _close_descriptor(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def attach(descriptor: int) -> memoryview:
    """The outbox as the writer process has it; empty where there is none. The descriptor is closed."""
    if descriptor < 0:
        return memoryview(b"")
    try:
        return memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
    finally:
        os.close(descriptor)
