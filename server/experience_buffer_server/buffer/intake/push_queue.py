"""Pushes that wait in line for room, first come, first served.

Only what a lack of room holds back waits here. What a limiter or the pacing holds back is told to
come again: it holds back some pushes and not others, and those that complete groups, behind it in
one line, would be what it waits for.

A push that waits holds its request (see `quotas`) and nothing of the store or of what was read.
Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from experience_buffer import errors
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.runtime.metrics import Metrics

_DELAY_SECONDS = 1.0
"""Before a push comes again that found the line too long, or the server stopping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """For how long a push may wait."""

    deadline: float
    """By `time.monotonic`: then it is answered, with or without room."""
    stop: asyncio.Event
    """Set when the server stops: the wait ends."""


class Shortage(NamedTuple):
    """Why a push has to wait."""

    label: str
    """The limit, or "line" where others came earlier; of a fixed few."""
    words: str
    num_items: int
    """Experiences that it brings."""
    num_bytes: int
    """Their payload."""


@dataclass(slots=True, eq=False)
class Place:
    """A push in the line."""

    shortage: Shortage
    turn: asyncio.Future[None]
    """Done when there may be room for it."""
    since: float
    """By `time.monotonic`."""
    uids: frozenset[int]
    """Of what it brings, as hashes: they take little, and a mistake costs a look in vain."""


class PushLine:
    """The pushes of one buffer that wait. Not thread-safe."""

    def __init__(
        self,
        state: BufferState,
        may_go: Callable[[Shortage], bool],
        metrics: Metrics,
    ) -> None:
        self._state = state
        self._may_go = may_go
        """Whether the first has reason to try again."""
        self._metrics = metrics
        self._max_waiting = state.limits.max_waiting_pushes
        self._places: deque[Place] = deque()

    def __len__(self) -> int:
        return len(self._places)

    def is_behind(self, place: Place | None) -> bool:
        """Whether others came earlier than a push, which has a place or has just come."""
        return bool(self._places) and self._places[0] is not place

    def join(self, shortage: Shortage, uids: Iterable[str]) -> Place:
        """Take the last place, with a push of these uids; `leave` follows, whatever happens.

        Raises:
            BufferFullError: The line is too long.
        """
        if len(self._places) >= self._max_waiting:
            self._metrics.push_refused(self._state.name, "max_waiting_pushes")
            raise errors.BufferFullError(
                f"buffer {self._state.name!r} is full ({shortage.words}), and "
                f"{len(self._places)} pushes wait for room already: the limit "
                f"server.max_waiting_pushes is {self._max_waiting}",
                subject=self._state.name,
                retry_delay_seconds=_DELAY_SECONDS,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = Place(shortage, turn, time.monotonic(), frozenset(map(hash, uids)))
        self._places.append(place)
        self._metrics.push_wait_began(self._state.name, shortage.label)
        return place

    async def turn(self, place: Place, patience: Patience) -> bool:
        """Wait until there may be room for a push; False if its time is over before.

        Raises:
            UnavailableError: The server stops.
        """
        if place.turn.done():
            # It had its turn and found no room after all.
            place.turn = asyncio.get_running_loop().create_future()
        stopping = asyncio.ensure_future(patience.stop.wait())
        try:
            await asyncio.wait(
                (place.turn, stopping),
                timeout=max(patience.deadline - time.monotonic(), 0.0),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            stopping.cancel()
        if patience.stop.is_set():
            raise errors.UnavailableError(
                "the server is stopping, this push still waited for room; send it again elsewhere "
                "or later",
                retry_delay_seconds=_DELAY_SECONDS,
            )
        return place.turn.done()

    def leave(self, place: Place) -> None:
        """A push is stored, refused or given up: the next may have its turn."""
        seconds = time.monotonic() - place.since
        self._metrics.push_waited(self._state.name, place.shortage.label, seconds)
        self._places.remove(place)
        self.look()

    def stored(self, uids: Collection[str]) -> None:
        """Let those try, out of turn, who bring some of these again: perhaps nothing else is new."""
        hashes = frozenset(map(hash, uids))
        for place in self._places:
            if not place.turn.done() and not place.uids.isdisjoint(hashes):
                place.turn.set_result(None)

    def look(self) -> None:
        """Room may have come: let the first try."""
        if self._places:
            place = self._places[0]
            if not place.turn.done() and self._may_go(place.shortage):
                place.turn.set_result(None)

    def describe(self) -> str:
        """Who waits for what, in words; empty when nobody does."""
        if not self._places:
            return ""
        first = self._places[0]
        num_bytes = sum(place.shortage.num_bytes for place in self._places)
        return (
            f"{len(self._places)} pushes of {num_bytes} bytes wait for room, the first for "
            f"{time.monotonic() - first.since:.1f} s: {first.shortage.words}"
        )
