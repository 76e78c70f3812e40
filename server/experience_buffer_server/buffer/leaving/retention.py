"""What leaves a buffer by itself: units that are too old, or of a policy version too far behind.

A unit is a whole group where there are groups. Its age is that of its oldest member, its version the
lowest of its members, as for the staleness of consumers. An open group leaves by age alone, and is
dropped as a whole. What is leased, being computed or changed, kept for a rewind, or brought back by
one and not consumed since, stays, and leaves soon after that ends.

The work of a tick is bounded and grows with what is due, not with what is stored: arrivals are in
the order of their age, versions have an index, and what is due and can't leave is looked at again
about once a second. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from experience_buffer_server.buffer.delivery.offers import Offers
from experience_buffer_server.buffer.leaving.group_closing import Grouping
from experience_buffer_server.buffer.leaving.removal import (
    Parked,
    Removal,
    is_held,
    members_of,
    unit_key,
)
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.departure import Cause
from experience_buffer_server.buffer.state.entries import Entry, age_of
from experience_buffer_server.runtime.tuning import TUNING
from experience_buffer_server.sampling.staleness import why_stale
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.settings.buffer import RetentionSettings

Reason = Literal["", "aged", "outdated"]
"""Why a unit is to leave, a label of the metrics; empty: it isn't."""


@dataclass(slots=True)
class _Round:
    """What was looked at in one go, and what of it is to leave."""

    now: float
    num_members: int = 0
    """Experiences that were looked at."""
    num_leaving: int = 0
    """Experiences that leave, with open groups too."""
    leaving: dict[Reason, dict[int, list[Entry]]] = field(
        default_factory=lambda: {"aged": {}, "outdated": {}}
    )
    """By reason and number, the members of the units that aren't open groups."""

    @property
    def is_over(self) -> bool:
        return (
            self.num_members >= TUNING.members_per_tick
            or self.num_leaving >= TUNING.leaving_per_tick
        )


