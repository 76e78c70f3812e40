"""Memory shared with clients on this machine: for payloads that they push, and for what they sample.

A stream asks for it, and has it as long as it lives. Where there is none, or no room in it, bytes go
over gRPC as everybody's do: nothing but time is lost. What a client has put there it can still change,
so what says how to read it is copied first, and the tensors' bytes, once, to where they are stored (see
`push_reading`). Belongs to the server's event loop.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from experience_buffer import errors
from experience_buffer._messages import shared_memory
from experience_buffer._messages.shared_memory import PUSH_BYTES
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.runtime.memory_arena import Arena, Buffer, Place, make_memory
from experience_buffer_server.runtime.metrics import Metrics

_log = logging.getLogger(__name__)

SAMPLE_BYTES: Final = 32 << 20
"""Of a sample stream: three batches of 64 long texts."""
_Made = TypeVar("_Made", bound="PushMemory | SampleMemory")


class SharedMemory:
    """All of it, and how much there may be. Not thread-safe.

    Args:
        max_bytes: The most that streams may have together; 0: none.
        metrics: Counts it.
    """

    def __init__(self, max_bytes: int, metrics: Metrics) -> None:
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._machine = shared_memory.machine()
        self._num_bytes = 0

    def for_pushes(self, asked: types_pb2.MemoryRequest) -> PushMemory | None:
        """Memory of a push stream, to be closed with it; None: the stream goes without."""
        return self._made(asked, PUSH_BYTES, PushMemory)

    def for_samples(self, asked: types_pb2.MemoryRequest) -> SampleMemory | None:
        """Memory of a sample stream, to be closed with it; None: the stream goes without."""
        return self._made(asked, SAMPLE_BYTES, SampleMemory)

    def _made(
        self,
        asked: types_pb2.MemoryRequest,
        num_bytes: int,
        make: Callable[[SharedMemory], _Made],
    ) -> _Made | None:
        if not self._machine or asked.machine != self._machine:
            self._metrics.memory_asked("elsewhere")
            return None
        if self._num_bytes + num_bytes > self._max_bytes:
            self._metrics.memory_asked("max_shared_bytes")
            return None
        try:
            made = make(self)
        except OSError as error:
            self._metrics.memory_asked("system")
            _log.warning("no shared memory for a stream, which goes without: %s", error)
            return None
        self._metrics.memory_asked("shared")
        self.give_back(-num_bytes)
        return made

    def give_back(self, num_bytes: int) -> None:
        """A stream has ended that had so many."""
        self._num_bytes -= num_bytes
        self._metrics.set_shared_bytes(self._num_bytes)


class PushMemory:
    """Where one client puts payloads; the client says what lies where in it.

    Raises:
        OSError: The system has none.
    """

    def __init__(self, owner: SharedMemory) -> None:
        self._shared = owner
        self._name = _new_name()
        self._descriptor = make_memory(self._name, PUSH_BYTES)
        try:
            # It is unmapped with the last push that has a view of it, which may outlive the stream.
            self._memory = memoryview(mmap.mmap(self._descriptor, PUSH_BYTES, prot=mmap.PROT_READ))
        except OSError:
            os.close(self._descriptor)
            raise

    def offer(self) -> types_pb2.SharedMemory:
        """What the client is told."""
        return _offer(self._name, self._descriptor, PUSH_BYTES)

    def payloads(self, spans: Sequence[types_pb2.MemorySpan]) -> list[memoryview]:
        """The payloads that a client says are there; they change as it likes.

        Raises:
            InvalidRequestError: One isn't there.
        """
        try:
            return [shared_memory.part(self._memory, span) for span in spans]
        except ValueError as error:
            raise errors.InvalidRequestError(f"spans: {error}", subject="spans") from None

    def close(self) -> None:
        """The stream has ended. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._memory = -1, memoryview(b"")
            self._shared.give_back(PUSH_BYTES)


class SampleMemory:
    """Where one client finds responses.

    Raises:
        OSError: The system has none.
    """

    def __init__(self, owner: SharedMemory) -> None:
        self._shared = owner
        self._name = _new_name()
        self._arena = Arena(self._name, SAMPLE_BYTES)
        self._lent: dict[int, Place] = {}
        """By offset: what the client hasn't released."""
        self.is_ready = False
        """Whether the client has it, too."""

    def offer(self) -> bytes:
        """The `SampleStreamResponse` that tells the client of it."""
        memory = _offer(self._name, self._arena.descriptor, SAMPLE_BYTES)
        return service_pb2.SampleStreamResponse(memory=memory).SerializeToString()

    def put(self, pieces: Sequence[Buffer]) -> bytes | None:
        """Put a response there; the one to send in its place. None: it has to go over gRPC.

        Args:
            pieces: A `SampleStreamResponse` as it goes over the wire; they are copied.
        """
        num_bytes = sum(map(len, pieces))
        if not self.is_ready or num_bytes < shared_memory.MIN_BYTES:
            return None
        place = self._arena.put(pieces)
        if place is None:
            return None
        self._lent[place.start] = place
        span = types_pb2.MemorySpan(offset=place.start, num_bytes=num_bytes)
        return service_pb2.SampleStreamResponse(span=span).SerializeToString()

    def release(self, span: types_pb2.MemorySpan) -> None:
        """The client has read a response.

        Raises:
            InvalidRequestError: None begins there, or it was released before.
        """
        place = self._lent.pop(span.offset, None)
        if place is None:
            raise errors.InvalidRequestError(
                f"no response lies at {span.offset} of the stream's shared memory: release each once",
                subject="released",
            )
        self._arena.take_out([place])

    def close(self) -> None:
        """The stream has ended. Idempotent."""
        if self._arena.descriptor >= 0:
            self.is_ready = False
            self._arena.close()
            self._shared.give_back(SAMPLE_BYTES)


def _new_name() -> str:
    return f"{shared_memory.NAME_PREFIX}{secrets.token_hex(16)}"


def _offer(name: str, descriptor: int, num_bytes: int) -> types_pb2.SharedMemory:
    return types_pb2.SharedMemory(
        process_id=os.getpid(), descriptor=descriptor, name=name, num_bytes=num_bytes
    )
