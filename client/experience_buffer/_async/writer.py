"""The async client's background writer: a task that moves a `PushQueue` over a stream."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc

from experience_buffer._async.primitives import Condition
from experience_buffer._messages import push_split
from experience_buffer._transport import push_queue
from experience_buffer._transport.push_memory import PushMemory
from experience_buffer._transport.retry import Attempts
from experience_buffer._transport.settings import closed_error
from experience_buffer.errors import ExperienceBufferError, UnavailableError
from experience_buffer.options import WriterOptions
from experience_buffer.values import WriterCounts

if TYPE_CHECKING:
    from typing import Self

    from experience_buffer._async.connection import AsyncConnection
    from experience_buffer.experience import Experience

logger = logging.getLogger("experience_buffer")


class AsyncWriter:
    """Pushes in the background, in batches, keeping several under way.

    It belongs to one event loop; several tasks may share it. What the server refused, and other
    errors, are raised by the next `append`, `flush` or `close`. When the stream breaks, it
    reconnects and sends again what has no outcome yet, which is safe because pushes are idempotent.

    It has to be closed before its event loop ends, after which nothing can be sent: what isn't
    stored by then is logged as an error.
    """

    def __init__(
        self, client: AsyncConnection, *, buffer: str, group_size: int, options: WriterOptions
    ) -> None:
        self._client = client
        options = push_split.fitting(options, client.options)
        self._limits = push_split.writer_limits(client.options, options)
        self._queue = push_queue.PushQueue(
            buffer=buffer,
            group_size=group_size,
            options=options,
            clock=time.monotonic,
        )
        self._work = Condition()
        """Something to send, or the connection ended; this writer's task and gRPC's wait for it."""
        self._progress = Condition()
        """Outcomes, or the end; callers wait for it."""
        self._connection = 0
        self._memory = self._new_memory()
        """Of the present connection."""
        self._is_short = False
        """The next request waits for room there."""
        self._failure: ExperienceBufferError | None = None
        self._closing = False
        self._done = False
        self._task: asyncio.Task[None] | None = None

    @property
    def counts(self) -> WriterCounts:
        """What became of the experiences appended so far."""
        return self._queue.counts()

    async def append(
        self, experiences: Experience | Sequence[Experience], *, timeout: float | None = None
    ) -> None:
        """Queue experiences; waits while the queue is full.

        They are encoded, in a thread, before this returns: later changes to them are not sent.

        Args:
            experiences: One or several.
            timeout: Seconds to wait for room; None: the client's timeout.

        Raises:
            DeadlineExceededError: No room in time; the text says how many were queued.
            PushRefusedError: Experiences appended earlier were refused; nothing was queued now.
            MessageTooLargeError: One experience is over the message limit; those before it
                are queued.
            ExperienceBufferError: The writer failed, or was closed; nothing more was queued.
        """
        many = push_split.as_sequence(experiences)
        deadline = time.monotonic() + self._client._seconds(timeout)
        self._raise_errors()
        if self._closing:
            raise closed_error("writer")
        encoded = push_split.encode_pieces(many, self._limits)
        while (found := await asyncio.to_thread(next, encoded, None)) is not None:
            start, end, pieces = found
            num_bytes = sum(map(len, pieces))
            if not await self._wait(functools.partial(self._queue.has_room, num_bytes), deadline):
                raise push_queue.full_error(self._queue, start, len(many))
            if self._failure is not None:
                raise self._failure
            if self._closing:
                raise closed_error("writer")
            # No thread could do this beside the loop, which the copying keeps from running anyway.
            payload = self._memory.place(pieces, pending_bytes=self._queue.pending_bytes)
            if self._queue.add(payload, end - start):
                self._work.notify_all()
            self._start()

    async def flush(self, *, timeout: float | None = None) -> None:
        """Wait until everything appended before has its outcome.

        Args:
            timeout: Seconds to wait; None: the client's timeout.

        Raises:
            DeadlineExceededError: Not all answered in time; they stay queued.
            PushRefusedError: Experiences were refused.
            ExperienceBufferError: The writer failed.
        """
        seconds = self._client._seconds(timeout)
        mark = self._queue.hurry()
        self._work.notify_all()
        done = await self._wait(lambda: self._queue.is_settled(mark), time.monotonic() + seconds)
        self._raise_errors(None if done else push_queue.flush_error(self._queue, seconds))

    async def close(self, *, timeout: float | None = None) -> None:
        """Flush and end the stream. Idempotent; raises as `flush` does, closed all the same."""
        if self._closing:
            return
        self._closing = True
        try:
            await self.flush(timeout=timeout)
        finally:
            self._done = True
            if self._task is not None and not self._task.done():
                self._task.cancel()
                await asyncio.wait([self._task])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait for a condition or a failure."""
        return await self._progress.wait_for(
            lambda: self._failure is not None or condition(), max(deadline - time.monotonic(), 0.0)
        )

    def _raise_errors(self, late: ExperienceBufferError | None = None) -> None:
        """Raise what went wrong; see `PushQueue.take_error`."""
        if self._failure is not None:
            raise self._failure
        error = self._queue.take_error(late)
        if error is not None:
            raise error

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="experience-buffer-writer")

    async def _run(self) -> None:
        """Keep a stream open while there is something to send, until closed or failed for good."""
        retry = self._client.options.retry
        attempts: Attempts | None = None
        try:
            while True:
                await self._work.wait_for(lambda: self._queue.pending_bytes > 0, None)
                error: ExperienceBufferError
                self._connection += 1
                memory = self._memory = self._new_memory()
                requests = self._requests(self._connection, memory)
                call: Any = self._client._open("PushStream", requests)
                try:
                    async for message in call:
                        attempts = None
                        if message.HasField("memory"):
                            memory.offered(message.memory)
                            continue
                        memory.answered(message.sequence)
                        delay = retry.initial_backoff_seconds
                        memory.settled(self._queue.answered(message, delay=delay))
                        if message.HasField("error") or self._is_short:
                            self._is_short = False
                            self._work.notify_all()
                        self._progress.notify_all()
                    error = UnavailableError("the server ended the push stream")
                except grpc.RpcError as rpc_error:
                    error = self._client._translate(rpc_error, "PushStream")
                finally:
                    call.cancel()
                self._connection += 1
                self._queue.rewind()
                self._work.notify_all()
                attempts = attempts or Attempts(retry, retry.reconnect_seconds)
                delay = attempts.delay_after(error, idempotent=True)
                logger.info("writer: %s; reconnecting in %.1f s", error, delay)
                await asyncio.sleep(delay)
        except ExperienceBufferError as error:
            error.add_note(f"{self._queue.counts().num_pending} experiences are not stored")
            self._failure = error
        except asyncio.CancelledError:
            # gRPC cancels the waiting task too when the channel is closed.
            is_closed = self._client._is_closed
            if not self._done and (num_pending := self._queue.counts().num_pending):
                logger.error(
                    "a writer was open when its %s, close it before: %d experiences are not stored",
                    "client was closed" if is_closed else "event loop ended",
                    num_pending,
                )
            if is_closed and not self._done:
                self._failure = closed_error("client")
            raise
        finally:
            # Also when this task dies of a bug: nobody may wait for it forever.
            self._failure = self._failure or closed_error("writer")
            self._memory = self._new_memory()  # A closed writer keeps none.
            self._progress.notify_all()

    def _new_memory(self) -> PushMemory:
        is_wanted = self._client.options.shared_memory
        return PushMemory(self._queue.fields, is_wanted=is_wanted)

    async def _requests(self, connection: int, memory: PushMemory) -> AsyncIterator[bytes]:
        """Requests as they come due, until this connection is over; runs in gRPC's task."""
        for message in memory.opening():
            yield message
        while connection == self._connection:
            request = self._queue.next_request()
            if request is None:
                await self._work.wait(self._queue.seconds_until_next())
                continue
            while not memory.reserve(request):
                self._is_short = True
                await self._work.wait(None)
                if connection != self._connection:
                    return
            yield memory.message(request)
