"""Pushes of one stream in memory that it shares with the server, as far as there is room in it.

opening -> offered -> place, when a payload is appended ------------> settled: free again
                      reserve, for what had no place then -> answered: free again
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Any, Final

from experience_buffer._messages import push_bytes, shared_memory
from experience_buffer._messages.push_bytes import Payload, Pieces
from experience_buffer._transport.free_runs import Runs
from experience_buffer._transport.push_queue import Request
from experience_buffer.v1 import types_pb2

logger = logging.getLogger("experience_buffer")
_LINE_BYTES: Final = 64
"""Payloads begin at multiples of it, where processors copy fastest."""


class PushMemory:
    """What one connection of a writer has of shared memory. Thread-safe.

    Args:
        fields: Of `push_bytes.push_fields`: the buffer that is pushed to.
        is_wanted: Whether to ask for any.
    """

    def __init__(self, fields: bytes, *, is_wanted: bool) -> None:
        self._fields = fields
        self._machine = shared_memory.machine() if is_wanted else ""
        self._lock = threading.Lock()
        self._memory: memoryview | None = None
        self._free = Runs()
        self._placed: dict[int, tuple[int, int]] = {}
        """By the id of a payload that has a place and isn't settled, hence alive: where it lies."""
        self._copied: dict[int, tuple[int, int]] = {}
        """By the sequence of a request under way: the room for those of its payloads that had none."""
        self._under_way: set[int] = set()
        """The sequences of all requests that have a place and aren't answered."""

    def opening(self) -> list[bytes]:
        """What is sent first on the connection; nothing where memory can't be shared."""
        return (
            [push_bytes.push_memory_request(self._fields, self._machine)] if self._machine else []
        )

    def offered(self, offer: types_pb2.SharedMemory) -> None:
        """Take the memory that the server has, if this process may."""
        try:
            memory = shared_memory.attach(offer, writable=True)
        except (OSError, ValueError) as error:
            logger.debug("no shared memory with the server: %s", error)
            return
        with self._lock:
            self._memory = memory
            self._free.add(0, len(memory) // _LINE_BYTES * _LINE_BYTES)

    def place(self, pieces: Pieces, *, pending_bytes: int) -> Payload:
        """Join a payload there, where it stays until it is settled, or else anywhere.

        Args:
            pieces: What it is joined of.
            pending_bytes: Of all payloads that aren't settled. As long as they and this one have room
                there together, none that comes later takes the room of one that comes earlier.
        """
        memory, num_bytes = self._memory, sum(map(len, pieces))
        if memory is None or num_bytes < shared_memory.MIN_BYTES:
            return b"".join(pieces)
        with self._lock:
            run = self._take(num_bytes) if pending_bytes + num_bytes <= len(memory) else None
        if run is None:
            return b"".join(pieces)
        start = run[0]
        payload = memory[start : start + num_bytes]
        mapped: Any = memory.obj  # It takes pieces whose elements are described in any way.
        for piece in pieces:
            end = start + len(piece)
            mapped[start:end] = piece
            start = end
        with self._lock:
            self._placed[id(payload)] = run
        return payload

    def settled(self, payloads: Iterable[Payload]) -> None:
        """They aren't sent again: what has a place here leaves it."""
        with self._lock:
            for payload in payloads:
                run = self._placed.pop(id(payload), None)
                if run is not None:
                    self._free.add(*run)

    def reserve(self, request: Request) -> bool:
        """Take room for the payloads of a request that have none, before it is sent.

        Returns:
            False: there is too little, and will be more once another request is answered. True without
            room where there is none to wait for: the payloads travel in the message then.
        """
        memory = self._memory
        if memory is None or not shared_memory.MIN_BYTES <= request.num_bytes <= len(memory):
            return True
        with self._lock:
            missing = [each for each in request.payloads if id(each) not in self._placed]
            if missing:
                run = self._take(sum(_whole_lines(len(each)) for each in missing))
                if run is None:
                    return not self._under_way
                self._copied[request.sequence] = run
            self._under_way.add(request.sequence)
        return True

    def message(self, request: Request) -> bytes:
        """The `PushStreamRequest` to send, with the payloads where room was reserved, or in itself.

        Not to be made under a lock: it copies.
        """
        memory = self._memory
        if memory is None or request.sequence not in self._under_way:
            return request.message()
        with self._lock:
            runs = [self._placed.get(id(payload)) for payload in request.payloads]
            free, _ = self._copied.get(request.sequence, (0, 0))
        spans = []
        for payload, run in zip(request.payloads, runs, strict=True):
            start = free if run is None else run[0]
            if run is None:
                memory[start : start + len(payload)] = payload
                free += _whole_lines(len(payload))
            spans.append(types_pb2.MemorySpan(offset=start, num_bytes=len(payload)))
        return push_bytes.push_by_spans(request.sequence, request.fields, spans)

    def answered(self, sequence: int) -> None:
        """The server has read a request: what was copied for it may be written over."""
        with self._lock:
            self._under_way.discard(sequence)
            run = self._copied.pop(sequence, None)
            if run is not None:
                self._free.add(*run)

    def _take(self, num_bytes: int) -> tuple[int, int] | None:
        """From where to where there is room for so many bytes; None: nowhere. Call with the lock held."""
        size = _whole_lines(num_bytes)
        # From the beginning on: the same pages serve again and again.
        start = self._free.take(size, near=0)
        return None if start is None else (start, start + size)


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
