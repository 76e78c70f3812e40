"""When a failed call is tried again. Pure: it says how long to wait and never waits."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from experience_buffer.errors import (
    DeadlineExceededError,
    ExperienceBufferError,
    ResourceExhaustedError,
    UnavailableError,
)
from experience_buffer.options import RetryOptions

_LEAST_SECONDS = 0.02
"""An attempt with less time ends without an answer, which says less than what failed before it."""


class Deadline:
    """An instant until which a call, perhaps of several requests, must end."""

    def __init__(self, timeout: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_time = clock()
        self._time = self._start_time + timeout

    def remaining(self) -> float:
        """Seconds left; a moment when it has passed."""
        return max(self._time - self._clock(), 0.001)


class Attempts(Deadline):
    """The attempts of one call, from the first until success, a final error, or the deadline.

    Args:
        options: Backoff times.
        timeout: Seconds that all attempts have together.
        clock: Monotonic seconds.
        jitter: Random numbers in [0, 1).
    """

    def __init__(
        self,
        options: RetryOptions,
        timeout: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(timeout, clock=clock)
        self._options = options
        self._jitter = jitter
        self._num_failed = 0
        self._num_unreachable = 0
        """Failures that the backoff grows by."""
        self._last_error: ExperienceBufferError | None = None

    def delay_after(self, error: ExperienceBufferError, *, idempotent: bool) -> float:
        """Seconds to wait before the next attempt.

        Args:
            error: What the last attempt failed with.
            idempotent: Doing the call twice is as good as doing it once. Otherwise it is tried
                again only when the server said, with a delay, that it did nothing.

        Raises:
            ExperienceBufferError: `error` itself, when another attempt can't help or comes too late.
        """
        self._num_failed += 1
        if not is_retryable(error, idempotent=idempotent):
            if isinstance(error, DeadlineExceededError) and self._last_error is not None:
                error.add_note(f"the attempt before failed with: {self._last_error}")
            raise error
        self._last_error = error
        delay = self._delay(error)
        last_attempt = 0 < self._options.max_attempts <= self._num_failed
        if last_attempt or self._clock() + delay > self._time - _LEAST_SECONDS:
            passed = self._clock() - self._start_time
            error.add_note(f"gave up after {self._num_failed} attempts in {passed:.1f} s")
            raise error
        return delay

    def _delay(self, error: ExperienceBufferError) -> float:
        asked = error.retry_delay_seconds or 0.0
        if asked and isinstance(error, ResourceExhaustedError):
            # The server is there and knows best. Whoever waited ever longer would find its place
            # taken each time by those who have just come; whoever waits less gains nothing.
            return asked * (1.0 + self._jitter())
        options = self._options
        # Both are bounded so that weeks of attempts don't overflow the float.
        growth = min(options.multiplier, 1000.0) ** min(self._num_unreachable, 64)
        backoff = options.initial_backoff_seconds * growth
        self._num_unreachable += 1
        delay = min(backoff, options.max_backoff_seconds) * (1.0 - 0.5 * self._jitter())
        return max(delay, asked)


def is_retryable(error: ExperienceBufferError, *, idempotent: bool) -> bool:
    """Whether the same call may succeed later without anyone changing it."""
    if error.retry_delay_seconds is not None:
        return isinstance(error, (UnavailableError, ResourceExhaustedError))
    return idempotent and isinstance(error, UnavailableError)
