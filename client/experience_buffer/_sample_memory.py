"""Responses of one sample stream in memory that the server shares with it."""

from __future__ import annotations

import logging

from google.protobuf.message import DecodeError

from experience_buffer import _memory, _sample_wire, _shared_memory
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
        """Copy a response, and read it; and what tells the server that its place is free.

        Raises:
            InternalServerError: There is none.
        """
        try:
            if self._memory is None:
                raise ValueError("there is no shared memory")
            # Writable: a packed batch's tensors are views on it.
            data = _memory.joined([_shared_memory.part(self._memory, span)])
            received = _sample_wire.read_stream_response(data)
        except (ValueError, DecodeError) as error:
            raise InternalServerError(
                f"the server says that a batch lies where none is: {error}"
            ) from error
        return received, pb.SampleStreamRequest(released=span)
