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
        self._running: set[asyncio.Future[Any]] = set()

    async def finish(self, work: Awaitable[_T]) -> _T:
        """Wait for work that goes on to its end even if the waiting call is cancelled."""
        return await asyncio.shield(self.start(work))

    def start(self, work: Awaitable[_T]) -> asyncio.Task[_T]:
        """Start work that several may wait for, each behind `asyncio.shield`: who cancels it ends it."""

        async def run() -> _T:
            return await work

        task = asyncio.get_running_loop().create_task(run())
        self.include(task)
        task.add_done_callback(_retrieve)
        return task

    def spawn(self, work: Awaitable[object]) -> None:
        """Start work that nobody waits for; its failure is logged."""
        self.start(work).add_done_callback(_log_failure)

    def include(self, work: asyncio.Future[Any]) -> None:
        """Let `drain` wait for work that others see to."""
        self._running.add(work)
        work.add_done_callback(self._running.discard)

    async def drain(self) -> None:
        """Wait until nothing is running."""
        while self._running:
            await asyncio.wait(self._running)


def _retrieve(ended: asyncio.Future[Any]) -> None:
    """Whoever waited may have been cancelled: a failure isn't to be reported for that."""
    if not ended.cancelled():
        ended.exception()


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("work in the background failed: %s", error, exc_info=error)
