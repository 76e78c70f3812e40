"""Pushes of one stream in memory that it shares with the server, as far as there is room in it.

opening -> offered -> message: placed -> answered: free again
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from experience_buffer import _shared_memory, _wire
from experience_buffer._queue import Request
from experience_buffer._runs import Runs
from experience_buffer.v1 import types_pb2

logger = logging.getLogger("experience_buffer")
_LINE_BYTES: Final = 64
"""Payloads begin at multiples of it, where processors copy fastest."""


class PushMemory:
    """What one connection of a writer has of shared memory. Thread-safe.

    Args:
        fields: Of `_wire.push_fields`: the buffer that is pushed to.
        is_wanted: Whether to ask for any.
    """

    def __init__(self, fields: bytes, *, is_wanted: bool) -> None:
        self._fields = fields
        self._machine = _shared_memory.machine() if is_wanted else ""
        self._lock = threading.Lock()
        self._memory: memoryview | None = None
        self._free = Runs()
        self._placed: dict[int, tuple[int, int]] = {}
        """By the sequence of a request under way: where its payloads lie."""

    def opening(self) -> list[bytes]:
        """What is sent first on the connection; nothing where memory can't be shared."""
        return [_wire.push_memory_request(self._fields, self._machine)] if self._machine else []

    def offered(self, offer: types_pb2.SharedMemory) -> None:
        """Take the memory that the server has, if this process may."""
        try:
            memory = _shared_memory.attach(offer, writable=True)
        except (OSError, ValueError) as error:
            logger.debug("no shared memory with the server: %s", error)
            return
        with self._lock:
            self._memory = memory
            self._free.add(0, len(memory) // _LINE_BYTES * _LINE_BYTES)

    def message(self, request: Request) -> bytes:
        """The `PushStreamRequest` to send; copies the payloads, not to be made under a lock."""
        memory = self._memory
        if memory is None or request.num_bytes < _shared_memory.MIN_BYTES:
            return request.message()
        sizes = [-(-len(payload) // _LINE_BYTES) * _LINE_BYTES for payload in request.payloads]
        start = self._take(request.sequence, sum(sizes))
        if start is None:
            return request.message()
        spans = []
        for payload, size in zip(request.payloads, sizes, strict=True):
            memory[start : start + len(payload)] = payload
            spans.append(types_pb2.MemorySpan(offset=start, num_bytes=len(payload)))
            start += size
        return _wire.push_by_spans(request.sequence, request.fields, spans)

    def answered(self, sequence: int) -> None:
        """The server has read a request: what lay there may be written over."""
        with self._lock:
            place = self._placed.pop(sequence, None)
            if place is not None:
                self._free.add(*place)

    def _take(self, sequence: int, num_bytes: int) -> int | None:
        """Where the payloads of a request go; None: there is no room."""
        with self._lock:
            # From the beginning on: the same pages serve again and again.
            start = self._free.take(num_bytes, near=0)
            if start is not None:
                self._placed[sequence] = start, start + num_bytes
            return start
