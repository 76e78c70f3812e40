"""Making room in a full buffer: which units leave before anybody asked for it.

Whole groups leave where there are groups. Damaged units, which nobody can get, leave before all
others; open groups come last, the oldest first, and are dropped as a whole: where they fill the buffer,
nothing else makes room. What is leased, kept for a rewind or brought back by one, or on its way
somewhere stays. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

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
from experience_buffer_server.buffer.state.entries import Entry, Group, value_of
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.tuning import TUNING
from experience_buffer_server.sampling.selectors import Selector
from experience_buffer_server.sampling.units import Unit

_SHED_BYTES_PER_TICK = 1 << 30
_WHY = "the buffer was full"


@dataclass(slots=True)
class Freed:
    """What leaves."""

    num_items: int = 0
    num_bytes: int = 0

    def add(self, members: Iterable[Entry]) -> None:
        """These leave, too."""
        votes = [entry.record for entry in members if not entry.record.tombstone]
        self.num_items += len(votes)
        self.num_bytes += sum(record.payload_bytes for record in votes)

    def covers(self, num_items: int, num_bytes: int) -> bool:
        """Whether it is as much."""
        return self.num_items >= num_items and self.num_bytes >= num_bytes


@dataclass(slots=True)
class _Chosen:
    """Units that are to leave together."""

    keys: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    freed: Freed = field(default_factory=Freed)
    num_damaged: int = 0
    """Experiences of damaged units, of those that are freed."""

    def add(self, key: int, members: Sequence[Entry]) -> None:
        self.keys.append(key)
        self.entries += members
        self.freed.add(members)
        if _is_damaged(members):
            self.num_damaged += sum(not entry.record.tombstone for entry in members)


class Eviction:
    """Chooses and removes units. Not thread-safe."""

    def __init__(self, state: BufferState, removal: Removal, grouping: Grouping) -> None:
        self._state = state
        self._contents = state.contents
        self._removal = removal
        self._grouping = grouping
        self._units: Selector | None = None
        """By number, the sound units that may be chosen."""
        self._damaged: dict[int, None] = {}
        """The same of damaged ones."""
        self._parked = Parked()
        """Those that couldn't leave when they were chosen: not looked at with every push."""
        self.num_items = 0
        """Experiences on their way out that still count as stored."""
        self.num_bytes = 0
        """Their payload bytes."""

    def settings_changed(self) -> None:
        """Begin anew with the units there are."""
        self._units = None
        self._damaged.clear()
        self._parked.clear()
        if self._state.settings.on_full == "evict":
            self._units = self._state.settings.remover.make()
            self.stored(list(self._contents))

    def stored(self, entries: Sequence[Entry]) -> None:
        """Entries are on disk, and their groups are whole or will say so later."""
        if self._units is None:
            return
        for entry in entries:
            torn = entry.group is not None and not entry.group.is_whole
            if not (entry.record.tombstone or torn):
                self._put_back([unit_key(entry)])

    def revalue(self, entries: Sequence[Entry]) -> None:
        """What entries are chosen by has changed."""
        if self._units is None:
            return
        for key in {unit_key(entry) for entry in entries}:
            members = members_of(self._state, key)
            if key not in self._units or not members:
                continue
            if _is_damaged(members):
                self._units.remove(key)
                self._damaged[key] = None
            else:
                self._units.update(key, self._value(members))

    def returned(self, units: Iterable[Unit]) -> None:
        """Leases of these units end: those that couldn't leave because of them may be chosen."""
        if not self._parked:
            return
        for entry in self._contents.by_seqs(seq for unit in units for seq in unit.seqs):
            if (key := unit_key(entry)) in self._parked:
                self._put_back([key])

    def removed(self, entry: Entry) -> None:
        """An entry is about to be gone: with a unit's last, the unit."""
        if self._units is None or (entry.group is not None and len(entry.group.members) > 1):
            return
        key = unit_key(entry)
        if key in self._units:
            self._units.remove(key)
        self._damaged.pop(key, None)
        self._parked.pop(key, None)

    @property
    def can_make_room(self) -> bool:
        """Whether anything is known that may leave, if the settings let it."""
        groups = self._contents.groups
        return self._units is not None and bool(self._units or self._damaged or groups.open_groups)

    def make_room(
        self,
        num_items: int,
        num_bytes: int,
        *,
        partly: bool = False,
        but_for: Collection[str] | None = None,
    ) -> Freed:
        """Remove units until so many experiences and bytes are freed.

        They are on their way out when this returns. Where that can't be, or takes too many looks at
        units that can't leave, as many as can leave do with `partly`, but not many more than a tick may
        remove; else none.

        Args:
            num_items: Experiences.
            num_bytes: Their payload.
            partly: Less is better than nothing.
            but_for: Keys of open groups that stay; None: all of them.
        """
        chosen = self._choose(num_items, num_bytes, most=TUNING.shed_per_tick if partly else 0)
        freed = Freed(chosen.freed.num_items, chosen.freed.num_bytes)
        torn = [] if but_for is None else self._tear(freed, num_items, num_bytes, but_for)
        if not freed.covers(num_items, num_bytes) and not partly:
            self._put_back(chosen.keys)
            return Freed()
        if chosen.entries:
            self._begin(chosen.freed)
            self._removal.remove_now(
                chosen.entries,
                Cause("evicted", _WHY),
                lambda: self._gone(chosen),
                lambda: self._stay(chosen),
            )
        for group in torn:
            self._drop(group)
        return freed

    def _tear(
        self, freed: Freed, num_items: int, num_bytes: int, but_for: Collection[str]
    ) -> list[Group]:
        """Open groups that free the rest of so much, the oldest first."""
        torn, num_looks = [], 0
        for group in self._contents.groups.open_groups:
            if freed.covers(num_items, num_bytes) or num_looks >= TUNING.vain_looks:
                break
            if group.row.key in but_for or not group.members:
                continue
            num_looks += len(group.members)
            if not is_held(self._state, group.members):
                freed.add(group.members)
                torn.append(group)
        return torn

    def _drop(self, group: Group) -> None:
        """Drop an open group."""
        (freed := Freed()).add(group.members)
        self._begin(freed)
        dropping = self._grouping.evict_open(group, f"evicted: {_WHY}")
        dropping.add_done_callback(lambda _: self._end(freed))

    def _choose(self, num_items: int, num_bytes: int, *, most: int) -> _Chosen:
        """Units that free so much, or less; with `most`, none after so many experiences."""
        chosen, now, num_vain = _Chosen(), clock.now(), 0
        freed = chosen.freed
        while not freed.covers(num_items, num_bytes):
            if num_vain >= TUNING.vain_looks or (most and len(chosen.entries) >= most):
                break
            if (key := self._take_next()) is None:
                break
            members = members_of(self._state, key)
            if not members:
                continue
            if self._can_leave(members):
                chosen.add(key, members)
            else:
                self._parked.add(key, now)
                num_vain += len(members)
        return chosen

    def _take_next(self) -> int | None:
        """Take the unit that is to leave next; None: there is none."""
        if self._damaged:
            return self._damaged.popitem()[0]
        if not self._units:
            return None
        key = self._units.choose().key
        self._units.remove(key)
        return key

    def tick(self, now: float) -> None:
        """Look again at some of the units that couldn't leave, the longest known first."""
        num_members = 0
        for key in itertools.islice(self._parked.take_due(now), TUNING.parked_looks_per_tick):
            members = members_of(self._state, key)
            if members and not self._can_leave(members):
                self._parked.add(key, now)
            else:
                self._put_back([key])
            num_members += len(members)
            if num_members >= TUNING.members_per_tick:
                break

    def shed(self) -> None:
        """Remove some of what is beyond the limits since they were lowered."""
        settings, contents = self._state.settings, self._contents
        if self._units is None:
            return
        over_items = contents.num_items - self.num_items - settings.max_items
        over_bytes = contents.num_bytes - self.num_bytes - settings.max_bytes
        over_items = over_items if settings.max_items else 0
        if over_items > 0 or over_bytes > 0:
            self.make_room(
                min(over_items, TUNING.shed_per_tick),
                min(over_bytes, _SHED_BYTES_PER_TICK),
                partly=True,
            )

    def _put_back(self, keys: Iterable[int]) -> None:
        """Let units be chosen that are there; those that can be already stay as they are."""
        for key in keys:
            members = members_of(self._state, key)
            if self._units is None or not members or key in self._units or key in self._damaged:
                continue
            self._parked.pop(key, None)
            if _is_damaged(members):
                self._damaged[key] = None
            else:
                self._units.add(key, self._value(members))

    def _gone(self, chosen: _Chosen) -> None:
        self._end(chosen.freed)
        num_sound = chosen.freed.num_items - chosen.num_damaged
        for reason, count in (("evicted", num_sound), ("damaged", chosen.num_damaged)):
            if count:
                self._state.metrics.dropped(self._state.name, reason, count)

    def _stay(self, chosen: _Chosen) -> None:
        self._put_back(chosen.keys)
        self._end(chosen.freed)

    def _begin(self, freed: Freed) -> None:
        self.num_items += freed.num_items
        self.num_bytes += freed.num_bytes

    def _end(self, freed: Freed) -> None:
        self.num_items -= freed.num_items
        self.num_bytes -= freed.num_bytes

    def _can_leave(self, members: Sequence[Entry]) -> bool:
        group = members[0].group
        return (group is None or group.is_whole) and not is_held(self._state, members)

    def _value(self, members: Sequence[Entry]) -> float:
        votes = [entry for entry in members if not entry.record.tombstone]
        return value_of(self._state.settings.remover, votes) if votes else 0.0


def _is_damaged(members: Sequence[Entry]) -> bool:
    """Whether nobody gets the unit because rows of it can't be read back."""
    group = members[0].group
    return bool(members[0].damage if group is None else group.damage)
