"""How the tasks of one event loop wait for one another.

`_sync/primitives.py` has the same names for threads: what is generated from the modules here uses
them, and so says once what both clients do. Locks are taken here as there, though one loop needs
none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import grpc.aio

T = TypeVar("T")
in_thread: Final = asyncio.to_thread
"""Do work that takes long without keeping the event loop from running."""


async def read(call: Any) -> Any:
    """The next message of a stream; None when it has ended, or was cancelled here.

    `async for` would cancel the call when it is left.
    """
    try:
        message = await call.read()
    except asyncio.CancelledError:
        if is_cancelling():
            raise
        return None
    return None if message is grpc.aio.EOF else message


def is_cancelling() -> bool:
    """Whether this task is to end. If not, a `CancelledError` is how gRPC says that a call was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Lock:
    """What guards the state of a thing from other threads; there are none here."""

    def __enter__(self) -> None:
        """Take nothing: nobody else runs before the next `await`."""

    def __exit__(self, *raised: object) -> None:
        """Release nothing."""


class Condition(Lock):
    """Wakes the tasks that wait for a condition. As `threading.Condition`, without its lock."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._event = asyncio.Event()

    def notify_all(self) -> None:
        """Let every waiting task look at its condition again."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout: float | None) -> None:
        """Wait for the next `notify_all`, or for the seconds to pass; None: no end."""
        event = self._event
        await self.wait_for(event.is_set, timeout)

    async def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until the condition holds.

        Args:
            condition: Looked at now and after each `notify_all`.
            timeout: Seconds; None: no end.

        Returns:
            Whether it held in time.
        """
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    await self._event.wait()
        except TimeoutError:
            return condition()
        return True


class Closing:
    """What is closed at the end of an `async with`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await (self.close() if error is None else self._leave(error))

    async def _leave(self, error: BaseException) -> None:
        """Close it because of an error, or of a cancellation, that neither waits nor is replaced."""
        await self.close()

    async def close(self) -> None:
        """Close it. Idempotent."""
        raise NotImplementedError


def peek(fetch: Callable[[], Awaitable[None]]) -> None:
    """Fetch what is to be shown, where that can be waited for; here it can't."""


class Answer(Generic[T]):
    """What a stream is asked for, once it is there; several may wait for it."""

    def __init__(self) -> None:
        self._future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def set(self, answer: T) -> None:
        """It is there."""
        if not self._future.done():
            self._future.set_result(answer)

    async def wait(self, timeout: float) -> T:
        """Wait for it.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: It isn't there in time.
        """
        # Shielded: who waits no longer doesn't end it for the others. Not `asyncio.wait_for`, which
        # swallows a cancellation that comes with the answer (before Python 3.12).
        async with asyncio.timeout(timeout):
            return await asyncio.shield(self._future)


class Outbox(Generic[T]):
    """What is to be said on a stream, in order."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[T | None] = asyncio.Queue()

    def put(self, *requests: T) -> None:
        """Say something."""
        for request in requests:
            self._queue.put_nowait(request)

    def end(self) -> None:
        """Say nothing more."""
        self._queue.put_nowait(None)

    async def requests(self) -> AsyncIterator[T]:
        """What gRPC takes: all that is said until the end."""
        while (request := await self._queue.get()) is not None:
            yield request


class Worker:
    """What goes on in the background until it ends or is stopped; it begins at once.

    Args:
        target: Runs in a task of this loop.
        name: The task's.
    """

    def __init__(self, target: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._task: asyncio.Task[None] = asyncio.create_task(target(), name=name)

    async def stop(self) -> None:
        """Cancel it and wait for its end."""
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
