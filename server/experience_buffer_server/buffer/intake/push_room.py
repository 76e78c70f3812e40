"""Whether a buffer takes a push in: its room, its consumers' limiters, its pacing.

Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from experience_buffer import errors
from experience_buffer_server.buffer.intake.placement import Forecast
from experience_buffer_server.buffer.intake.push_queue import Shortage
from experience_buffer_server.buffer.intake.task_pacing import Pacing
from experience_buffer_server.buffer.leaving.eviction import Eviction
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.entries import Candidate
from experience_buffer_server.buffer.state.units import num_deliverable
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.sampling.limiter import Answer, can_insert

_LIMITER_DELAY_SECONDS = 0.1
"""Before a push is tried again that a limiter holds back: a batch may be sampled any moment."""
MAX_TOMBSTONES = 1_000_000
"""Failed rollouts stored at once, in a buffer."""
_FULL_DELAY_SECONDS = 1.0
"""Before a push is tried again that found the buffer full."""


class Intake:
    """Admits pushes. Not thread-safe."""

    def __init__(
        self,
        state: BufferState,
        eviction: Eviction,
        pacing: Pacing,
        metrics: Metrics,
    ) -> None:
        self._state = state
        self._contents = state.contents
        self._consumers = state.consumers
        self._eviction = eviction
        self._pacing = pacing
        self._metrics = metrics

    def check(
        self, forecast: Forecast, *, may_wait: bool = False, is_behind: bool = False
    ) -> Shortage | None:
        """Refuse a push as a whole when the buffer takes no more, or make room for it.

        Args:
            forecast: Where what is new in it would go.
            may_wait: It can wait in line for room, where the settings say so.
            is_behind: Others that came earlier wait already.

        Returns:
            What it has to wait for; None when it is admitted.

        Raises:
            BufferFullError: No room, and none can be made or waited for.
            ResourceExhaustedError: A limiter or the pacing holds it back.
        """
        candidates = forecast.joining
        if not candidates:
            return None
        fresh = [candidate for candidate in candidates if not candidate.tombstone]
        self._check_limiters(fresh, forecast)
        self._pacing.check(forecast)
        self._check_tombstones(len(candidates) - len(fresh))
        may_wait = may_wait and self._state.settings.on_full == "block"
        shortage = self._check_room(fresh, may_wait=may_wait, is_behind=may_wait and is_behind)
        if shortage is None:
            self._pacing.arrived(candidates)
        return shortage

    def may_go(self, shortage: Shortage) -> bool:
        """Whether a push that waits has reason to try again: there is room, or no waiting any more.

        Where the limits have become too small for it, it is to be refused: in line it would keep
        out those behind it.
        """
        if self._state.settings.on_full != "block" or self._state.closed:
            return True
        if not self._fits(shortage.num_items, shortage.num_bytes):
            return True
        return not any(over > 0 for _, over in self._over(shortage.num_items, shortage.num_bytes))

    def _check_limiters(self, fresh: Sequence[Candidate], forecast: Forecast) -> None:
        num_bytes = sum(len(candidate.payload) for candidate in fresh)
        for consumer in self._consumers.values():
            if consumer.settings.limiter is None:
                continue
            num_units = self._num_new_units(consumer, fresh, forecast)
            answer = self._can_insert(consumer, num_units, num_bytes) if num_units else None
            if answer is None or answer.ok:
                continue
            self._metrics.push_refused(self._state.name, answer.label)
            raise errors.ResourceExhaustedError(
                f"buffer {self._state.name!r} waits for its consumer {consumer.name!r} to sample: "
                f"{answer.reason}",
                subject=consumer.name,
                retry_delay_seconds=_LIMITER_DELAY_SECONDS if answer.can_wait else None,
            )

    def _num_new_units(
        self, consumer: Consumer, fresh: Sequence[Candidate], forecast: Forecast
    ) -> int:
        """Units that the push brings a consumer.

        Members of a group that is there already complete it: until they come nothing of it can be
        sampled, so nothing is gained by waiting.
        """
        if consumer.settings.unit == "group":
            return sum(forecast.opened.values())
        if not self._state.settings.needs_groups:
            return len(fresh)
        return sum(not candidate.tombstone for candidate in forecast.opening)

    def _can_insert(self, consumer: Consumer, num_units: int, num_bytes: int) -> Answer | None:
        limiter = consumer.settings.limiter
        if limiter is None:
            return None
        counts = consumer.counts(num_present=num_deliverable(self._contents, consumer))
        return can_insert(limiter.plan, counts, num_units, num_bytes)

    def _check_tombstones(self, num_new: int) -> None:
        """Those count neither as items nor as bytes, and take memory all the same."""
        have = len(self._contents) - self._contents.num_items
        if num_new and have + num_new > MAX_TOMBSTONES:
            self._metrics.push_refused(self._state.name, "max_tombstones")
            raise errors.BufferFullError(
                f"buffer {self._state.name!r} holds {have} tombstones, {num_new} more exceed the "
                f"limit of {MAX_TOMBSTONES}; complete or drop their groups",
                subject=self._state.name,
                retry_delay_seconds=_FULL_DELAY_SECONDS,
            )

    def _fits(self, num_items: int, num_bytes: int) -> bool:
        """Whether so many would have room if there were nothing else."""
        settings = self._state.settings
        return num_items <= (settings.max_items or num_items) and num_bytes <= settings.max_bytes

    def _over(self, num_items: int, num_bytes: int) -> tuple[tuple[str, int], tuple[str, int]]:
        """By how much so many more would exceed each limit; 0 or less: there is room."""
        settings, contents = self._state.settings, self._contents
        over_items = contents.num_items + num_items - self._eviction.num_items
        over_bytes = contents.num_bytes + num_bytes - self._eviction.num_bytes
        over_items -= settings.max_items or over_items
        over_bytes -= settings.max_bytes
        return (
            ("max_items", over_items if num_items else 0),
            ("max_bytes", over_bytes if num_bytes else 0),
        )

    def _check_room(
        self, fresh: Sequence[Candidate], *, may_wait: bool, is_behind: bool
    ) -> Shortage | None:
        settings, contents = self._state.settings, self._contents
        num_bytes = sum(len(candidate.payload) for candidate in fresh)
        fits = self._fits(len(fresh), num_bytes)
        (_, over_items), (_, over_bytes) = self._over(len(fresh), num_bytes)
        if settings.on_full == "evict" and fits and (over_items > 0 or over_bytes > 0):
            # As much as it brings: what a lowered limit has left beyond it goes by the clock.
            over_items, over_bytes = min(over_items, len(fresh)), min(over_bytes, num_bytes)
            freed = self._eviction.make_room(over_items, over_bytes)
            over_items, over_bytes = over_items - freed.num_items, over_bytes - freed.num_bytes
        for what, over, new, have in (
            ("max_items", over_items, len(fresh), contents.num_items),
            ("max_bytes", over_bytes, num_bytes, contents.num_bytes),
        ):
            limit = getattr(settings, what)
            # One that can't fit is told what it doesn't fit into, whatever else there is no room in.
            if new and over > 0 and (fits or new > (limit or new)):
                words = f"{have} + {new} exceed {what} = {limit}"
                shortage = Shortage(what, words, len(fresh), num_bytes)
                if may_wait and fits:
                    return shortage
                raise self.refusal(shortage, fits=fits)
        if is_behind and fresh:
            return Shortage("line", "others came earlier", len(fresh), num_bytes)
        return None

    def refusal(
        self, shortage: Shortage, *, fits: bool = True, waited_seconds: float = 0.0
    ) -> errors.BufferFullError:
        """What a push is refused with, counted.

        Args:
            shortage: What it lacks.
            fits: It would fit into an empty buffer.
            waited_seconds: How long it has waited.
        """
        self._metrics.push_refused(self._state.name, shortage.label)
        what = "the limits" if shortage.label == "line" else shortage.label
        cure = "acknowledge batches or drop groups that can't complete" + self._retained()
        cure = cure if fits else "split the push"
        waited = f" after {waited_seconds:.1f} s in line" if waited_seconds else ""
        return errors.BufferFullError(
            f"buffer {self._state.name!r} is full{waited}: {shortage.words}; {cure}, or raise {what}",
            subject=self._state.name,
            retry_delay_seconds=_FULL_DELAY_SECONDS if fits else None,
        )

    def _retained(self) -> str:
        kept = sum(consumer.timeline.num_retained for consumer in self._consumers.values())
        return f", declare a step safe ({kept} are kept for a rewind)" if kept else ""

    # --- in words

    def describe(self, consumer: Consumer) -> str:
        """What keeps pushes from being accepted for this consumer's sake; empty when nothing does."""
        # As large as they are on average.
        num_bytes = self._contents.num_bytes // max(self._contents.num_items, 1)
        answer = self._can_insert(consumer, 1, num_bytes)
        if answer is not None and not answer.ok:
            return answer.reason
        return self._pacing.describe(consumer)