class Retention:
    """Removes what has been stored for too long. Not thread-safe."""

    def __init__(
        self, state: BufferState, offers: Offers, removal: Removal, grouping: Grouping
    ) -> None:
        self._state = state
        self._contents = state.contents
        self._offers = offers
        self._removal = removal
        self._grouping = grouping
        self._retention: RetentionSettings | None = None
        """What is too old, or too far behind; None: everything stays."""
        self._last_seen = 0
        """Seq up to which all are leaving by their age, parked, or have left."""
        self._parked = Parked()
        """Units that are due and can't leave yet."""
        self._withheld: set[int] = set()
        """Those of them that aren't offered any more because they are due."""

    def settings_changed(self) -> None:
        """Begin anew with what there is; what was to leave and couldn't is offered as ever."""
        for key in self._parked:
            self._keep(key, members_of(self._state, key))
        self._parked.clear()
        self._withheld.clear()
        self._last_seen = 0
        self._retention = self._state.settings.retention

    def tick(self, now: float) -> None:
        """Let some of what is due leave: the oldest, the most outdated, and what was stuck longest."""
        if self._retention is None:
            return
        self._end_deserted(now)
        fresh = itertools.chain(
            itertools.islice(self._aged(now), TUNING.aged_looks_per_tick),
            itertools.islice(self._outdated(), TUNING.aged_looks_per_tick),
        )
        parked = itertools.islice(self._parked.take_due(now), TUNING.parked_looks_per_tick)
        keys = itertools.chain(
            # A group has several of these, and most are parked with the first.
            (key for entry in fresh if (key := unit_key(entry)) not in self._parked),
            parked,
        )
        this = _Round(now)
        seen: set[int] = set()
        # What isn't looked at stays where it is: the next tick finds it there.
        for key in keys:
            if key not in seen:
                seen.add(key)
                self._look(key, this)
            if this.is_over:
                break
        self._remove(this)

    def _end_deserted(self, now: float) -> None:
        """Drop open groups beyond the age whose members were all consumed: no entry tells of them."""
        retention = self._state.settings.retention
        if retention is None or retention.max_age_seconds is None:
            return
        for group in self._contents.groups.take_deserted(TUNING.aged_looks_per_tick):
            if now - group.row.open_time > retention.max_age_seconds:
                self._grouping.expire_open(group, self._limit("aged"), "aged")

    def _aged(self, now: float) -> Iterator[Entry]:
        """Entries beyond the age, each once, the oldest first."""
        retention = self._state.settings.retention
        if retention is None or retention.max_age_seconds is None:
            return
        for entry in self._contents.since(self._last_seen):
            if now - entry.record.push_time <= retention.max_age_seconds:
                return
            self._last_seen = entry.record.seq
            yield entry

    def _outdated(self) -> Iterator[Entry]:
        """Entries beyond the lag, each once, the most outdated first."""
        retention, published = self._state.settings.retention, self._state.row.policy_version
        if retention is None or retention.max_lag is None or published is None:
            return
        for seq in self._contents.versions.take_below(published - retention.max_lag):
            if (entry := self._contents.by_seq(seq)) is not None:
                yield entry

    # --- units that come back from a lease

    def mark(self, units: Iterable[Unit], now: float) -> None:
        """Leases of these units end: those that are due aren't to be offered again."""
        if self._retention is None:
            return
        known: dict[int, bool] = {}
        for unit in units:
            entries = self._contents.by_seqs(unit.seqs)
            if not entries or any(entry.leaving for entry in entries):
                continue
            key = unit_key(entries[0])
            if key not in known:
                members = members_of(self._state, key)
                is_kept = self._is_kept(members)
                if is_kept:
                    self._offer_withheld(key, members)
                known[key] = not is_kept and self._is_due(members, now)
            unit.gone = unit.gone or known[key]

    def take(self, units: Sequence[Unit], now: float) -> list[Unit]:
        """Take care of those of the units that nobody is to get any more because they are due.

        Returns:
            The others.
        """
        if self._retention is None:
            return list(units)
        returned: dict[int, None] = {}
        others = []
        for unit in units:
            entries = [e for e in self._contents.by_seqs(unit.seqs) if e.is_staying]
            key = unit_key(entries[0]) if entries else 0
            if entries and self._is_due(members_of(self._state, key), now):
                returned[key] = None
            else:
                others.append(unit)
        this = _Round(now)
        for key in returned:
            self._withheld.add(key)
            if this.is_over:
                self._parked.add(key, now)
            else:
                self._parked.pop(key, None)
                self._look(key, this)
        self._remove(this)
        return others

    # --- what is due

    def _look(self, key: int, this: _Round) -> None:
        """Choose a unit that is due and that nobody holds; park one that somebody does."""
        members = members_of(self._state, key)
        this.num_members += len(members)
        held = is_held(self._state, members)
        if held and (key not in self._withheld or self._is_kept(members)):
            # It is judged when it can leave, which takes longer than to see that it can't.
            self._offer_withheld(key, members)
            self._parked.add(key, this.now)
            return
        why = self._why(members, this.now)
        is_open = bool(members) and members[0].group is not None and members[0].group.is_open
        if not why:
            self._keep(key, members)
        elif held or (is_open and why != "aged"):
            self._parked.add(key, this.now)
            return
        elif is_open and (group := members[0].group) is not None:
            self._grouping.expire_open(group, self._limit(why), why)
            this.num_leaving += len(members)
        else:
            this.leaving[why][key] = list(members)
            this.num_leaving += len(members)
        self._withheld.discard(key)

    def _remove(self, this: _Round) -> None:
        for why, units in this.leaving.items():
            if units:
                entries = [entry for members in units.values() for entry in members]
                self._removal.remove_now(
                    entries,
                    Cause(why, self._limit(why)),
                    partial(self._gone, why, entries),
                    partial(self._stay, list(units), this.now),
                )

    def _gone(self, why: Reason, entries: Sequence[Entry]) -> None:
        count = sum(not entry.record.tombstone for entry in entries)
        self._state.metrics.dropped(self._state.name, why, count)

    def _stay(self, keys: Sequence[int], now: float) -> None:
        for key in keys:
            self._parked.add(key, now)

    def _keep(self, key: int, members: Sequence[Entry]) -> None:
        """A unit isn't due after all: an older policy was published again, or settings changed."""
        for entry in members:
            self._contents.add_version(entry)
        self._offer_withheld(key, members)

    def _is_kept(self, members: Sequence[Entry]) -> bool:
        """Whether a rewind may bring any of it back, or has and it wasn't consumed since."""
        return any(self._state.is_wanted(entry) for entry in members)

    def _offer_withheld(self, key: int, members: Sequence[Entry]) -> None:
        """A unit may stay for long: what came back of it is offered, as it would be after a restart."""
        if key in self._withheld:
            self._withheld.discard(key)
            self._offers.offer_again(members)

    def _why(self, members: Sequence[Entry], now: float) -> Reason:
        settings = self._retention
        if not members or settings is None:
            return ""
        age, published = age_of(members), self._state.row.policy_version
        if why_stale(age, max_age_seconds=settings.max_age_seconds, published=published, now=now):
            return "aged"
        is_outdated = why_stale(age, max_lag=settings.max_lag, published=published, now=now)
        return "outdated" if is_outdated else ""

    def _is_due(self, members: Sequence[Entry], now: float) -> bool:
        """Whether a unit is to leave as it is now; an open group isn't for its version."""
        why = self._why(members, now)
        is_open = bool(why) and members[0].group is not None and members[0].group.is_open
        return why == "aged" if is_open else bool(why)

    def _limit(self, why: Reason) -> str:
        retention = self._state.settings.retention
        assert retention is not None
        if why == "aged":
            return f"older than retention.max_age_seconds = {retention.max_age_seconds:g}"
        return f"further behind than retention.max_lag = {retention.max_lag}"
