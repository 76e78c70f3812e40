"""Responses of one sample stream in memory that the server shares with it."""

from __future__ import annotations

import logging

from google.protobuf.message import DecodeError

from experience_buffer import _memory, _sample_wire, _shared_memory
from experience_buffer._frame import aligned
from experience_buffer._limits import DEFAULT_LIMITS
from experience_buffer.errors import InternalServerError
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1 import types_pb2

logger = logging.getLogger("experience_buffer")


class SampleMemory:
    """What one connection of a sample stream has of shared memory. Belongs to who reads the stream."""

    def __init__(self) -> None:
        self._memory: memoryview | None = None

    def offered(self, offer: types_pb2.SharedMemory) -> list[pb.SampleStreamRequest]:
        """Take the memory that the server has, if this process may; what to say to that."""
        try:
            self._memory = _shared_memory.attach(offer, writable=False)
        except (OSError, ValueError) as error:
            logger.debug("no shared memory with the server: %s", error)
            return []
        return [pb.SampleStreamRequest(memory_ready=pb.MemoryReady())]

    def read(
        self, span: types_pb2.MemorySpan
    ) -> tuple[_sample_wire.Received[pb.SampleStreamResponse], pb.SampleStreamRequest]:
        """Read a response, and copy what is large; and what tells the server that its place is free.

        Nothing else refers to the copies, and they are writable: tensors may be views on them.

        Raises:
            InternalServerError: There is none.
        """
        try:
            if self._memory is None:
                raise ValueError("there is no shared memory")
            part = _shared_memory.part(self._memory, span)
            received = _copied(_sample_wire.read_stream_response(part))
        except (ValueError, DecodeError) as error:
            raise InternalServerError(
                f"the server says that a batch lies where none is: {error}"
            ) from error
        return received, pb.SampleStreamRequest(released=span)


def _copied(
    received: _sample_wire.Received[pb.SampleStreamResponse],
) -> _sample_wire.Received[pb.SampleStreamResponse]:
    """A response without views of the memory that it lies in."""
    payloads = [
        aligned(payload, DEFAULT_LIMITS) if isinstance(payload, memoryview) else payload
        for payload in received.payloads
    ]
    packed = received.packed
    if isinstance(packed, memoryview):
        packed = memoryview(_memory.joined([packed]))
    return received._replace(payloads=payloads, packed=packed)
