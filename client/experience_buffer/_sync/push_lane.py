"""A stream for pushes that soon follow one another, which saves each of them a call of its own.

gRPC takes longer for a call than for a message on a stream that is open: a quarter of the server's
time for a small push. One push at a time uses the stream, so that none waits for another one's room;
whoever comes meanwhile makes a call.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from experience_buffer._messages.push_body import PushBody
from experience_buffer._transport.lane_memory import LaneMemory
from experience_buffer.v1 import service_pb2 as pb

if TYPE_CHECKING:
    from experience_buffer._sync.connection import Connection

from experience_buffer._transport.lane import KEEP_SECONDS, PAUSE_SECONDS, late_error, response_of


@dataclass(slots=True, eq=False)
class _Stream:
    """An open stream. What changes is guarded by the lane's lock."""

    call: Any
    outbox: queue.SimpleQueue[bytes | None]
    memory: LaneMemory
    """Belongs to the push that uses the stream."""
    deadline: float = math.inf
    """Of the push under way, by `time.monotonic`; infinity while there is none."""
    idle_since: float = field(default_factory=time.monotonic)
    is_late: bool = False
    """It was cancelled because the push under way took too long."""
    is_over: bool = False


class PushLane:
    """The stream that pushes of one channel use in turn. Thread-safe."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        """Held by the push that uses the stream."""
        self._changed = threading.Condition()
        self._stream: _Stream | None = None
        self._soon_until = -math.inf
        """Until when a push follows another one soon enough to use the stream."""
        self._not_before = -math.inf
        """When a stream may be opened again."""
        self._num_sent = 0
        self._wakes_at = math.inf
        """When the thread that watches the stream looks again."""

    def push(self, client: Connection, body: PushBody, timeout: float) -> pb.PushResponse | None:
        """Send a push and wait for its answer.

        Args:
            client: Opens the stream.
            body: What to push.
            timeout: Seconds until the answer must be there.

        Returns:
            The answer; None: the stream isn't for this push, or has ended without an answer, for
            whatever reason: make a call. A push may be repeated.

        Raises:
            DeadlineExceededError: There is no answer in time.
            ExperienceBufferError: What the server says to this push.
        """
        if not self._busy.acquire(blocking=False):
            return None
        try:
            if not self._not_before < time.monotonic() < self._soon_until:
                return None
            stream = self._stream
            memory = self._new_memory(client) if stream is None else stream.memory
            if not memory.takes(body.num_bytes):
                return None
            return self._exchange(client, body, timeout)
        finally:
            self._busy.release()

    def pushed(self) -> None:
        """A push was answered just now."""
        self._soon_until = time.monotonic() + KEEP_SECONDS

    def close(self) -> None:
        """End the stream; the push under way goes on as a call. The next one opens it again."""
        with self._changed:
            if self._stream is not None:
                self._end(self._stream)

    def _exchange(
        self, client: Connection, body: PushBody, timeout: float
    ) -> pb.PushResponse | None:
        stream = self._taken(client, time.monotonic() + timeout)
        self._num_sent += 1
        is_answered = False
        try:
            for message in stream.memory.messages(self._num_sent, body, timeout):
                stream.outbox.put(message)
            answer: pb.PushStreamResponse = next(stream.call)
            if stream.memory.is_offer(answer):
                answer = next(stream.call)
            is_answered = answer.sequence == self._num_sent
        except (StopIteration, grpc.RpcError):
            if stream.is_late:
                raise late_error(timeout) from None
            # What a call may do, a stream may not always: it was for another buffer, or one too many.
            return None
        finally:
            # An answer that is still to come would be taken for the next one's.
            self._put_back(stream, is_answered)
        if is_answered:
            stream.memory.answered(answer, body)
        return response_of(answer, self._num_sent)

    @staticmethod
    def _new_memory(client: Connection) -> LaneMemory:
        return LaneMemory(is_wanted=client.options.shared_memory)

    def _taken(self, client: Connection, deadline: float) -> _Stream:
        """The stream, opened if need be, for a push that must end by then."""
        with self._changed:
            stream = self._stream
            if stream is not None and stream.call.is_active():
                stream.deadline = deadline
                if deadline < self._wakes_at:
                    self._changed.notify_all()
                return stream
            if stream is not None:
                self._end(stream)
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call, memory = client._open("PushStream", iter(outbox.get, None)), self._new_memory(client)
        stream = _Stream(call, outbox, memory, deadline)
        with self._changed:
            self._stream = stream
        threading.Thread(
            target=self._watch, args=(stream,), name="experience-buffer-push", daemon=True
        ).start()
        return stream

    def _put_back(self, stream: _Stream, is_answered: bool) -> None:
        with self._changed:
            stream.deadline, stream.idle_since = math.inf, time.monotonic()
            if not is_answered:
                self._not_before = stream.idle_since + PAUSE_SECONDS
                self._end(stream)

    def _watch(self, stream: _Stream) -> None:
        """End a stream whose push is late, or that nobody has used for a while."""
        with self._changed:
            while not stream.is_over:
                is_used, now = stream.deadline < math.inf, time.monotonic()
                due = stream.deadline if is_used else stream.idle_since + KEEP_SECONDS
                if now >= due:
                    stream.is_late = is_used
                    self._end(stream)
                else:
                    # A push that ends doesn't wake this thread: that would take as long as it saves.
                    self._wakes_at = min(due, now + KEEP_SECONDS)
                    self._changed.wait(self._wakes_at - now)

    def _end(self, stream: _Stream) -> None:
        """Forget a stream. Call with the lock held."""
        if self._stream is stream:
            self._stream = None
        stream.is_over = True
        # gRPC's thread waits for the next request, whatever becomes of the call.
        stream.outbox.put(None)
        stream.call.cancel()
        self._changed.notify_all()
