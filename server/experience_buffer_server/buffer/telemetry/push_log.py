"""Who pushed what lately, by runs of arrival numbers: not a byte per experience. Pure."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

MOST_RUNS: Final = 10_000
"""Pushes of different callers that are remembered, at least; up to twice as many."""


class PushLog:
    """The last pushes to one buffer. Not thread-safe."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        """First arrival number of each run, ascending."""
        self._runs: list[tuple[int, str]] = []
        """Last arrival number, and who pushed."""

    def pushed(self, first: int, last: int, who: str) -> None:
        """Experiences of these arrival numbers, larger than all before, came from somebody."""
        if self._runs and self._runs[-1][1] == who:
            # What lies in between was given to nobody's experience.
            self._runs[-1] = (last, who)
            return
        self._firsts.append(first)
        self._runs.append((last, who))
        if len(self._runs) >= 2 * MOST_RUNS:
            del self._firsts[:MOST_RUNS], self._runs[:MOST_RUNS]

    def who(self, seq: int) -> str:
        """Who pushed an experience; empty where that isn't known any more."""
        place = bisect_right(self._firsts, seq) - 1
        if place < 0:
            return ""
        last, who = self._runs[place]
        return who if seq <= last else ""
