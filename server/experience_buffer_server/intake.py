"""Whether a buffer takes more in: its room, its consumers' limiters, and the pacing of new tasks.

Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from experience_buffer import errors
from experience_buffer_server.admission import Candidate, check_uid
from experience_buffer_server.buffer_settings import BufferSettings
from experience_buffer_server.consumers import Consumer
from experience_buffer_server.contents import Contents
from experience_buffer_server.eviction import Eviction
from experience_buffer_server.groups import group_key_of
from experience_buffer_server.metrics import Metrics
from experience_buffer_server.sampling.limiter import Answer, can_insert, largest_insert
from experience_buffer_server.sampling.pacing import Reservations, capacity

MAX_RESERVED_AT_ONCE = 10_000
DEFAULT_TTL_SECONDS = 3600.0
MAX_TTL_SECONDS = 7 * 86400.0
_LIMITER_DELAY_SECONDS = 0.1
"""Before a push is tried again that a limiter holds back: a batch may be sampled any moment."""
_PACING_DELAY_SECONDS = 1.0


class Owner(Protocol):
    """The buffer that is pushed to."""

    settings: BufferSettings

    @property
    def name(self) -> str:
        """Its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Which tasks may begin."""

    granted: list[str]
    reason: str = ""
    """Why these are fewer than asked for; empty when they aren't."""
    retry_delay_seconds: float = 0.0


class Intake:
    """Admits pushes and new tasks. Not thread-safe."""

    def __init__(
        self,
        owner: Owner,
        contents: Contents,
        consumers: Mapping[str, Consumer],
        eviction: Eviction,
        metrics: Metrics,
    ) -> None:
        self._owner = owner
        self._contents = contents
        self._consumers = consumers
        """A live view: the buffer's consumers now."""
        self._eviction = eviction
        self._metrics = metrics
        self._reservations = Reservations()

    @property
    def num_reserved(self) -> int:
        """Places of tasks of which nothing was pushed yet."""
        return len(self._reservations)

    # --- pushes

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
        keys = self._new_groups(candidates) if gated or self._reservations else []
        self._check_limiters(fresh, keys)
        self._check_pacing(fresh, keys)
        self._check_room(fresh)
        for key in keys:
            self._reservations.arrived(key)

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
            num_units = len(fresh) if consumer.settings.unit == "item" else len(keys)
            # Members of a group that is there already complete it: nothing is gained by waiting.
            answer = self._can_insert(consumer, num_units, num_bytes) if num_units else None
            if answer is None or answer.ok:
                continue
            self._metrics.push_refused(self._owner.name, answer.label)
            limiter = consumer.settings.limiter
            fits = limiter is not None and num_units <= largest_insert(limiter.plan)
            raise errors.ResourceExhaustedError(
                f"buffer {self._owner.name!r} waits for its consumer {consumer.name!r} to sample: "
                f"{answer.reason}",
                subject=consumer.name,
                retry_delay_seconds=_LIMITER_DELAY_SECONDS if fits else None,
            )

    def _can_insert(self, consumer: Consumer, num_units: int, num_bytes: int) -> Answer | None:
        limiter = consumer.settings.limiter
        if limiter is None:
            return None
        counts = consumer.tally.counts(num_present=self._num_units(consumer))
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
        if settings.on_full == "evict" and (over_items > 0 or over_bytes > 0):
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

    # --- new tasks

    def _check_pacing(self, fresh: Sequence[Candidate], keys: Sequence[str]) -> None:
        pacing = self._owner.settings.pacing
        if pacing is None:
            return
        grouped = self._consumers[pacing.consumer].settings.unit == "group"
        new = [key for key in keys if key not in self._reservations] if grouped else fresh
        free = self._capacity()
        if len(new) <= free:
            return
        self._metrics.push_refused(self._owner.name, "pacing")
        raise errors.ResourceExhaustedError(
            f"buffer {self._owner.name!r} admits {free} more {'groups' if grouped else 'items'}, "
            f"this push begins {len(new)}: {self._why_paced()}",
            subject=self._owner.name,
            retry_delay_seconds=_PACING_DELAY_SECONDS,
        )

    def reserve(self, keys: Iterable[str], *, now: float, ttl_seconds: float) -> Reserved:
        """Take places for tasks that are about to begin, as far as there are any.

        Raises:
            InvalidRequestError: A key that no group can have, or too many.
        """
        wanted = list(dict.fromkeys(keys))
        _check_keys(wanted)
        self._reservations.expire(now)
        if self._owner.settings.pacing is None:
            return Reserved(granted=wanted)
        granted = []
        for key in wanted:
            is_here = self._contents.groups.get(key) is not None
            if is_here or key in self._reservations or self._capacity() > 0:
                granted.append(key)
                if not is_here:
                    self._reservations.reserve(key, now=now, ttl_seconds=ttl_seconds)
        if len(granted) == len(wanted):
            return Reserved(granted=granted)
        self._metrics.push_refused(self._owner.name, "pacing")
        return Reserved(
            granted=granted, reason=self._why_paced(), retry_delay_seconds=_PACING_DELAY_SECONDS
        )

    def release(self, key: str) -> None:
        """A task was aborted before anything of it was pushed."""
        self._reservations.release(key)

    def tick(self, now: float) -> None:
        """Free the places of workers that haven't pushed in time."""
        self._reservations.expire(now)

    def _capacity(self) -> int:
        pacing = self._owner.settings.pacing
        assert pacing is not None
        num_unconsumed = self._num_unconsumed(pacing.consumer)
        return capacity(
            pacing.plan, num_unconsumed=num_unconsumed, num_reserved=len(self._reservations)
        )

    def _num_unconsumed(self, name: str) -> int:
        consumer = self._consumers[name]
        return self._num_units(consumer) - len(consumer.finished)

    def _why_paced(self) -> str:
        pacing = self._owner.settings.pacing
        assert pacing is not None
        return (
            f"{self._num_unconsumed(pacing.consumer)} are stored and not consumed by "
            f"{pacing.consumer!r}, {self.num_reserved} are reserved; with max_staleness "
            f"{pacing.max_staleness} and batch_size {pacing.batch_size} at most "
            f"{(pacing.max_staleness + 1) * pacing.batch_size} can be used in time"
        )

    # --- in words

    def describe(self, consumer: Consumer) -> str:
        """What keeps pushes from being accepted for this consumer's sake; empty when nothing does."""
        answer = self._can_insert(consumer, 1, 0)
        if answer is not None and not answer.ok:
            return answer.reason
        pacing = self._owner.settings.pacing
        if pacing is not None and pacing.consumer == consumer.name and not self._capacity():
            return self._why_paced()
        return ""


def _check_keys(keys: Sequence[str]) -> None:
    if len(keys) > MAX_RESERVED_AT_ONCE:
        raise errors.InvalidRequestError(
            f"{len(keys)} groups in one call, the limit is {MAX_RESERVED_AT_ONCE}; split them",
            subject="groups",
        )
    for key in keys:
        if problem := check_uid(key) if key else "it is empty":
            raise errors.InvalidRequestError(f"group key: {problem}", subject="groups")
