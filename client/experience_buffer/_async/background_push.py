"""Pushing in the background: what moves a `PushQueue` over a stream, whoever waits for it."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from experience_buffer._arguments import is_list, refused
from experience_buffer._async.primitives import Closing, Condition, Lock, Worker, in_thread
from experience_buffer._async.reconnecting import AsyncReconnecting
from experience_buffer._messages import push_split
from experience_buffer._transport import push_queue
from experience_buffer._transport.push_memory import PushMemory
from experience_buffer._transport.settings import OfOneProcess, closed_error
from experience_buffer.errors import ExperienceBufferError, InvalidRequestError, WrongStateError
from experience_buffer.options import WriterOptions
from experience_buffer.outcomes import PushOutcome
from experience_buffer.v1 import service_pb2
from experience_buffer.values import WriterCounts

if TYPE_CHECKING:
    from experience_buffer._async.connection import AsyncConnection
    from experience_buffer.experience import Experience

logger = logging.getLogger("experience_buffer")
LEAVE_SECONDS: Final = 1.0
"""How long whoever leaves a writer's block by an error waits for an outcome."""


class AsyncBackgroundPush(OfOneProcess, Closing):
    """All of an `AsyncWriter` but what becomes of one that nobody closes."""

    def __init__(
        self, client: AsyncConnection, *, buffer: str, group_size: int, options: WriterOptions
    ) -> None:
        self._client = client
        self._buffer = buffer
        options, self._limits = push_split.writer_limits(options, client.options)
        self._queue = push_queue.PushQueue(
            buffer=buffer,
            group_size=group_size,
            options=options,
            clock=time.monotonic,
        )
        self._lock = Lock()
        self._work = Condition(self._lock)
        """Something to send, or the connection ended; the worker and gRPC wait for it."""
        self._progress = Condition(self._lock)
        """Outcomes, or the end; callers wait for it."""
        self._connection = 0
        self._memory = self._new_memory()
        """Of the present connection."""
        self._is_short = False
        """The next request waits for room there."""
        self._call: Any = None
        self._failure: ExperienceBufferError | None = None
        self._last_error: ExperienceBufferError | None = None
        """Why the last stream broke; None since a server has answered on another."""
        self._closing = False
        self._done = False
        self._worker: Worker | None = None
        self._pid = 0
        """Of the process whose worker sends; 0: none does yet."""

    def __repr__(self) -> str:
        where = f"{type(self).__name__} to {self._buffer!r} at {self._client.address}"
        if self._is_inherited:
            return f"<{where}: of another process>"
        # Without the lock, so that it can be shown wherever one stands.
        counts = self._queue.counts()
        state = "closed, " if self._closing else "failed, " if self._failure is not None else ""
        return (
            f"<{where}: {state}{counts.num_appended:,} appended, {counts.num_stored:,} stored, "
            f"{counts.num_refused:,} refused, {counts.num_pending:,} pending>"
        )

    @property
    def counts(self) -> WriterCounts:
        """What became of the experiences appended so far.

        Raises:
            WrongStateError: As `append`.
        """
        self._check_process()
        with self._lock:
            return self._queue.counts()

    async def append(
        self, experiences: Experience | Sequence[Experience], *, timeout: float | None = None
    ) -> None:
        """Queue experiences; waits while the queue is full.

        They are encoded before this returns: later changes to them are not sent.

        Args:
            experiences: One or several.
            timeout: Seconds to wait for room; None: the client's timeout.

        Raises:
            DeadlineExceededError: No room in time; the text says how many were queued.
            PushRefusedError: Experiences appended earlier were refused, and nothing was queued now;
                or some of these can't be written or are over the message limit, and all others are
                queued.
            WrongStateError: This process was forked off from one that had used the writer.
            InvalidRequestError: They are something else.
            ExperienceBufferError: The writer failed, or was closed; nothing more was queued.
        """
        self._check_process()
        if isinstance(experiences, (bytes, bytearray, memoryview)):
            # How many experiences it holds isn't known here.
            raise InvalidRequestError("a writer takes experiences; give a raw payload to push()")
        if isinstance(experiences, (str, Mapping, Iterator)):
            raise refused("experiences", experiences, "an experience, or a list of them")
        many: Any = experiences if is_list(experiences) else (experiences,)
        deadline = time.monotonic() + self._client._seconds(timeout)
        with self._lock:
            self._raise_errors()
            if self._closing:
                raise closed_error("writer")
        is_refused = False
        encoded = push_split.encode_pieces(many, self._limits, most=lambda: self._queue.most_items)
        while (found := await in_thread(next, encoded, None)) is not None:
            if isinstance(found, PushOutcome):
                is_refused = True
                with self._lock:
                    self._queue.refuse(found)
                continue
            start, end, pieces = found
            # Before the lock is taken, since it copies.
            memory = self._memory
            payload = memory.place(pieces, pending_bytes=self._queue.pending_bytes)
            try:
                with self._lock:
                    has_room = functools.partial(self._queue.has_room, len(payload))
                    if not await self._wait(has_room, deadline):
                        raise push_queue.full_error(self._queue, start, len(many))
                    if self._failure is not None:
                        raise self._failure
                    if self._closing:
                        raise closed_error("writer")
                    if self._queue.add(payload, end - start):
                        self._work.notify_all()
                    self._start()
            except BaseException:
                memory.settled([payload])
                raise
        if is_refused:
            with self._lock:
                self._raise_errors()

    async def flush(self, *, timeout: float | None = None) -> None:
        """Wait until everything appended before has its outcome.

        Args:
            timeout: Seconds to wait; None: the client's timeout.

        Raises:
            DeadlineExceededError: Not all answered in time; they stay queued.
            PushRefusedError: Experiences were refused.
            WrongStateError: As `append`.
            ExperienceBufferError: The writer failed.
        """
        self._check_process()
        seconds = self._client._seconds(timeout)
        with self._lock:
            mark = self._queue.hurry()
            self._work.notify_all()
            done = await self._wait(
                lambda: self._queue.is_settled(mark), time.monotonic() + seconds
            )
            late = None if done else push_queue.flush_error(self._queue, seconds)
            if late is not None and self._last_error is not None:
                late.add_note(f"no server answers: {self._last_error}")
            self._raise_errors(late)

    async def close(self, *, timeout: float | None = None) -> None:
        """Flush and end the stream. Idempotent; raises as `flush` does, closed all the same.

        What ends a block, or calls this in passing as a cancellation, Ctrl-C or an exit does, is neither
        replaced nor kept waiting for a server that has gone: what is queued is sent as long as the
        server takes it. What isn't stored then is logged, and noted in the error.

        In a process that was forked off it does nothing: what is queued is the other one's.

        Args:
            timeout: Seconds for the flush; None: the client's timeout.
        """
        passing = sys.exc_info()[1]
        if timeout is None and passing is not None and not isinstance(passing, Exception):
            await self._close_because(passing, self._client._seconds(None))
        elif self._begin_close():
            try:
                await self.flush(timeout=timeout)
            finally:
                await self._end()

    async def _leave(self, error: BaseException) -> None:
        # What isn't meant to be caught isn't meant to wait either: cancellations, Ctrl-C, exits.
        is_caught = isinstance(error, Exception)
        await self._close_because(
            error, self._client._seconds(None) if is_caught else LEAVE_SECONDS
        )

    async def _close_because(self, error: BaseException, seconds: float) -> None:
        """Close it without an error of its own: what it has to say is logged, and noted in this one."""
        if not self._begin_close():
            return
        try:
            await self._send_while_taken(seconds)
        finally:
            why = self._failure or self._last_error or self._queue.last_delay
            await self._end()
        with self._lock:
            found, num_pending = self._queue.take_error(), self._queue.counts().num_pending
        if num_pending:
            text = f"{num_pending} experiences are not stored: {why or 'there was no time for it'}"
            logger.error("a writer was closed by %s: %s", type(error).__name__, text)
            error.add_note(f"a writer was closed by this: {text}")
        if found is not None:
            error.add_note(f"of a writer that was closed by this: {found}")

    async def _send_while_taken(self, seconds: float) -> None:
        """Wait for outcomes as long as some come, and no longer once no server is there."""
        deadline = time.monotonic() + seconds
        with self._lock:
            mark = self._queue.hurry()
            self._work.notify_all()
            num_pending = -1
            while self._queue.counts().num_pending not in (0, num_pending):
                num_pending = self._queue.counts().num_pending
                await self._wait(
                    lambda: self._is_away or self._queue.is_settled(mark),
                    min(time.monotonic() + LEAVE_SECONDS, deadline),
                )
                if self._is_away or self._failure is not None or time.monotonic() >= deadline:
                    return

    def _begin_close(self) -> bool:
        """Take no more experiences; False where that isn't to be done, or was."""
        if self._is_inherited:
            return False
        with self._lock:
            if self._closing:
                return False
            self._closing = True
        return True

    async def _end(self) -> None:
        """End the stream, and the worker."""
        with self._lock:
            self._done = True
            self._connection += 1
            call, worker = self._call, self._worker
            self._work.notify_all()
        self._ended()
        if call is not None:
            call.cancel()
        if worker is not None:
            await worker.stop()

    def _began(self) -> None:
        """The worker was started just now."""

    def _ended(self) -> None:
        """It was closed, and the worker is about to be stopped."""

    @property
    def _is_away(self) -> bool:
        """Whether no server has answered since the stream broke."""
        return self._last_error is not None

    @property
    def _is_inherited(self) -> bool:
        return self._pid not in (0, os.getpid())

    def _check_process(self) -> None:
        """Before the lock is taken, which the other process may have held: nobody would free it."""
        if self._is_inherited:
            raise WrongStateError(
                "this writer was used before this process was forked off, and what sends for it is "
                "in the other one: make a writer in each process",
                subject="writer",
            )

    async def _wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait for a condition or a failure. Call with the lock held."""
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
        if self._worker is None:
            self._pid = os.getpid()
            self._worker = Worker(self._run, "experience-buffer-writer")
            self._began()

    async def _run(self) -> None:
        """Keep a stream open while there is something to send, until closed or failed for good."""
        what = f"writer to buffer {self._buffer!r}"
        stream = AsyncReconnecting(self._client, "PushStream", what)
        try:
            while await self._await_work():
                call = self._connect()
                if call is None:
                    return
                error = await stream.hear(call, self._receive)
                with self._lock:
                    self._connection += 1
                    self._last_error = error
                    settled = self._queue.broke(error)
                    self._memory.settled(settled or ())
                    self._queue.rewind()
                    self._work.notify_all()
                    self._progress.notify_all()
                    if self._done:
                        return
                    if settled is None:
                        await self._work.wait_for(lambda: self._done, stream.delay_after(error))
        except ExperienceBufferError as failure:
            with self._lock:
                failure.add_note(f"{self._queue.counts().num_pending} experiences are not stored")
                self._failure = failure
        finally:
            # Also when this ends by a bug: nobody may wait for it forever.
            ended = "client" if self._client._is_closed and not self._done else "writer"
            with self._lock:
                self._failure = self._failure or closed_error(ended)
                self._memory = self._new_memory()  # A closed writer keeps none.
                self._progress.notify_all()

    async def _await_work(self) -> bool:
        """Wait for something to send; False when closed."""
        with self._lock:
            await self._work.wait_for(lambda: self._done or self._queue.pending_bytes > 0, None)
            return not self._done

    def _connect(self) -> Any:
        """Open a stream; None when closed meanwhile."""
        with self._lock:
            if self._done:
                return None
            self._connection += 1
            self._memory = self._new_memory()
            requests = self._requests(self._connection, self._memory)
            self._call = self._client._open("PushStream", requests)
            return self._call

    def _new_memory(self) -> PushMemory:
        is_wanted = self._client.options.shared_memory
        return PushMemory(self._queue.fields, is_wanted=is_wanted)

    async def _requests(self, connection: int, memory: PushMemory) -> AsyncIterator[bytes]:
        """Requests as they come due, until this connection is over; gRPC runs this."""
        for message in memory.opening():
            yield message
        while True:
            with self._lock:
                while True:
                    if connection != self._connection:
                        return
                    request = self._queue.next_request()
                    if request is not None:
                        break
                    await self._work.wait(self._queue.seconds_until_next())
                while not memory.reserve(request):
                    self._is_short = True
                    await self._work.wait(None)
                    if connection != self._connection:
                        return
            yield memory.message(request)

    def _receive(self, message: service_pb2.PushStreamResponse) -> None:
        if message.HasField("memory"):
            self._memory.offered(message.memory)
            return
        self._memory.answered(message.sequence)
        with self._lock:
            self._last_error = None
            delay = self._client.options.retry.initial_backoff_seconds
            self._memory.settled(self._queue.answered(message, delay=delay))
            if message.HasField("error") or self._is_short:
                self._is_short = False
                self._work.notify_all()
            self._progress.notify_all()
