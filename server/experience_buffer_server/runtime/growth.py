"""How fast something grows, and when it will have reached a limit at that rate. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

_EVERY_SECONDS: Final = 5.0
_OVER_SECONDS: Final = 300.0
LEAST_SECONDS: Final = 30.0
"""A rate over less would be chance."""
_MOST_AHEAD_SECONDS: Final = 365 * 86400.0
"""What takes longer isn't worth a word: it is as good as standing still."""


class Growth:
    """A quantity over the last minutes. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def look(self, now: float, value: float) -> None:
        """Note the quantity; does nothing where it was noted a moment ago.

        Args:
            now: Seconds, of any clock that doesn't go back.
            value: What it is now.
        """
        seen = self._seen
        if seen and now - seen[-1][0] < _EVERY_SECONDS:
            return
        seen.append((now, value))
        while now - seen[0][0] > _OVER_SECONDS:
            seen.popleft()

    @property
    def per_second(self) -> float | None:
        """How fast it has grown, below 0 where it has shrunk; None: it isn't known for long enough."""
        if not self._seen:
            return None
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / (ended - began) if ended - began >= LEAST_SECONDS else None


def seconds_until(room: float, per_second: float | None) -> float | None:
    """When so much more has come at this rate; None where it doesn't grow, or takes more than a year."""
    if per_second is None or per_second <= 0:
        return None
    seconds = max(room, 0.0) / per_second
    return seconds if seconds <= _MOST_AHEAD_SECONDS else None
