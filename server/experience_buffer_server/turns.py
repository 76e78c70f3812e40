"""Turns on the event loop: long steps one at a time, with everybody else in between."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Lets one begin, and the next only after whatever else was ready has had its turn.

    A step of many milliseconds holds up everything else on the loop for as long. Ten of them that
    are ready at once would hold it up for ten times as long, again and again, and who needs a few
    steps for each batch would starve beside them. First come, first served. Belongs to one event
    loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False

    async def take(self) -> None:
        """Wait for a turn; it lasts until the caller next waits for anything."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._is_taken = True
        loop.call_soon(self._pass_on)

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False
