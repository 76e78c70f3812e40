"""What a client says while no server answers: soon enough to be noticed, seldom enough to be read."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from experience_buffer.errors import ExperienceBufferError, UnavailableError

logger = logging.getLogger("experience_buffer")
FIRST_SECONDS: Final = 0.7
"""Without an answer before the first line: a server that is restarted on the spot isn't worth one."""
AGAIN_SECONDS: Final = 5.0
"""Between the lines after it."""


class Outage:
    """Tells that no server answers, and when one does again. Thread-safe.

    One per client: however many of its calls and streams wait, there is one line at a time.

    Args:
        address: Of the server, as the client was given it.
        clock: Monotonic seconds.
    """

    def __init__(self, address: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._clock = clock
        self._lock = threading.Lock()
        self._since: float | None = None
        """When the first call failed; None: a server answers, as far as is known."""
        self._due = 0.0
        self._is_told = False

    def waits(
        self, what: str, error: ExperienceBufferError, *, delay: float, seconds_left: float
    ) -> None:
        """Say, where it is time, that something failed and is tried again.

        Args:
            what: The verb, or the stream.
            error: Why it failed; nothing is said where a server answered.
            delay: Seconds until the next attempt.
            seconds_left: Until no other is made.
        """
        if not isinstance(error, UnavailableError):
            return
        with self._lock:
            now = self._clock()
            if self._since is None:
                self._since, self._due = now, now + FIRST_SECONDS
            # The next attempt would be too late to say it.
            if now + delay < self._due:
                return
            self._due, self._is_told = now + AGAIN_SECONDS, True
            passed = now - self._since
        end = datetime.now().astimezone() + timedelta(seconds=seconds_left)
        logger.warning(
            "no server answers at %s, for %.1f s now: %s waits for one until %s, %.0f s more: %s",
            self._address,
            passed,
            what,
            end.strftime("%H:%M:%S"),
            seconds_left,
            " ".join(str(error).split()),
        )

    def ended(self) -> None:
        """A server answered."""
        if self._since is None:
            return
        with self._lock:
            since, is_told = self._since, self._is_told
            self._since, self._is_told = None, False
        if since is not None and is_told:
            passed = self._clock() - since
            logger.warning("the server at %s answers again, after %.1f s", self._address, passed)
