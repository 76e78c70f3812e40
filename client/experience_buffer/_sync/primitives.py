"""How threads wait for one another; see `_async/primitives.py`, which has the same for tasks.

Written by hand, as what `_async` has by the same name: the modules that are generated stand on it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from threading import Condition, Lock
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar

__all__ = ["Answer", "Closing", "Condition", "Lock", "Outbox", "Worker", "in_thread", "read"]

P = ParamSpec("P")
T = TypeVar("T")


def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do work that takes long: here, since it keeps nobody else from running."""
    return work(*args, **kwargs)


def read(call: Any) -> Any:
    """The next message of a stream; None when it has ended."""
    return next(call, None)


class Closing:
    """What is closed at the end of a `with`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._leave(error)

    def _leave(self, error: BaseException) -> None:
        """Close it because of an error that neither waits nor is replaced."""
        self.close()

    def close(self) -> None:
        """Close it. Idempotent."""
        raise NotImplementedError


def peek(fetch: Callable[[], None]) -> None:
    """Fetch what is to be shown, where that can be waited for."""
    fetch()


class Answer(Generic[T]):
    """What a stream is asked for, once it is there; several may wait for it. Thread-safe."""

    def __init__(self) -> None:
        self._future: futures.Future[T] = futures.Future()

    def set(self, answer: T) -> None:
        """It is there. To be called once."""
        self._future.set_result(answer)

    def wait(self, timeout: float) -> T:
        """Wait for it.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: It isn't there in time.
        """
        return self._future.result(timeout)


class Outbox(Generic[T]):
    """What is to be said on a stream, in order. Thread-safe."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def put(self, *requests: T) -> None:
        """Say something."""
        for request in requests:
            self._queue.put(request)

    def end(self) -> None:
        """Say nothing more."""
        self._queue.put(None)

    def requests(self) -> Iterator[T]:
        """What gRPC takes: all that is said until the end."""
        return iter(self._queue.get, None)


class Worker:
    """What goes on in the background until it ends by itself; it begins at once.

    Args:
        target: Runs in a thread, which doesn't keep the process from ending.
        name: The thread's.
    """

    def __init__(self, target: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=target, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for its end, which the caller has brought about."""
        if self._thread is not threading.current_thread():
            self._thread.join()
