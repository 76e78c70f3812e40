"""Turns on the event loop: long steps one at a time, with everybody else in between."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from typing import Final

_SLICE_SECONDS: Final = 1e-3
"""A turn pauses after so long: others on the loop wait no longer than that for it."""
_NUM_STEPS: Final = 8
"""Steps that everybody else may take in each pause, and between two turns. What needs several in a
row, one waking the next, isn't held up before each of them."""


class Turn:
    """A turn that was taken; belongs to the one who took it, who ends it."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._since = time.perf_counter()

    @property
    def is_long(self) -> bool:
        """Whether it has lasted long enough for a pause."""
        return time.perf_counter() - self._since > _SLICE_SECONDS

    async def pause(self) -> None:
        """Let everybody go on but those who wait for a turn."""
        for _ in range(_NUM_STEPS):
            await asyncio.sleep(0)
        self._since = time.perf_counter()

    def end(self) -> None:
        """Let the next have its turn, as soon as the caller waits for anything, and others went on."""
        self._turns._rest(_NUM_STEPS)


class Turns:
    """Lets one begin, and the next only after whatever else was ready has had its turn.

    A step of many milliseconds holds up everything else on the loop for as long. Ten of them that
    are ready at once would hold it up for ten times as long, again and again, and who needs a few
    steps for each batch would starve beside them. Each line has a turn before any has another one:
    who has much under way doesn't keep others waiting for all of it. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Those who wait, none of them empty; the line that is next comes first."""
        self._is_taken = False

    async def take(self, line: str) -> Turn:
        """Wait for a turn; `Turn.end` follows, whatever happens.

        Args:
            line: In which to wait: first come, first served.
        """
        if self._is_taken:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._lines.setdefault(line, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._is_taken = True
        return Turn(self)

    def _rest(self, num_steps: int) -> None:
        if num_steps:
            asyncio.get_running_loop().call_soon(self._rest, num_steps - 1)
        else:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._lines:
            line, waiting = self._lines.popitem(last=False)
            turn = waiting.popleft()
            if waiting:
                self._lines[line] = waiting
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False
