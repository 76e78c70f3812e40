"""Looking at much without keeping anybody waiting: a slice at a time, and not for ever."""

from __future__ import annotations

import asyncio
import time
from typing import Final

_SLICE_SECONDS: Final = 2e-3
"""Of the event loop at once."""
_MOST_SECONDS: Final = 0.12
"""Of the processor in one call, which answers with what it has found by then."""
_NUM_STEPS: Final = 4
"""Steps that everybody else may take between two slices."""


class Glance:
    """One call's look, which may be long. Belongs to its task and the event loop.

    Between two slices anything may happen to the buffer.
    """

    def __init__(self) -> None:
        self._most = _MOST_SECONDS
        self._looked = 0.0
        self._begin()

    def _begin(self) -> None:
        self._since = time.perf_counter()
        self._worked = time.thread_time()

    @property
    def is_over(self) -> bool:
        """Whether it has looked for long enough: the call answers, and the next one goes on."""
        return self._looked >= self._most

    async def breathe(self) -> None:
        """Let others go on if this slice is over."""
        if time.perf_counter() - self._since < _SLICE_SECONDS:
            return
        # Of the time on the processor: on a busy machine a slice may last and do little.
        self._looked += time.thread_time() - self._worked
        for _ in range(_NUM_STEPS):
            await asyncio.sleep(0)
        self._begin()
