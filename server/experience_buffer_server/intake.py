"""Whether a buffer takes a push in: its room, its consumers' limiters, its pacing.

Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from experience_buffer import errors
from experience_buffer_server.admission import Candidate
from experience_buffer_server.buffer_settings import BufferSettings
from experience_buffer_server.consumers import Consumer
from experience_buffer_server.contents import Contents
from experience_buffer_server.eviction import Eviction
from experience_buffer_server.groups import group_key_of
from experience_buffer_server.metrics import Metrics
from experience_buffer_server.pacing import Pacing
from experience_buffer_server.sampling.limiter import Answer, can_insert

_LIMITER_DELAY_SECONDS = 0.1
"""Before a push is tried again that a limiter holds back: a batch may be sampled any moment."""


class Owner(Protocol):
    """The buffer that is pushed to."""

    settings: BufferSettings

    @property
    def name(self) -> str:
        """Its name."""


class Intake:
    """Admits pushes. Not thread-safe."""

    def __init__(
        self,
        owner: Owner,
        contents: Contents,
        consumers: Mapping[str, Consumer],
        eviction: Eviction,
        pacing: Pacing,
        metrics: Metrics,
    ) -> None:
        self._owner = owner
        self._contents = contents
        self._consumers = consumers
        """A live view: the buffer's consumers now."""
        self._eviction = eviction
        self._pacing = pacing
        self._metrics = metrics

    def check(self, candidates: Sequence[Candidate]) -> None:
        """Refuse a push as a whole when the buffer takes no more, or make room for it.

        Raises:
            BufferFullError: No room, and none can be made.
            ResourceExhaustedError: A limiter or the pacing holds it back.
        """
        fresh = [candidate for candidate in candidates if not candidate.tombstone]
        if not candidates:
            return
        gated = self._owner.settings.pacing is not None or any(
            consumer.settings.limiter is not None for consumer in self._consumers.values()
        )
        keys = self._new_groups(candidates) if gated or self._pacing.num_reserved else []
        self._check_limiters(fresh, keys)
        self._pacing.check(fresh, keys)
        self._check_room(fresh)
        self._pacing.arrived(candidates)

    def _new_groups(self, candidates: Sequence[Candidate]) -> list[str]:
        """Keys of the groups that the push would open, each once."""
        if self._owner.settings.group_by == "none":
            return []
        by = self._owner.settings.group_by
        keys = dict.fromkeys(group_key_of(candidate.eid, by) for candidate in candidates)
        return [key for key in keys if self._contents.groups.get(key) is None]

    def _check_limiters(self, fresh: Sequence[Candidate], keys: Sequence[str]) -> None:
        num_bytes = sum(len(candidate.payload) for candidate in fresh)
        for consumer in self._consumers.values():
            num_units = self._num_new_units(consumer, fresh, keys)
            answer = self._can_insert(consumer, num_units, num_bytes) if num_units else None
            if answer is None or answer.ok:
                continue
            self._metrics.push_refused(self._owner.name, answer.label)
            raise errors.ResourceExhaustedError(
                f"buffer {self._owner.name!r} waits for its consumer {consumer.name!r} to sample: "
                f"{answer.reason}",
                subject=consumer.name,
                retry_delay_seconds=_LIMITER_DELAY_SECONDS if answer.can_wait else None,
            )

    def _num_new_units(
        self, consumer: Consumer, fresh: Sequence[Candidate], keys: Sequence[str]
    ) -> int:
        """Units that the push brings a consumer.

        Members of a group that is there already complete it: until they come nothing of it can be
        sampled, so nothing is gained by waiting.
        """
        if consumer.settings.unit == "group":
            return len(keys)
        if not self._owner.settings.needs_groups:
            return len(fresh)
        new, by = set(keys), self._owner.settings.group_by
        return sum(group_key_of(candidate.eid, by) in new for candidate in fresh)

    def _can_insert(self, consumer: Consumer, num_units: int, num_bytes: int) -> Answer | None:
        limiter = consumer.settings.limiter
        if limiter is None:
            return None
        counts = consumer.counts(num_present=self._num_units(consumer))
        return can_insert(limiter.plan, counts, num_units, num_bytes)

    def _num_units(self, consumer: Consumer) -> int:
        """The consumer's units in the buffer, also those that aren't whole or computed yet."""
        if consumer.settings.unit == "item":
            return self._contents.num_items
        return len(self._contents.groups)

    def _check_room(self, fresh: Sequence[Candidate]) -> None:
        settings, contents = self._owner.settings, self._contents
        num_bytes = sum(len(candidate.payload) for candidate in fresh)
        over_items = contents.num_items + len(fresh) - self._eviction.num_items
        over_bytes = contents.num_bytes + num_bytes - self._eviction.num_bytes
        over_items -= settings.max_items or over_items
        over_bytes -= settings.max_bytes
        fits = len(fresh) <= (settings.max_items or len(fresh)) and num_bytes <= settings.max_bytes
        if settings.on_full == "evict" and fits and (over_items > 0 or over_bytes > 0):
            freed = self._eviction.make_room(over_items, over_bytes)
            over_items, over_bytes = over_items - freed.num_items, over_bytes - freed.num_bytes
        for what, over, new, have in (
            ("max_items", over_items, len(fresh), contents.num_items),
            ("max_bytes", over_bytes, num_bytes, contents.num_bytes),
        ):
            if new and over > 0:
                self._refuse_as_full(what, have, new)

    def _refuse_as_full(self, what: str, have: int, new: int) -> None:
        limit = getattr(self._owner.settings, what)
        self._metrics.push_refused(self._owner.name, what)
        cure = "acknowledge batches or drop groups that can't complete" + self._retained()
        cure = cure if new <= limit else "split the push"
        raise errors.BufferFullError(
            f"buffer {self._owner.name!r} is full: {have} + {new} exceed {what} = {limit}; "
            f"{cure}, or raise {what}",
            subject=self._owner.name,
            retry_delay_seconds=1.0 if new <= limit else None,
        )

    def _retained(self) -> str:
        kept = sum(consumer.timeline.num_retained for consumer in self._consumers.values())
        return f", declare a step safe ({kept} are kept for a rewind)" if kept else ""

    # --- in words

    def describe(self, consumer: Consumer) -> str:
        """What keeps pushes from being accepted for this consumer's sake; empty when nothing does."""
        answer = self._can_insert(consumer, 1, 0)
        if answer is not None and not answer.ok:
            return answer.reason
        return self._pacing.describe(consumer)
