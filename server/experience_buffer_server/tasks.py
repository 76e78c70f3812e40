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

    async def finish(self, work: Awaitable[_T]) -> _T:
        """Wait for work that goes on to its end even if the waiting call is cancelled."""
        return await self.begin(work)

    def begin(self, work: Awaitable[_T]) -> asyncio.Future[_T]:
        """Start work that one call will wait for; it goes on even if that is cancelled."""
        # Told by the work itself, who waits goes on a step of the event loop earlier than it would
        # behind `asyncio.shield`; where steps are long, that is what a batch waits for.
        told: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        told.add_done_callback(_retrieve)

        async def run() -> None:
            try:
                result = await work
            except asyncio.CancelledError:
                told.cancel()
                raise
            except BaseException as error:
                if not told.done():
                    told.set_exception(error)
                raise
            if not told.done():
                told.set_result(result)

        self._keep(run())
        return told

    def start(self, work: Awaitable[_T]) -> asyncio.Task[_T]:
        """Start work that some wait for; it may be under way, such as a submitted commit."""

        async def run() -> _T:
            return await work

        return self._keep(run())

    def spawn(self, work: Awaitable[object]) -> None:
        """Start work that nobody waits for; its failure is logged."""
        self.start(work).add_done_callback(_log_failure)

    async def drain(self) -> None:
        """Wait until nothing is running."""
        while self._running:
            await asyncio.wait(self._running)

    def _keep(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(_retrieve)
        return task


def _retrieve(ended: asyncio.Future[Any]) -> None:
    """Whoever waited may have been cancelled: a failure isn't to be reported for that."""
    if not ended.cancelled():
        ended.exception()


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("work in the background failed: %s", error, exc_info=error)
