# Generated from _async/stream.py by scripts/generate_sync.py; edit that file.
"""The stream that delivers batches to the sync client."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from experience_buffer._messages.calls import number
from experience_buffer._messages.convert import reader_of
from experience_buffer._show import line
from experience_buffer._sync.batch import Batch
from experience_buffer._sync.primitives import Answer, Closing, Condition, Outbox, Worker
from experience_buffer._sync.reconnecting import Reconnecting
from experience_buffer._transport import sample_plan
from experience_buffer._transport.sample_memory import SampleMemory
from experience_buffer._transport.settings import OfOneProcess, closed_error
from experience_buffer.errors import (
    DeadlineExceededError,
    ExperienceBufferError,
    NotFoundError,
    UnavailableError,
)
from experience_buffer.v1 import service_pb2
from experience_buffer.values import Stats

if TYPE_CHECKING:
    from typing import Self

    from experience_buffer._messages import sample_bytes
    from experience_buffer._sync.delivery_verbs import DeliveryVerbs

logger = logging.getLogger("experience_buffer")
Message: TypeAlias = "sample_bytes.Received[service_pb2.SampleStreamResponse]"


class SampleStream(OfOneProcess, Closing):
    """An endless iterator of batches; a context manager whose end gives back what isn't acked.

    It can be shared between threads: each batch goes to one of them. A thread reads ahead. When
    the stream breaks it reconnects; batches that were read ahead are then dropped here, since
    the server delivers them again. A rank goes on after the last shared batch that was taken here.
    """

    def __init__(self, client: DeliveryVerbs, plan: sample_plan.StreamPlan) -> None:
        self._client = client
        self._plan = plan
        self._changed = Condition()
        self._ready: deque[Batch] = deque()
        self._acks: dict[int, Answer[service_pb2.LeaseResult | None]] = {}
        self._outbox: Outbox[service_pb2.SampleStreamRequest] | None = None
        self._call: Any = None
        self._connection = 0
        self._assembler = sample_plan.FrameAssembler(plan)
        self._memory = SampleMemory()
        self._dropped: list[int] = []
        self._last_lease = 0
        self._has_delivered = False
        self._waiting = ""
        self._failure: ExperienceBufferError | None = None
        self._closed = False
        self._reader: Worker | None = None

    def __repr__(self) -> str:
        plan = self._plan
        state = f"waits: {self._waiting}" if self._waiting else f"{len(self._ready)} ready"
        return line(
            f"<{type(self).__name__} of {plan.consumer!r} on {plan.buffer!r} at "
            f"{self._client.address}: batches of {plan.batch_size}, "
            f"{'closed' if self._is_over else state}>"
        )

    @property
    def waiting(self) -> str:
        """What the server last said it waits for; empty since a batch came."""
        return self._waiting

    @property
    def _is_over(self) -> bool:
        """Whether it will deliver nothing more."""
        return self._closed or (self._failure is not None and not self._ready)

    def __enter__(self) -> Self:
        self._start()
        return self

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Wait for the next batch.

        Raises:
            StopIteration: The stream was closed.
            DeadlineExceededError: The first batch didn't come within `first_timeout`; the text
                says what the server waits for. Calling again waits again.
            ExperienceBufferError: The server ended the stream for good, or could not be reached
                for `RetryOptions.reconnect_seconds`.
        """
        self._start()
        with self._changed:
            while True:
                limit = None if self._has_delivered else self._plan.first_timeout
                if not self._changed.wait_for(self._has_news, limit):
                    break
                if self._closed:
                    raise StopIteration
                if not self._ready:
                    assert self._failure is not None
                    raise self._failure
                batch = self._take()
                if time.monotonic() < batch.expire_time:
                    return batch
                logger.warning("%r expired before it was asked for: lower prefetch", batch)
        waiting = self._waiting or self._ask_what_it_waits_for()
        raise sample_plan.no_first_batch(self._plan, waiting)

    def close(self) -> None:
        """Cancel the call, which gives back every lease that isn't acked. Idempotent."""
        with self._changed:
            self._closed = True
            self._drop_connection()
            call, reader = self._call, self._reader
        if call is not None:
            call.cancel()
        if reader is not None:
            reader.stop()

    def _has_news(self) -> bool:
        return bool(self._ready) or self._failure is not None or self._closed

    def _take(self) -> Batch:
        """Take the next batch and let the server send another. Call with the lock held."""
        batch = self._ready.popleft()
        assert self._outbox is not None
        self._outbox.put(*self._plan.credits(1, batch.num_bytes))
        self._last_lease = batch.lease_id or self._last_lease
        self._has_delivered = True
        return batch

    def _ask_what_it_waits_for(self) -> str:
        """For a stream that has no note of the server's yet; empty when nobody says."""
        try:
            stats = self._client._call(
                "GetStats",
                reader_of(Stats),
                timeout=sample_plan.ASK_SECONDS,
                buffer=self._plan.buffer,
            )
        except ExperienceBufferError as error:
            return str(error)
        place = (self._plan.buffer, self._plan.consumer)
        consumers = ((buffer.name, each) for buffer in stats.buffers for each in buffer.consumers)
        return "".join(each.waiting_for for name, each in consumers if (name, each.name) == place)

    def _start(self) -> None:
        with self._changed:
            if self._reader is None and not self._closed:
                self._reader = Worker(self._read, "experience-buffer-stream")

    def _read(self) -> None:
        """Keep a stream open and take in what comes, until closed or failed for good."""
        what = f"sample stream of buffer {self._plan.buffer!r}"
        stream = Reconnecting(self._client, "SampleStream", what)
        try:
            while not self._closed:
                self._return_dropped()
                error = stream.hear(self._connect(), self._receive)
                with self._changed:
                    self._drop_connection()
                    if self._closed:
                        return
                    self._changed.wait_for(lambda: self._closed, stream.delay_after(error))
        except ExperienceBufferError as failure:
            self._failure = failure
        finally:
            # Also when this ends by a bug: nobody may wait for it forever.
            what = "client" if self._client._is_closed else "sample stream"
            with self._changed:
                self._failure = self._failure or closed_error(what)
                self._drop_connection()
            self._memory = SampleMemory()  # A closed stream keeps none.

    def _return_dropped(self) -> None:
        """Give back what was read ahead on a connection that broke; the rest next time."""
        while self._dropped and not self._closed:
            try:
                self._client._call(
                    "Nack",
                    number("num_experiences"),
                    idempotent=False,  # Not tried again here: whoever closes this waits for it.
                    timeout=sample_plan.RETURN_SECONDS,
                    buffer=self._plan.buffer,
                    lease_id=self._dropped[-1],
                    reason=sample_plan.RETURN_REASON,
                    unread=True,
                )
            except NotFoundError:
                pass  # The server gave it back itself: the usual case.
            except (UnavailableError, DeadlineExceededError):
                return
            self._dropped.pop()

    def _connect(self) -> Any:
        outbox: Outbox[service_pb2.SampleStreamRequest] = Outbox()
        outbox.put(*self._plan.opening(after_lease_id=self._last_lease))
        call = self._client._open("SampleStream", outbox.requests())
        with self._changed:
            self._call, self._outbox = call, outbox
            self._connection += 1
            self._assembler = sample_plan.FrameAssembler(self._plan)
            self._memory = SampleMemory()
            if self._closed:
                self._drop_connection()
                call.cancel()
        return call

    def _receive(self, received: Message) -> None:
        message = received.message
        kind = message.WhichOneof("message")
        answers, fields = [], None
        if kind == "memory":
            answers = self._memory.offered(message.memory)
        elif kind == "span":
            received, answers = self._memory.read(message.span)
            message, kind = received.message, "frame"
        if kind == "frame":
            # Nobody else adds to it, and copying a batch takes too long to keep others waiting.
            fields = self._assembler.add(received, received_time=time.monotonic())
            if fields is not None:
                answers += self._memory.joined()
        with self._changed:
            if self._outbox is None:
                return
            self._outbox.put(*answers)
            if kind == "waiting":
                self._waiting = message.waiting
                logger.info("sample stream waits: %s", message.waiting)
            elif kind == "lease_result":
                answer = self._acks.pop(message.lease_result.lease_id, None)
                if answer is not None:
                    answer.set(message.lease_result)
            elif fields is not None:
                self._waiting = ""
                settle = functools.partial(self._begin_ack, connection=self._connection)
                self._ready.append(Batch(client=self._client, settle=settle, **fields))
                self._changed.notify_all()

    def _drop_connection(self) -> None:
        """Forget everything that belongs to the present connection. Call with the lock held."""
        if self._outbox is not None:
            self._outbox.end()
            self._outbox = None
        # A server that died still holds them as leased when it is back.
        if self._plan.returns_leases:
            self._dropped += [batch.lease_id for batch in self._ready if batch.lease_id]
            self._dropped += self._assembler.partial_leases
        self._assembler = sample_plan.FrameAssembler(self._plan)
        self._ready.clear()
        for answer in self._acks.values():
            answer.set(None)
        self._acks.clear()
        self._changed.notify_all()

    def _begin_ack(
        self, lease_id: int, step: int | None, *, connection: int
    ) -> Callable[[], int | None] | None:
        """Acknowledge on the connection that delivered the batch.

        Returns:
            What waits for the answer, which is None when that connection ends before; or None when
            it has.
        """
        request = sample_plan.ack(lease_id, step)
        with self._changed:
            if self._outbox is None or connection != self._connection:
                return None
            answer = self._acks.get(lease_id)
            if answer is None:
                answer = self._acks[lease_id] = Answer()
                self._outbox.put(request)
        return functools.partial(self._ack_result, lease_id, answer)

    def _ack_result(
        self, lease_id: int, answer: Answer[service_pb2.LeaseResult | None]
    ) -> int | None:
        timeout = self._client._seconds(None)
        try:
            result = answer.wait(timeout)
        except TimeoutError:
            raise DeadlineExceededError(
                f"no answer to the ack of lease {lease_id} in {timeout} s; ack it again",
                subject=str(lease_id),
            ) from None
        return None if result is None else sample_plan.check_result(result)
