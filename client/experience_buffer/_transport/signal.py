"""Waiting for a change of state among the tasks of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """Wakes the tasks that wait for a condition, without a lock: one loop needs none."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Let every waiting task look at its condition again."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout: float | None) -> None:
        """Wait for the next `notify`, or for the seconds to pass; None: no end."""
        event = self._event
        await self.wait_for(event.is_set, timeout)

    async def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until the condition holds.

        Args:
            condition: Looked at now and after each `notify`.
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
