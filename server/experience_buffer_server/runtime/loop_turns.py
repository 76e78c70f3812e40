"""Turns on the event loop: long steps one at a time, with everybody else in between."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from typing import Final

_SHARE: Final = 0.75
_LEAST_SECONDS: Final = 3e-4
_MOST_SECONDS: Final = 6e-3
"""Turns rest after so much of the time that everybody else takes in a rest, within these bounds. Not after
as much: part of that is what follows turns, such as commits and answers."""
_NEWS: Final = 0.1
"""What the last rest weighs in how long everybody else takes: one in ten is long, when a batch is put
together, and most take next to nothing."""
_NUM_STEPS: Final = 8
"""Steps that everybody else may take in each rest. What needs several in a row, one waking the next,
isn't held up before each of them."""


class Turn:
    """A turn that was taken; belongs to the one who took it, who ends it."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._since = time.perf_counter()

    @property
    def is_long(self) -> bool:
        """Whether it is time for a pause."""
        return self._turns._are_long(time.perf_counter() - self._since)

    async def pause(self) -> None:
        """Let everybody go on but those who wait for a turn."""
        began = time.perf_counter()
        for _ in range(_NUM_STEPS):
            await asyncio.sleep(0)
        self._since = time.perf_counter()
        self._turns._rested(self._since - began)

    def end(self) -> None:
        """Let the next have its turn, as soon as the caller waits for anything.

        What the caller does until then belongs to the turn.
        """
        asyncio.get_running_loop().call_soon(self._turns._ended, self._since)


class Turns:
    """Lets one begin, and the next only after whatever else was ready has gone on.

    A step of many milliseconds holds up everything else on the loop for as long. Ten of them that
    are ready at once would hold it up for ten times as long, again and again, and who needs a few
    steps for each batch would starve beside them. So turns rest when they have lasted long enough
    together, and long ones in their middle, too. Each line has a turn before any has another one: who
    has much under way doesn't keep others waiting for all of it. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Those who wait, none of them empty; the line that is next comes first."""
        self._is_taken = False
        self._used_seconds = 0.0
        """By the turns that ended since the last rest."""
        self._rest_seconds = 0.0
        """How long everybody else takes in a rest."""
        self._slice_seconds = _LEAST_SECONDS
        """After which there is the next one."""

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

    def _are_long(self, seconds: float) -> bool:
        """Whether a rest is due when the present turn has lasted for so long."""
        return self._used_seconds + seconds > self._slice_seconds

    def _ended(self, since: float) -> None:
        now = time.perf_counter()
        if self._are_long(now - since):
            self._rest(_NUM_STEPS - 1, now)
        else:
            self._used_seconds += now - since
            self._pass_on()

    def _rest(self, num_steps: int, began: float) -> None:
        if num_steps:
            asyncio.get_running_loop().call_soon(self._rest, num_steps - 1, began)
        else:
            self._rested(time.perf_counter() - began)
            self._pass_on()

    def _rested(self, seconds: float) -> None:
        """Everybody else has taken their steps, and so long for them."""
        self._used_seconds = 0.0
        self._rest_seconds += _NEWS * (seconds - self._rest_seconds)
        slice_seconds = max(_SHARE * self._rest_seconds, _LEAST_SECONDS)
        self._slice_seconds = min(slice_seconds, _MOST_SECONDS)

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
