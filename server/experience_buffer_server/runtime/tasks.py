"""Work that must finish even when the call that started it is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from functools import partial
from typing import Any, TypeVar

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Tasks:
    """Background tasks of one owner. Not thread-safe; belongs to one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[Any]] = set()

    async def finish(self, work: Awaitable[_T]) -> _T:
        """Wait for work that goes on to its end even if the waiting call is cancelled."""
        return await self.begin(work)

    def begin(self, work: Awaitable[_T]) -> asyncio.Future[_T]:
        """Start work that one call will wait for; it goes on even if that is cancelled.

        Who waits goes on a step of the event loop earlier than behind `asyncio.shield`, while the
        work's task still ends. Where steps are long, that is what a batch waits for.
        """
        told: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        told.add_done_callback(_retrieve)
        self._keep(_tell(told, work)).add_done_callback(partial(_forsake, told))
        return told

    def start(self, work: Awaitable[_T]) -> asyncio.Task[_T]:
        """Start work that several may wait for, each behind `asyncio.shield`: who cancels it ends it.

        It may be under way, such as a submitted commit.
        """

        async def run() -> _T:
            return await work

        return self._keep(run())

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

    def _keep(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(work)
        self.include(task)
        task.add_done_callback(_retrieve)
        return task


async def _tell(told: asyncio.Future[_T] | None, work: Awaitable[_T]) -> None:
    """Do the work, and tell who waits for it."""
    assert told is not None
    try:
        result = await work
        if not told.done():
            told.set_result(result)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        if not told.done():
            told.set_exception(error)
        raise
    finally:
        # What was told -> its error -> the error's traceback -> this frame: nobody would look for
        # that circle for long, and the frames of the call that waited hang on it.
        told = None


def _forsake(told: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
    """The work was cancelled, perhaps before it began: nobody else tells who waits."""
    if not told.done():
        told.cancel()


def _retrieve(ended: asyncio.Future[Any]) -> None:
    """Whoever waited may have been cancelled: a failure isn't to be reported for that."""
    if not ended.cancelled():
        ended.exception()


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("work in the background failed: %s", error, exc_info=error)
