"""The async client used as the sync one, so that one test asks the same of both.

An event loop runs in a thread of its own; each call of whatever comes of the client is made there, and
waits for its end. Threads may share it, as they share the sync client.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from experience_buffer import AsyncClient

_END = object()
_PARTS = ("experience_buffer._async", "experience_buffer.aio")


class Blocking:
    """A client, batch, stream, writer or other part of the async client."""

    loop: asyncio.AbstractEventLoop
    """The one in which all calls are made; see `running_loop`."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        if name == "_target":  # While it is unpickled.
            raise AttributeError(name)
        found = getattr(self._target, name)
        if not inspect.ismethod(found) or name.startswith("_"):
            return found
        return lambda *args, **keywords: self._do(found, *args, **keywords)

    def __enter__(self) -> Blocking:
        self._do(self._target.__aenter__)
        return self

    def __exit__(self, *raised: object) -> None:
        self._do(self._target.__aexit__, *raised)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        found = self._do(anext, self._target, _END)
        if found is _END:
            raise StopIteration
        return found

    def __len__(self) -> int:
        return len(self._target)

    def __bool__(self) -> bool:
        return bool(self._target)

    def __repr__(self) -> str:
        return repr(self._target)

    def __reduce__(self) -> tuple[Any, ...]:
        return Blocking, (self._target,)

    def _do(self, verb: Any, *args: Any, **keywords: Any) -> Any:
        async def call() -> Any:
            found = verb(*args, **keywords)
            return await found if inspect.isawaitable(found) else found

        found = asyncio.run_coroutine_threadsafe(call(), self.loop).result(60)
        is_part = type(found).__module__.startswith(_PARTS) or inspect.isasyncgen(found)
        return Blocking(found) if is_part else found


def connect(address: str, **options: Any) -> Any:
    return Blocking(AsyncClient(address, **options))


@contextmanager
def running_loop() -> Iterator[None]:
    """Run the loop that all of them need."""
    loop = Blocking.loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="blocking")
    thread.start()
    yield
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
