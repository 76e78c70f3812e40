"""Work that must finish even when the call that started it is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Tasks:
    """Background tasks of one owner. Not thread-safe; belongs to one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def finish(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for work that goes on to its end even if the waiting call is cancelled."""
        return await asyncio.shield(self.spawn(work))

    def spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Start work whose failure, if nobody waits for it, is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def watch(self, work: Awaitable[_T]) -> asyncio.Task[_T]:
        """Like `spawn`, for what is under way already, such as a submitted commit."""

        async def wait() -> _T:
            return await work

        return self.spawn(wait())

    async def drain(self) -> None:
        """Wait until nothing is running."""
        while self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("a background task failed: %r", error)
