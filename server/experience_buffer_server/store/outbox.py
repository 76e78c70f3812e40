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
from collections.abc import Sequence
from typing import Final, NamedTuple

from experience_buffer_server.store.payload_file import whole_blocks
from experience_buffer_server.store.pieces import Buffer
from experience_buffer_server.store.runs import Runs

_log = logging.getLogger(__name__)

OUTBOX_BYTES: Final = 32 << 20
"""Two turns of the writer: one that it writes, and one that waits. Pages never used take no memory."""


class Place(NamedTuple):
    """Where a payload is."""

    start: int
    end: int


class Outbox:
    """The owner's side. Belongs to one thread.

    Args:
        num_bytes: Its size, whole blocks.
    """

    def __init__(self, num_bytes: int = OUTBOX_BYTES) -> None:
        self._free = Runs()
        self.descriptor = -1
        """Of the memory, for `attach` in the writer process; negative: there is none."""
        self._memory: mmap.mmap | None = None
        try:
            self._memory = self._get(num_bytes)
        except OSError as error:
            self._close_descriptor()
            _log.warning("large payloads go to the writer process over its socket: %s", error)
        else:
            self._free.add(0, num_bytes)
        self._view = memoryview(self._memory or b"")

    def _get(self, num_bytes: int) -> mmap.mmap:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), "memfd_create")
        self.descriptor = os.memfd_create("outbox", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, num_bytes)
        return mmap.mmap(self.descriptor, num_bytes)

    @property
    def free_bytes(self) -> int:
        """What could be put there, if it were in one piece."""
        return self._free.num_bytes

    def put(self, pieces: Sequence[Buffer]) -> Place | None:
        """Join the pieces of a payload, zeros up to the end of its last block; None: there is no room.

        It stays until it is taken out.
        """
        size = whole_blocks(sum(map(len, pieces)))
        # From the beginning on: the same pages serve again and again, and few others are ever used.
        start = self._free.take(size, near=0)
        if start is None:
            return None
        view, at = self._view, start
        for piece in pieces:
            end = at + len(piece)
            view[at:end] = piece
            at = end
        end = start + size
        view[at:end] = bytes(end - at)
        return Place(start, end)

    def take_out(self, place: Place) -> None:
        """The writer has done with a payload."""
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
