"""Payloads on their way to the writer process, in memory that it shares with the owner.

The owner joins a large payload there, at the beginning of a block, and the writer process has the disk
take it from there: a socket would copy it twice, and a third copy would align it. What there is no room
for takes the socket. Where the system has no such memory, everything does.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Final

from experience_buffer_server.runtime.memory_arena import Arena, Buffer, Place
from experience_buffer_server.store.interface import LARGE_PAYLOAD_BYTES

_log = logging.getLogger(__name__)

OUTBOX_BYTES: Final = 32 << 20
"""Two turns of the writer: one that it writes, and one that waits."""


class Outbox:
    """The owner's side. Belongs to one thread.

    Args:
        num_bytes: Its size, whole blocks.
    """

    def __init__(self, num_bytes: int = OUTBOX_BYTES) -> None:
        self._arena: Arena | None = None
        try:
            self._arena = Arena("outbox", num_bytes)
        except OSError as error:
            _log.warning("large payloads go to the writer process over its socket: %s", error)

    @property
    def descriptor(self) -> int:
        """Of the memory, for `attach` in the writer process; negative: there is none."""
        return -1 if self._arena is None else self._arena.descriptor

    @property
    def free_bytes(self) -> int:
        """What could be put there, if it were in one piece."""
        return 0 if self._arena is None else self._arena.free_bytes

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
        """Do what `Arena.put` does; there is no room where there is no memory."""
        return None if self._arena is None else self._arena.put(pieces)

    def take_out(self, places: Iterable[Place | None]) -> None:
        """The writer has done with payloads."""
        if self._arena is not None:
            self._arena.take_out(places)

    def close(self) -> None:
        """Release the memory; the writer process keeps it as long as it needs it. Idempotent."""
        if self._arena is not None:
            self._arena.close()


def attach(descriptor: int) -> memoryview:
    """The outbox as the writer process has it; empty where there is none. The descriptor is closed."""
    if descriptor < 0:
        return memoryview(b"")
    try:
        return memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
    finally:
        os.close(descriptor)
