"""Requests to a child process of the server: length-prefixed msgpack over a socket pair.

The child answers in the order of the requests and ends when the socket closes, so it never
outlives the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from typing import Any

import msgpack

_LENGTH = struct.Struct("<Q")
_CLOSE_SECONDS = 10.0


class ChildGoneError(Exception):
    """The child process ended before it answered."""

    def __init__(self, message: str, *, was_running: bool) -> None:
        super().__init__(message)
        self.was_running = was_running
        """The child may have been at work on this request when it ended."""


class ChildRefusedError(ChildGoneError):
    """The child process said why it can't start, and ended."""

    def __init__(self, reason: str, *, for_good: bool) -> None:
        super().__init__(reason, was_running=False)
        self.for_good = for_good
        """Started again it would say the same, until somebody changes something."""


class Child:
    """A running child process. Not thread-safe; belongs to one event loop."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._unanswered: deque[asyncio.Future[Any]] = deque()
        self._limit_seconds = math.inf
        self._patience_time = -math.inf
        self._clock: asyncio.TimerHandle | None = None
        """Runs while the child is at work on a request."""
        self._is_overdue = False
        self.gone = False
        """True once the process has ended or can't be reached."""
        self.greeting: Any = None
        """What it said when it was ready."""
        self._receiver = asyncio.get_running_loop().create_task(self._receive())

    @classmethod
    async def start(cls, module: str, *arguments: str, limit_seconds: float = math.inf) -> Child:
        """Run `python -m module FD arguments...` with its end of the socket pair, until it is ready.

        Args:
            module: What to run.
            arguments: Of its command line.
            limit_seconds: A child that is at work on one request for longer is killed.

        Raises:
            ChildRefusedError: It said why it can't start.
            ChildGoneError: It ended before it was ready.
            OSError: No process could be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            # Before there is a process: a cancellation here leaves none behind.
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
                    pass_fds=[theirs.fileno()],
                    # Ctrl-C in a terminal reaches every process of the session's foreground group.
                    start_new_session=True,
                )
            except OSError:
                writer.close()
                raise
        child = cls(process, reader, writer)
        try:
            said = await child._next_answer()
        except ChildGoneError as error:
            raise ChildGoneError(str(error), was_running=False) from error
        except asyncio.CancelledError:
            # Nobody will ever hear of it: it must not go on starting.
            process.kill()
            await child.close()
            raise
        if "refused" in said:
            await child.close()
            raise ChildRefusedError(said["refused"], for_good=said["for_good"])
        child.greeting = said["ready"]
        child._limit_seconds = limit_seconds
        return child

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def be_patient(self, seconds: float) -> None:
        """Kill it for no request before so many seconds from now, whatever its limit."""
        self._patience_time = asyncio.get_running_loop().time() + seconds

    async def request(self, message: Any) -> Any:
        """Send a message and wait for its answer.

        Raises:
            ChildGoneError: The child ended first.
        """
        if self.gone:
            raise ChildGoneError(self._epitaph(), was_running=False)
        data = msgpack.packb(message)
        self._writer.write(_LENGTH.pack(len(data)) + data)
        return await self._next_answer()

    async def close(self) -> None:
        """Let the child finish what it has and end. Idempotent."""
        self._writer.close()
        try:
            await asyncio.to_thread(self._process.wait, _CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        await asyncio.wait([self._receiver])

    def _next_answer(self) -> asyncio.Future[Any]:
        """What the child says next; it says that it is ready, then answers in order."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unanswered.append(answer)
        if len(self._unanswered) == 1:
            self._begin()
        return answer

    def _begin(self) -> None:
        """The child begins with a request, or has none."""
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        if self._unanswered and self._limit_seconds != math.inf:
            loop = asyncio.get_running_loop()
            end = max(loop.time() + self._limit_seconds, self._patience_time)
            self._clock = loop.call_at(end, self._give_up)

    def _give_up(self) -> None:
        self._is_overdue = True
        self._process.kill()

    async def _receive(self) -> None:
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                answer = msgpack.unpackb(await self._reader.readexactly(length))
                waiting = self._unanswered.popleft()
                self._begin()
                if not waiting.done():
                    waiting.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            # A ValueError is an answer that isn't msgpack: nothing after it can be understood.
            self.gone = True
            self._writer.close()
            # One that has ended says with which status, unless it is killed on its way.
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, 1.0)
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            for index, waiting in enumerate(self._unanswered):
                if not waiting.done():
                    # It answers in order: only the first one can have ended it.
                    gone = ChildGoneError(self._epitaph(), was_running=index == 0)
                    waiting.set_exception(gone)
            self._unanswered.clear()
            self._begin()

    def _epitaph(self) -> str:
        if self._is_overdue:
            return (
                f"killed, since it was at work on one launch for {self._limit_seconds:g} s; the limit "
                "is compute.max_launch_seconds: raise it, or make the estimator end sooner"
            )
        code = self._process.poll()
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"ended with status {code}"


class Parent:
    """The child's end of the socket pair: blocking, one request at a time."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._file = self._socket.makefile("rb")
        # The terminal's Ctrl-C and a supervisor's SIGTERM are for the server, which drains first.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.set_inheritable(descriptor, False)

    def ready(self, greeting: Any = None) -> None:
        """Say that requests can come, and what else the server may want to know: plain data."""
        self.answer({"ready": greeting})

    def refuse(self, reason: str, *, for_good: bool) -> None:
        """Say, in place of `ready`, why none can, and whether for good; the process is to end then."""
        self.answer({"refused": reason, "for_good": for_good})

    def receive(self) -> Any | None:
        """The next request; None when the server has closed the socket."""
        try:
            header = self._file.read(_LENGTH.size)
            if len(header) < _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack(header)
            body = self._file.read(length)
        except ConnectionResetError:  # It was killed, and hadn't read an answer.
            return None
        return msgpack.unpackb(body) if len(body) == length else None

    def answer(self, message: Any) -> None:
        """Answer the last request; without effect when the server has gone."""
        data = msgpack.packb(message)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(_LENGTH.pack(len(data)))
            self._socket.sendall(data)
