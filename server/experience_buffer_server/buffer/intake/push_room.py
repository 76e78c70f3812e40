"""Whether a buffer takes a push in now: its room, its consumers' limiters, its pacing; and the line.

Only what a lack of room holds back waits in line, first come, first served. What a limiter or the
pacing holds back is told to come again: it holds back some pushes and not others, and those that
complete groups, behind it in one line, would be what it waits for.

A push that waits holds its request (see `quotas`) and nothing of the store or of what was read.
Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from experience_buffer import errors
from experience_buffer_server.buffer.intake.placement import Forecast, completing
from experience_buffer_server.buffer.intake.task_pacing import Pacing
from experience_buffer_server.buffer.leaving.eviction import Eviction
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.contents import num_deliverable
from experience_buffer_server.buffer.state.entries import Candidate
from experience_buffer_server.sampling.limiter import Answer, can_insert
from experience_buffer_server.store.interface import StoreFullError

_LIMITER_DELAY_SECONDS = 0.1
"""Before a push is tried again that a limiter holds back: a batch may be sampled any moment."""
MAX_TOMBSTONES = 1_000_000
"""Failed rollouts stored at once, in a buffer."""
_FULL_DELAY_SECONDS = 1.0
"""Before a push is tried again that found the buffer full, its line too long, or the server stopping."""


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


class PushRoom:
    """Lets the pushes of one buffer in. Not thread-safe."""

    def __init__(self, state: BufferState, eviction: Eviction, pacing: Pacing) -> None:
        self._state = state
        self._contents = state.contents
        self._eviction = eviction
        self._pacing = pacing
        self._places: deque[Place] = deque()

    @property
    def num_waiting(self) -> int:
        """Pushes in line."""
        return len(self._places)

    def check(self, forecast: Forecast, place: Place | None, *, may_wait: bool) -> Shortage | None:
        """Refuse a push as a whole when the buffer takes no more, or make room for it.

        What only completes groups that have room already always has it (`placement.completing`).

        Args:
            forecast: Where what is new in it would go.
            place: Where it stands in line; None: it has just come.
            may_wait: It can wait in line for room, where the settings say so.

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
        num_bytes = sum(len(candidate.payload) for candidate in fresh)
        self._check_limiters(fresh, num_bytes, forecast)
        if self._state.settings.pacing is not None:
            self._pacing.check(forecast)
        self._check_tombstones(len(candidates) - len(fresh))
        may_wait = may_wait and self._state.settings.on_full == "block"
        shortage = self._check_room(forecast, len(fresh), num_bytes, may_wait=may_wait)
        is_last = may_wait and fresh and self._places and self._places[0] != place
        if shortage is None and is_last and not self._only_completes(forecast):
            shortage = Shortage("line", "others came earlier", len(fresh), num_bytes)
        if shortage is None and self._pacing.reservations:
            self._pacing.arrived(candidates)
        return shortage

    # --- limiters

    def _check_limiters(
        self, fresh: Sequence[Candidate], num_bytes: int, forecast: Forecast
    ) -> None:
        for consumer in self._state.consumers.values():
            if consumer.settings.limiter is None:
                continue
            num_units = self._num_new_units(consumer, fresh, forecast)
            answer = self._can_insert(consumer, num_units, num_bytes) if num_units else None
            if answer is None or answer.ok:
                continue
            self._state.metrics.push_refused(self._state.name, answer.label)
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

    # --- room

    def _check_tombstones(self, num_new: int) -> None:
        """Those count neither as items nor as bytes, and take memory all the same."""
        have = len(self._contents) - self._contents.num_items
        if num_new and have + num_new > MAX_TOMBSTONES:
            raise self._full(
                "max_tombstones",
                f"buffer {self._state.name!r} holds {have} tombstones, {num_new} more exceed the "
                f"limit of {MAX_TOMBSTONES}; complete or drop their groups",
            )

    def _fits(self, num_items: int, num_bytes: int) -> bool:
        """Whether so many would have room if there were nothing else."""
        settings = self._state.settings
        return num_items <= (settings.max_items or num_items) and num_bytes <= settings.max_bytes

    def _over(self, num_items: int, num_bytes: int) -> tuple[int, int]:
        """By how much so many more would exceed max_items and max_bytes; 0 or less: there is room."""
        settings, contents = self._state.settings, self._contents
        over_items = contents.num_items + num_items - self._eviction.num_items
        over_bytes = contents.num_bytes + num_bytes - self._eviction.num_bytes
        over_items -= settings.max_items or over_items
        over_bytes -= settings.max_bytes
        return over_items if num_items else 0, over_bytes if num_bytes else 0

    def _only_completes(self, forecast: Forecast) -> bool:
        return len(completing(self._state, forecast)) == len(forecast.joining)

    def _check_room(
        self, forecast: Forecast, num_items: int, num_bytes: int, *, may_wait: bool
    ) -> Shortage | None:
        settings, contents = self._state.settings, self._contents
        fits = self._fits(num_items, num_bytes)
        over_items, over_bytes = self._over(num_items, num_bytes)
        if over_items <= 0 and over_bytes <= 0:
            return None
        completes = self._only_completes(forecast)
        if settings.on_full == "evict" and fits:
            # As much as it brings: what a lowered limit has left beyond it goes by the clock.
            over_items, over_bytes = min(over_items, num_items), min(over_bytes, num_bytes)
            # What completes a group doesn't tear another one.
            stay = None if completes else {key for key in forecast.keys if key is not None}
            freed = self._eviction.make_room(over_items, over_bytes, but_for=stay)
            over_items, over_bytes = over_items - freed.num_items, over_bytes - freed.num_bytes
        if completes:
            return None
        for what, limit, over, new, have in (
            ("max_items", settings.max_items, over_items, num_items, contents.num_items),
            ("max_bytes", settings.max_bytes, over_bytes, num_bytes, contents.num_bytes),
        ):
            # One that can't fit is told what it doesn't fit into, whatever else there is no room in.
            if new and over > 0 and (fits or new > (limit or new)):
                words = f"{have} + {new} exceed {what} = {limit}"
                shortage = Shortage(what, words, num_items, num_bytes)
                if may_wait and fits:
                    return shortage
                raise self._refusal(shortage, fits=fits)
        return None

    def _refusal(
        self, shortage: Shortage, *, fits: bool = True, waited_seconds: float = 0.0
    ) -> errors.BufferFullError:
        """What a push is refused with, counted.

        Args:
            shortage: What it lacks.
            fits: It would fit into an empty buffer.
            waited_seconds: How long it has waited.
        """
        what = "the limits" if shortage.label == "line" else shortage.label
        cure = self._cure()
        if not fits:
            is_one = shortage.num_items == 1
            cure = "one experience of this size never fits" if is_one else "split the push"
        waited = f" after {waited_seconds:.1f} s in line" if waited_seconds else ""
        return self._full(
            shortage.label,
            f"buffer {self._state.name!r} is full{waited}: {shortage.words}; {cure}, or raise {what}",
            can_wait=fits,
        )

    def _cure(self) -> str:
        """What makes room."""
        kept = sum(consumer.timeline.num_retained for consumer in self._state.consumers.values())
        num_open = len(self._contents.groups.open_groups)
        cure = "acknowledge batches or drop groups that can't complete"
        cure += f" ({num_open} are open)" if num_open else ""
        return cure + (
            f", declare a training step safe ({kept} are kept for a rewind)" if kept else ""
        )

    def _full(self, label: str, words: str, *, can_wait: bool = True) -> errors.BufferFullError:
        self._state.metrics.push_refused(self._state.name, label)
        delay = _FULL_DELAY_SECONDS if can_wait else None
        return errors.BufferFullError(words, subject=self._state.name, retry_delay_seconds=delay)

    # --- the line

    def join(self, shortage: Shortage, uids: Iterable[str]) -> Place:
        """Take the last place, with a push of these uids; `leave` follows, whatever happens.

        Raises:
            BufferFullError: The line is too long.
        """
        most = self._state.limits.max_waiting_pushes
        if len(self._places) >= most:
            raise self._full(
                "max_waiting_pushes",
                f"buffer {self._state.name!r} is full ({shortage.words}), and "
                f"{len(self._places)} pushes wait for room already: the limit "
                f"server.max_waiting_pushes is {most}",
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = Place(shortage, turn, time.monotonic(), frozenset(map(hash, uids)))
        self._places.append(place)
        self._state.metrics.push_wait_began(self._state.name, shortage.label)
        return place

    async def wait(self, place: Place, shortage: Shortage, patience: Patience) -> None:
        """Wait until there may be room for a push.

        Raises:
            BufferFullError: Its time is over before.
            UnavailableError: The server stops.
            BufferNotFoundError: The buffer was deleted.
        """
        place.shortage = shortage._replace(label=place.shortage.label)
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
                retry_delay_seconds=_FULL_DELAY_SECONDS,
            )
        if not place.turn.done():
            raise self._refusal(shortage, waited_seconds=time.monotonic() - place.since)
        if self._state.closed:
            raise errors.BufferNotFoundError(
                f"buffer {self._state.name!r} was deleted while the push waited for room",
                subject=self._state.name,
            )

    def leave(self, place: Place) -> None:
        """A push is stored, refused or given up: the next may have its turn."""
        seconds = time.monotonic() - place.since
        self._state.metrics.push_waited(self._state.name, place.shortage.label, seconds)
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

    def _may_go(self, shortage: Shortage) -> bool:
        """Whether a push that waits has reason to try again: there is room, or no waiting any more.

        Where the limits have become too small for it, it is to be refused: in line it would keep
        out those behind it.
        """
        if self._state.settings.on_full != "block" or self._state.closed:
            return True
        num_items, num_bytes = shortage.num_items, shortage.num_bytes
        return not self._fits(num_items, num_bytes) or max(self._over(num_items, num_bytes)) <= 0

    # --- in words

    def describe_line(self) -> str:
        """Who waits for what, in words; empty when nobody does."""
        if not self._places:
            return ""
        first = self._places[0]
        num_bytes = sum(place.shortage.num_bytes for place in self._places)
        return (
            f"{len(self._places)} pushes of {num_bytes} bytes wait for room, the first for "
            f"{time.monotonic() - first.since:.1f} s: {first.shortage.words}"
        )

    def describe_full(self) -> str:
        """What keeps pushes from being accepted for lack of room; empty when nothing does."""
        settings, contents = self._state.settings, self._contents
        # As large as they are on average.
        num_bytes = contents.num_bytes // max(contents.num_items, 1)
        over_items, over_bytes = self._over(1, num_bytes)
        if max(over_items, over_bytes) <= 0 or self._eviction.can_make_room:
            return ""
        have, limit = f"{contents.num_items} experiences", f"max_items = {settings.max_items}"
        if over_items <= 0:
            have, limit = f"{contents.num_bytes} bytes", f"max_bytes = {settings.max_bytes}"
        fate = "wait for room" if settings.on_full == "block" else "are refused"
        but = " that complete no open group" if settings.waits_for_groups else ""
        return f"the buffer is full: {have} of {limit}, pushes{but} {fate}; {self._cure()}"

    def describe(self, consumer: Consumer) -> str:
        """What keeps pushes from being accepted for this consumer's sake; empty when nothing does."""
        # As large as they are on average.
        num_bytes = self._contents.num_bytes // max(self._contents.num_items, 1)
        answer = self._can_insert(consumer, 1, num_bytes)
        if answer is not None and not answer.ok:
            return answer.reason
        return self._pacing.describe(consumer)


def refuse_full(state: BufferState, error: BaseException) -> None:
    """Say which buffer it was that found no room on the disk; other errors stay as they are.

    Raises:
        BufferFullError: It was that.
    """
    if isinstance(error, StoreFullError):
        raise errors.BufferFullError(
            f"buffer {state.name!r}: {error}", subject=state.name, retry_delay_seconds=5.0
        ) from error
