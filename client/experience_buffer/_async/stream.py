"""The stream that delivers batches to the async client."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from experience_buffer._async.batch import AsyncBatch
from experience_buffer._messages import buffer_calls, delivery_calls
from experience_buffer._transport import sample_plan
from experience_buffer._transport.retry import Attempts
from experience_buffer._transport.sample_memory import SampleMemory
from experience_buffer._transport.settings import closed_error
from experience_buffer._transport.signal import Signal
from experience_buffer.errors import (
    DeadlineExceededError,
    ExperienceBufferError,
    NotFoundError,
    UnavailableError,
)
from experience_buffer.v1 import service_pb2

if TYPE_CHECKING:
    from typing import Self

    from experience_buffer._messages import sample_bytes
    from experience_buffer.aio import AsyncClient

logger = logging.getLogger("experience_buffer")
Message: TypeAlias = "sample_bytes.Received[service_pb2.SampleStreamResponse]"
Outbox: TypeAlias = "asyncio.Queue[service_pb2.SampleStreamRequest | None]"


class AsyncSampleStream:
    """An endless async iterator of batches; a context manager whose end gives back what isn't acked.

    It belongs to one event loop; several tasks may share it, each batch goes to one of them. A
    task reads ahead. When the stream breaks it reconnects; batches that were read ahead are then
    dropped here, since the server delivers them again. A rank goes on after the last shared batch
    that was taken here.
    """

    def __init__(self, client: AsyncClient, plan: sample_plan.StreamPlan) -> None:
        self._client = client
        self._plan = plan
        self._signal = Signal()
        self._ready: deque[AsyncBatch] = deque()
        self._acks: dict[int, asyncio.Future[service_pb2.LeaseResult | None]] = {}
        self._outbox: Outbox | None = None
        self._connection = 0
        self._assembler = sample_plan.FrameAssembler(plan)
        self._memory = SampleMemory()
        self._dropped: list[int] = []
        self._last_lease = 0
        self._has_delivered = False
        self._waiting = ""
        self._failure: ExperienceBufferError | None = None
        self._closed = False
        self._reader: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> str:
        """What the server last said it waits for; empty since a batch came."""
        return self._waiting

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[AsyncBatch]:
        return self

    async def __anext__(self) -> AsyncBatch:
        """Wait for the next batch.

        Raises:
            StopAsyncIteration: The stream was closed.
            DeadlineExceededError: The first batch didn't come within `first_timeout`; the text
                says what the server waits for. Calling again waits again.
            ExperienceBufferError: The server ended the stream for good, or could not be reached
                for `RetryOptions.reconnect_seconds`.
        """
        self._start()
        while True:
            limit = None if self._has_delivered else self._plan.first_timeout
            if not await self._signal.wait_for(self._has_news, limit):
                break
            if self._closed:
                raise StopAsyncIteration
            if not self._ready:
                assert self._failure is not None
                raise self._failure
            batch = self._take()
            if time.monotonic() < batch.expire_time:
                return batch
            logger.warning("%r expired before it was asked for: lower prefetch", batch)
        waiting = self._waiting or await self._ask_what_it_waits_for()
        raise sample_plan.no_first_batch(self._plan, waiting)

    async def close(self) -> None:
        """Cancel the call, which gives back every lease that isn't acked. Idempotent."""
        self._closed = True
        self._drop_connection()
        reader = self._reader
        if reader is not None and not reader.done():
            reader.cancel()
            await asyncio.wait([reader])

    def _has_news(self) -> bool:
        return bool(self._ready) or self._failure is not None or self._closed

    def _take(self) -> AsyncBatch:
        """Take the next batch and let the server send another."""
        batch = self._ready.popleft()
        assert self._outbox is not None
        for request in self._plan.credits(1, batch.num_bytes):
            self._outbox.put_nowait(request)
        self._last_lease = batch.lease_id or self._last_lease
        self._has_delivered = True
        return batch

    async def _ask_what_it_waits_for(self) -> str:
        """For a stream that has no note of the server's yet; empty when nobody says."""
        try:
            stats = await self._client._run(
                buffer_calls.get_stats(self._plan.buffer), sample_plan.ASK_SECONDS
            )
        except ExperienceBufferError as error:
            return str(error)
        return sample_plan.wait_reason(stats, self._plan)

    def _start(self) -> None:
        if self._reader is None and not self._closed:
            self._reader = asyncio.create_task(self._read(), name="experience-buffer-stream")

    async def _read(self) -> None:
        """Keep a stream open and take in what comes, until closed or failed for good."""
        attempts: Attempts | None = None
        retry = self._client.options.retry
        try:
            while not self._closed:
                error: ExperienceBufferError
                await self._return_dropped()
                call = self._connect()
                try:
                    async for message in call:
                        attempts = None
                        self._receive(message)
                    error = UnavailableError("the server ended the sample stream")
                except grpc.RpcError as rpc_error:
                    error = self._client._translate(rpc_error, "SampleStream")
                finally:
                    call.cancel()
                self._drop_connection()
                attempts = attempts or Attempts(retry, retry.reconnect_seconds)
                delay = attempts.delay_after(error, idempotent=True)
                logger.info("sample stream: %s; reconnecting in %.1f s", error, delay)
                await self._signal.wait_for(lambda: self._closed, delay)
        except ExperienceBufferError as error:
            self._failure = error
        finally:
            # Also when this task dies of a bug: nobody may wait for it forever.
            self._failure = self._failure or closed_error("sample stream")
            self._drop_connection()
            self._memory = SampleMemory()  # A closed stream keeps none.

    async def _return_dropped(self) -> None:
        """Give back what was read ahead on a connection that broke; the rest next time."""
        while self._dropped and not self._closed:
            call = delivery_calls.nack(
                self._dropped[-1],
                buffer=self._plan.buffer,
                reason=sample_plan.RETURN_REASON,
                unread=True,
            )
            try:
                await self._client._run(call, sample_plan.RETURN_SECONDS)
            except NotFoundError:
                pass  # The server gave it back itself: the usual case.
            except (UnavailableError, DeadlineExceededError):
                return
            self._dropped.pop()

    def _connect(self) -> Any:
        outbox: Outbox = asyncio.Queue()
        for request in self._plan.opening(after_lease_id=self._last_lease):
            outbox.put_nowait(request)
        call = self._client._open("SampleStream", _requests(outbox))
        self._outbox = outbox
        self._connection += 1
        self._assembler = sample_plan.FrameAssembler(self._plan)
        self._memory = SampleMemory()
        return call

    def _receive(self, received: Message) -> None:
        message = received.message
        kind = message.WhichOneof("message")
        if kind == "memory":
            self._say(*self._memory.offered(message.memory))
        elif kind == "span":
            received, released = self._memory.read(message.span)
            self._say(*released)
            message, kind = received.message, "frame"
        if kind == "waiting":
            self._waiting = message.waiting
            logger.info("sample stream waits: %s", message.waiting)
        elif kind == "lease_result":
            future = self._acks.pop(message.lease_result.lease_id, None)
            if future is not None and not future.done():
                future.set_result(message.lease_result)
        elif kind == "frame":
            fields = self._assembler.add(received, received_time=time.monotonic())
            if fields is not None:
                self._say(*self._memory.joined())
                self._waiting = ""
                settle = functools.partial(self._ack, connection=self._connection)
                self._ready.append(AsyncBatch(client=self._client, settle=settle, **fields))
                self._signal.notify()

    def _say(self, *requests: service_pb2.SampleStreamRequest) -> None:
        """Say something on the present connection, if there is one."""
        for request in requests:
            if self._outbox is not None:
                self._outbox.put_nowait(request)

    def _drop_connection(self) -> None:
        """Forget everything that belongs to the present connection."""
        if self._outbox is not None:
            self._outbox.put_nowait(None)
            self._outbox = None
        # A server that died still holds them as leased when it is back.
        if self._plan.returns_leases:
            self._dropped += [batch.lease_id for batch in self._ready if batch.lease_id]
            self._dropped += self._assembler.partial_leases
        self._assembler = sample_plan.FrameAssembler(self._plan)
        self._ready.clear()
        for future in self._acks.values():
            if not future.done():
                future.set_result(None)
        self._acks.clear()
        self._signal.notify()

    async def _ack(self, lease_id: int, step: int | None, *, connection: int) -> int | None:
        """Acknowledge on the connection that delivered the batch; None when it is gone."""
        request = sample_plan.ack(lease_id, step)
        if self._outbox is None or connection != self._connection:
            return None
        future = self._acks.get(lease_id)
        if future is None:
            future = self._acks[lease_id] = asyncio.get_running_loop().create_future()
            self._outbox.put_nowait(request)
        timeout = self._client._seconds(None)
        try:
            # Shielded: several tasks may wait for the same answer.
            result = await asyncio.wait_for(asyncio.shield(future), timeout)
        except TimeoutError:
            raise sample_plan.unanswered_ack(lease_id, timeout) from None
        return None if result is None else sample_plan.check_result(result)


async def _requests(outbox: Outbox) -> AsyncIterator[service_pb2.SampleStreamRequest]:
    while (request := await outbox.get()) is not None:
        yield request
