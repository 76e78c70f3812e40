"""Pushes of a lane's stream as messages: those that are large in shared memory, once there is any.

It is asked for by the first push that would lie in it, which goes before the answer comes. An answer may
be missing, so nobody waits for one: if it hasn't come with that push's answer, there is no memory.
"""

from __future__ import annotations

from typing import Final

from experience_buffer._messages.push_body import PushBody
from experience_buffer._messages.shared_memory import MIN_BYTES, PUSH_BYTES
from experience_buffer._transport.push_memory import PushMemory
from experience_buffer._transport.push_queue import Request
from experience_buffer.v1 import service_pb2 as pb

MAX_BYTES: Final = 256 * 1024
"""Larger requests that don't lie in shared memory are calls: a message on the stream is one copy more, and a
call isn't what they take long for."""


class LaneMemory:
    """What one stream of a lane has of shared memory. Belongs to the push that uses the stream.

    Args:
        is_wanted: Whether to ask for any.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._memory: PushMemory | None = None
        """None: it wasn't asked for."""

    def takes(self, num_bytes: int) -> bool:
        """Whether a request of so many bytes is better sent on the stream than by a call."""
        if num_bytes <= MAX_BYTES:
            return True
        if self._memory is None:
            return self._is_wanted and num_bytes <= PUSH_BYTES
        return self._memory.has_room(num_bytes)

    def messages(self, sequence: int, body: PushBody, timeout: float) -> list[bytes]:
        """The `PushStreamRequest`s to send; the last one is the push.

        Args:
            sequence: The number of the push.
            body: What to push.
            timeout: Seconds for which it may wait at the server.
        """
        messages: list[bytes] = []
        if self._memory is None and self._is_wanted and body.num_bytes >= MIN_BYTES:
            self._memory = PushMemory(body.fields, is_wanted=True)
            messages = self._memory.opening()
        memory, payloads = self._memory, body.payloads(self._memory)
        num_bytes = sum(map(len, payloads))
        request = Request(sequence, body.fields, payloads, range(0), num_bytes, timeout)
        if memory is None:
            return [*messages, request.message()]
        memory.reserve(request)
        return [*messages, memory.message(request)]

    def is_offer(self, answer: pb.PushStreamResponse) -> bool:
        """Take the memory that an answer offers; False: it is the answer to a push."""
        if not answer.HasField("memory"):
            return False
        if self._memory is not None:
            self._memory.offered(answer.memory)
        return True

    def answered(self, answer: pb.PushStreamResponse, body: PushBody) -> None:
        """The server is done with a push: what was put there for it may be written over."""
        memory = self._memory
        if memory is not None:
            payloads = body.payloads(memory)
            if answer.HasField("error"):
                body.keep()
            memory.answered(answer.sequence)
            memory.settled(payloads)
