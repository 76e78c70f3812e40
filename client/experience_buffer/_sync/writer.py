"""The sync client's background writer: a thread that moves a `PushQueue` over a stream.

Written by hand, as `_async/writer.py` is: processes that are forked off and those that end with a writer
open are the threads' concern alone, cancelled tasks and event loops that end the tasks'.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.util import Finalize
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import grpc

from experience_buffer._messages import push_split
from experience_buffer._messages.push_bytes import Payload
from experience_buffer._transport import push_queue
from experience_buffer._transport.push_memory import PushMemory
from experience_buffer._transport.retry import Attempts
from experience_buffer._transport.settings import closed_error
from experience_buffer.errors import (
    ExperienceBufferError,
    PushRefusedError,
    UnavailableError,
    WrongStateError,
)
from experience_buffer.options import WriterOptions
from experience_buffer.v1 import service_pb2
from experience_buffer.values import WriterCounts

if TYPE_CHECKING:
    from typing import Self

    from experience_buffer._sync.connection import Connection
    from experience_buffer.experience import Experience

_EXIT_SECONDS = 10.0
"""For what is still under way when the process ends."""
logger = logging.getLogger("experience_buffer")


class Writer:
    """Pushes in the background, in batches, keeping several under way.

    It can be shared between threads. What the server refused, and other errors, are raised by
    the next `append`, `flush` or `close`. When the stream breaks, it reconnects and sends again
    what has no outcome yet, which is safe because pushes are idempotent.

    It belongs to the process that uses it first: in one that is forked off after that it can't be
    used any more.

    One that is still open when the process ends by itself is closed then, for which it has 10
    seconds at most; what is not stored by then is logged as an error.
    """

    def __init__(
        self, client: Connection, *, buffer: str, group_size: int, options: WriterOptions
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
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        """Something to send, or the connection ended; this writer's thread and gRPC's wait for it."""
        self._progress = threading.Condition(self._lock)
        """Outcomes, or the end; callers wait for it."""
        self._connection = 0
        self._memory = self._new_memory()
        """Of the present connection."""
        self._is_short = False
        """The next request waits for room there."""
        self._call: Any = None
        self._failure: ExperienceBufferError | None = None
        self._closing = False
        self._done = False
        self._thread: threading.Thread | None = None
        self._at_exit: Finalize | None = None
        self._pid = 0
        """Of the process whose thread sends; 0: none does yet."""

    @property
    def counts(self) -> WriterCounts:
        """What became of the experiences appended so far.

        Raises:
            WrongStateError: As `append`.
        """
        self._check_process()
        with self._lock:
            return self._queue.counts()

    def append(
        self, experiences: Experience | Sequence[Experience], *, timeout: float | None = None
    ) -> None:
        """Queue experiences; blocks while the queue is full.

        They are encoded before this returns: later changes to them are not sent.

        Args:
            experiences: One or several.
            timeout: Seconds to wait for room; None: the client's timeout.

        Raises:
            DeadlineExceededError: No room in time; the text says how many were queued.
            PushRefusedError: Experiences appended earlier were refused; nothing was queued now.
            MessageTooLargeError: One experience is over the message limit; those before it
                are queued.
            WrongStateError: This process was forked off from one that had used the writer.
            ExperienceBufferError: The writer failed, or was closed; nothing more was queued.
        """
        self._check_process()
        many = push_split.as_sequence(experiences)
        deadline = time.monotonic() + self._client._seconds(timeout)
        with self._lock:
            self._raise_errors()
            if self._closing:
                raise closed_error("writer")
        for start, end, pieces in push_split.encode_pieces(many, self._limits):
            memory = self._memory
            payload = memory.place(pieces, pending_bytes=self._queue.pending_bytes)
            try:
                with self._lock:
                    has_room = functools.partial(self._queue.has_room, len(payload))
                    if not self._wait(has_room, deadline):
                        raise push_queue.full_error(self._queue, start, len(many))
                    self._add(payload, end - start)
            except BaseException:
                memory.settled([payload])
                raise

    def _add(self, payload: Payload, num_items: int) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise closed_error("writer")
        if self._queue.add(payload, num_items):
            self._work.notify_all()
        self._start()

    def flush(self, *, timeout: float | None = None) -> None:
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
            done = self._wait(lambda: self._queue.is_settled(mark), time.monotonic() + seconds)
            self._raise_errors(None if done else push_queue.flush_error(self._queue, seconds))

    def close(self, *, timeout: float | None = None) -> None:
        """Flush and end the stream. Idempotent; raises as `flush` does, closed all the same.

        In a process that was forked off it does nothing: what is queued is the other one's.
        """
        if self._is_inherited:
            return
        with self._lock:
            if self._closing:
                return
            self._closing = True
        try:
            self.flush(timeout=timeout)
        finally:
            with self._lock:
                self._done = True
                self._connection += 1
                call, thread, at_exit = self._call, self._thread, self._at_exit
                self._work.notify_all()
            if at_exit is not None:
                at_exit.cancel()
            if call is not None:
                call.cancel()
            if thread is not None:
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _is_inherited(self) -> bool:
        return self._pid not in (0, os.getpid())

    def _check_process(self) -> None:
        """Before the lock is taken, which the other process may have held: nobody would free it."""
        if self._is_inherited:
            raise WrongStateError(
                "this writer was used before this process was forked off, and its thread is in the "
                "other one: make a writer in each process",
                subject="writer",
            )

    def _wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait for a condition or a failure. Call with the lock held."""
        return self._progress.wait_for(
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
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="experience-buffer-writer", daemon=True
            )
            self._pid = os.getpid()
            self._thread.start()
            # Also called in processes that multiprocessing has started, unlike `atexit`, and never
            # in one that was forked since.
            self._at_exit = Finalize(None, self._close_at_exit, exitpriority=0)

    def _close_at_exit(self) -> None:
        try:
            self.close(timeout=min(self._client.timeout, _EXIT_SECONDS))
        except ExperienceBufferError as error:
            # One that holds nothing may have lost its client before.
            num_pending = self.counts.num_pending
            if num_pending or isinstance(error, PushRefusedError):
                logger.error(
                    "a writer was open when the process ended, close it before: %d experiences are "
                    "not stored: %s",
                    num_pending,
                    error,
                )

    def _run(self) -> None:
        """Keep a stream open while there is something to send, until closed or failed for good."""
        retry = self._client.options.retry
        attempts: Attempts | None = None
        try:
            while self._await_work():
                error: ExperienceBufferError
                try:
                    for message in self._connect():
                        attempts = None
                        self._receive(message)
                    error = UnavailableError("the server ended the push stream")
                except grpc.RpcError as rpc_error:
                    error = self._client._translate(rpc_error, "PushStream")
                with self._lock:
                    self._connection += 1
                    self._queue.rewind()
                    self._work.notify_all()
                    if self._done:
                        return
                    attempts = attempts or Attempts(retry, retry.reconnect_seconds)
                    delay = attempts.delay_after(error, idempotent=True)
                    logger.info("writer: %s; reconnecting in %.1f s", error, delay)
                    self._work.wait_for(lambda: self._done, delay)
        except ExperienceBufferError as error:
            with self._lock:
                error.add_note(f"{self._queue.counts().num_pending} experiences are not stored")
                self._failure = error
        finally:
            # Also when this thread dies of a bug: nobody may wait for it forever.
            with self._lock:
                self._failure = self._failure or closed_error("writer")
                self._memory = self._new_memory()  # A closed writer keeps none.
                self._progress.notify_all()

    def _await_work(self) -> bool:
        """Wait for something to send; False when closed."""
        with self._lock:
            self._work.wait_for(lambda: self._done or self._queue.pending_bytes > 0)
            return not self._done

    def _connect(self) -> Iterator[service_pb2.PushStreamResponse]:
        with self._lock:
            if self._done:
                return iter(())
            self._connection += 1
            self._memory = self._new_memory()
            requests = self._requests(self._connection, self._memory)
            call = self._call = self._client._open("PushStream", requests)
            return cast("Iterator[service_pb2.PushStreamResponse]", call)

    def _new_memory(self) -> PushMemory:
        is_wanted = self._client.options.shared_memory
        return PushMemory(self._queue.fields, is_wanted=is_wanted)

    def _requests(self, connection: int, memory: PushMemory) -> Iterator[bytes]:
        """Requests as they come due, until this connection is over; runs in gRPC's thread."""
        yield from memory.opening()
        while True:
            with self._lock:
                while True:
                    if connection != self._connection:
                        return
                    request = self._queue.next_request()
                    if request is not None:
                        break
                    self._work.wait(self._queue.seconds_until_next())
                while not memory.reserve(request):
                    self._is_short = True
                    self._work.wait()
                    if connection != self._connection:
                        return
            yield memory.message(request)

    def _receive(self, message: service_pb2.PushStreamResponse) -> None:
        if message.HasField("memory"):
            self._memory.offered(message.memory)
            return
        self._memory.answered(message.sequence)
        with self._lock:
            delay = self._client.options.retry.initial_backoff_seconds
            self._memory.settled(self._queue.answered(message, delay=delay))
            if message.HasField("error") or self._is_short:
                self._is_short = False
                self._work.notify_all()
            self._progress.notify_all()
