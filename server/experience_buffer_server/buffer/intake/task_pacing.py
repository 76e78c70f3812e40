"""The pacing of new tasks: places that workers reserve, and pushes that begin a task without one.

Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experience_buffer import errors
from experience_buffer_server.buffer.intake.placement import Forecast
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.contents import num_deliverable
from experience_buffer_server.buffer.state.entries import Candidate
from experience_buffer_server.buffer.state.group_keys import group_key, wrong_key
from experience_buffer_server.sampling.pacing import Reservations, capacity
from experience_buffer_server.settings.consumer import PacingSettings

MAX_RESERVED_AT_ONCE = 10_000
DEFAULT_TTL_SECONDS = 3600.0
MAX_TTL_SECONDS = 7 * 86400.0
_DELAY_SECONDS = 1.0
"""Before a push or a reservation is tried again that found no place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Which tasks may begin."""

    granted: list[str]
    reason: str = ""
    """Why these are fewer than asked for; empty when they aren't."""
    retry_delay_seconds: float = 0.0


class Pacing:
    """Admits new tasks. Not thread-safe."""

    def __init__(self, state: BufferState) -> None:
        self._state = state
        self.reservations = Reservations()
        """Places of tasks of which nothing was pushed yet."""

    def check(self, forecast: Forecast) -> None:
        """Refuse a push that begins more tasks than there are places for; there is a pacing.

        The rest of a group that was admitted must come, or it never completes and is never consumed.

        Args:
            forecast: Where what is new in it would go.

        Raises:
            ResourceExhaustedError: There are too few places.
        """
        pacing = self._plan
        grouped = self._state.consumers[pacing.consumer].settings.unit == "group"
        if grouped:
            # A place is for one group of a key.
            opened = forecast.opened.items()
            num_new = sum(count - (key in self.reservations) for key, count in opened)
        else:
            num_new = sum(
                not candidate.tombstone and self._task_key(candidate) not in self.reservations
                for candidate in forecast.opening
            )
        free = self._capacity()
        if num_new <= free:
            return
        self._state.metrics.push_refused(self._state.name, "pacing")
        unit = "groups" if grouped else "items"
        most = (pacing.max_staleness + 1) * pacing.batch_size
        can_wait = num_new <= most
        cure = "" if can_wait else f"; more than {most} are never admitted at once: split the push"
        raise errors.ResourceExhaustedError(
            f"buffer {self._state.name!r} admits {free} more {unit}, this push begins {num_new}: "
            f"{self._why()}{cure}",
            subject=self._state.name,
            retry_delay_seconds=_DELAY_SECONDS if can_wait else None,
        )

    def _task_key(self, candidate: Candidate) -> str:
        """What its place was reserved as; in a buffer without groups, its tid."""
        by = self._state.settings.group_by
        return group_key(candidate.eid, "task" if by == "none" else by)

    def arrived(self, candidates: Sequence[Candidate]) -> None:
        """A push was admitted: the places of its tasks are taken."""
        for candidate in candidates:
            self.reservations.arrived(self._task_key(candidate))

    # --- places

    def reserve(self, keys: Iterable[str], *, now: float, ttl_seconds: float) -> Reserved:
        """Take places for tasks that are about to begin, as far as there are any.

        Args:
            keys: The tasks.
            now: Seconds since the Unix epoch.
            ttl_seconds: How long a place is kept for a task of which nothing is pushed; 0: an hour.

        Raises:
            InvalidRequestError: A key that no group can have, or too many, or the time is out of
                bounds.
        """
        ttl_seconds = ttl_seconds or DEFAULT_TTL_SECONDS
        if not 0 < ttl_seconds <= MAX_TTL_SECONDS:
            raise errors.InvalidRequestError(
                f"ttl_seconds {ttl_seconds} must lie in (0, {MAX_TTL_SECONDS:g}]",
                subject="ttl_seconds",
            )
        wanted = list(dict.fromkeys(keys))
        if len(wanted) > MAX_RESERVED_AT_ONCE:
            raise errors.InvalidRequestError(
                f"{len(wanted)} groups in one call, the limit is {MAX_RESERVED_AT_ONCE}; split them",
                subject="groups",
            )
        for key in wanted:
            if problem := wrong_key(key, self._state.settings.group_by):
                raise errors.InvalidRequestError(problem, subject="groups")
        self.reservations.expire(now)
        if self._state.settings.pacing is None:
            return Reserved(granted=wanted)
        granted, free = [], self._capacity()
        for key in wanted:
            is_here = self._is_here(key)
            if is_here or key in self.reservations or free > 0:
                granted.append(key)
                if not is_here:
                    free -= self.reservations.reserve(key, now=now, ttl_seconds=ttl_seconds)
        if len(granted) == len(wanted):
            return Reserved(granted=granted)
        self._state.metrics.push_refused(self._state.name, "pacing")
        return Reserved(granted=granted, reason=self._why(), retry_delay_seconds=_DELAY_SECONDS)

    def _is_here(self, key: str) -> bool:
        """Whether what is pushed of a task finds its group, which was admitted."""
        group = self._state.contents.groups.get(key)
        opens_more = self._state.settings.late_members == "new_group"
        return group is not None and (group.is_open or not opens_more)

    @property
    def _plan(self) -> PacingSettings:
        pacing = self._state.settings.pacing
        assert pacing is not None
        return pacing

    def _capacity(self) -> int:
        plan = self._plan
        return capacity(
            max_staleness=plan.max_staleness,
            batch_size=plan.batch_size,
            max_running=plan.max_running,
            num_unconsumed=self._num_unconsumed(),
            num_reserved=len(self.reservations),
        )

    def _num_unconsumed(self) -> int:
        """Units that its consumer can still get; not those that wait for a decision or a version."""
        consumer = self._state.consumers[self._plan.consumer]
        idle = len(consumer.finished) + len(consumer.held) + len(consumer.quarantined)
        return num_deliverable(self._state.contents, consumer) - idle

    def _why(self) -> str:
        pacing = self._plan
        return (
            f"{self._num_unconsumed()} are stored and not consumed by "
            f"{pacing.consumer!r}, {len(self.reservations)} are reserved; with max_staleness "
            f"{pacing.max_staleness} and batch_size {pacing.batch_size} at most "
            f"{(pacing.max_staleness + 1) * pacing.batch_size} can be used in time"
        )

    def describe(self, consumer: Consumer) -> str:
        """Why no task is admitted for this consumer's sake; empty when some are."""
        pacing = self._state.settings.pacing
        if pacing is not None and pacing.consumer == consumer.name and not self._capacity():
            return self._why()
        return ""
