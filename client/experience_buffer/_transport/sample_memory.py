"""Responses of one sample stream in memory that the server shares with it."""

from __future__ import annotations

import logging

from google.protobuf.message import DecodeError

from experience_buffer._codec.frame import aligned
from experience_buffer._codec.limits import DEFAULT_LIMITS
from experience_buffer._messages import sample_bytes, shared_memory
from experience_buffer.errors import InternalServerError
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1 import types_pb2

logger = logging.getLogger("experience_buffer")


class SampleMemory:
    """What one connection of a sample stream has of shared memory. Belongs to who reads the stream."""

    def __init__(self) -> None:
        self._memory: memoryview | None = None
        self._parts: list[types_pb2.MemorySpan] = []
        """Where the parts of the present packed batch lie."""

    def offered(self, offer: types_pb2.SharedMemory) -> list[pb.SampleStreamRequest]:
        """Take the memory that the server has, if this process may; what to say to that."""
        try:
            self._memory = shared_memory.attach(offer, writable=False)
        except (OSError, ValueError) as error:
            logger.debug("no shared memory with the server: %s", error)
            return []
        return [pb.SampleStreamRequest(memory_ready=pb.MemoryReady())]

    def read(
        self, span: types_pb2.MemorySpan
    ) -> tuple[sample_bytes.Received[pb.SampleStreamResponse], list[pb.SampleStreamRequest]]:
        """Read a response; and what tells the server that its place is free.

        Payloads are copied: nothing else refers to the copies, and they are writable, so tensors may be
        views on them. Packed bytes stay where they are: they may be a part of a batch, which is joined
        once all of them are there. `joined` says then that their places are free.

        Raises:
            InternalServerError: There is none.
        """
        try:
            if self._memory is None:
                raise ValueError("there is no shared memory")
            part = shared_memory.part(self._memory, span)
            received = sample_bytes.read_stream_response(part)
        except (ValueError, DecodeError) as error:
            raise InternalServerError(
                f"the server says that a batch lies where none is: {error}"
            ) from error
        if received.packed:
            self._parts.append(span)
            return received, []
        payloads = [
            aligned(payload, DEFAULT_LIMITS) if isinstance(payload, memoryview) else payload
            for payload in received.payloads
        ]
        return received._replace(payloads=payloads), [pb.SampleStreamRequest(released=span)]

    def joined(self) -> list[pb.SampleStreamRequest]:
        """A batch is whole, and nothing refers to where its parts lie; what tells the server so."""
        parts, self._parts = self._parts, []
        return [pb.SampleStreamRequest(released=span) for span in parts]
