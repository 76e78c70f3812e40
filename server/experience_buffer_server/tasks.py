"""Work that must finish even when the call that started it is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Tasks:
    """Background tasks of one owner. Not thread-safe; belongs to one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def finish(self, work: Awaitable[_T]) -> _T:
        """Wait for work that goes on to its end even if the waiting call is cancelled."""
        return await asyncio.shield(self.start(work))

    def start(self, work: Awaitable[_T]) -> asyncio.Task[_T]:
        """Start work that somebody waits for; it may be under way, such as a submitted commit."""

        async def run() -> _T:
            return await work

        task = asyncio.get_running_loop().create_task(run())
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def spawn(self, work: Awaitable[object]) -> None:
        """Start work that nobody waits for; its failure is logged."""
        self.start(work).add_done_callback(_log_failure)

    async def drain(self) -> None:
        """Wait until nothing is running."""
        while self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # Whoever waited may have been cancelled.


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("work in the background failed: %s", error, exc_info=error)
