"""The server's clock: seconds since the Unix epoch, and it never jumps.

Leases and deadlines are stored as instants, because they must outlive a restart. The wall clock
alone would end them early, or keep them for a day too long, whenever somebody sets it. So it is read
once, at the start, and time goes on from there by a clock that nobody can set.
"""

from __future__ import annotations

import logging
import math
import threading
import time

_log = logging.getLogger(__name__)

_TOLERATED_SECONDS = 1.0
"""Two clocks that are read one after the other may differ by as much."""


def _elapsed() -> float:
    """Seconds since the machine started, its sleep included where the system counts that."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class SteadyClock:
    """Goes on from where it is started. It can be shared between threads."""

    def __init__(self, *, wall_time: float, elapsed: float) -> None:
        """Start at an instant, seconds since the Unix epoch, when `elapsed` seconds had passed."""
        self._offset = wall_time - elapsed
        self._lock = threading.Lock()

    def now(self, elapsed: float) -> float:
        """The instant when `elapsed` seconds have passed."""
        return self._offset + elapsed

    def not_before(self, instant: float, elapsed: float) -> float:
        """Go on from an instant if that lies ahead; by how many seconds it did, else 0."""
        with self._lock:
            ahead = instant - self.now(elapsed)
            if not (math.isfinite(ahead) and ahead > 0):
                return 0.0
            self._offset += ahead
            return ahead


_clock = SteadyClock(wall_time=time.time(), elapsed=_elapsed())


def now() -> float:
    """This moment in seconds since the Unix epoch. It can be called from any thread."""
    return _clock.now(_elapsed())


def not_before(instant: float, *, what: str) -> None:
    """Never be earlier than an instant that is known to have passed: `what` happened then.

    A wall clock that was set back while no server ran would make every lease live longer by that.
    """
    ahead = _clock.not_before(instant, _elapsed())
    if ahead > _TOLERATED_SECONDS:
        _log.warning(
            "the machine's clock is %.0f s behind %s, and may have been set back; time goes on from "
            "there, so leases and deadlines hold for as long as they should",
            ahead,
            what,
        )
