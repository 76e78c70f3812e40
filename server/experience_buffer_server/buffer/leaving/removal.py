"""Leaving without being consumed: discarded, deleted, or dropped with a group.

A unit that leaves is a whole group where there are groups, else one experience. Its number is the id of
the group, or the seq of the experience. Who may be removed is decided here; what removal means for rows and memories is in
`state.departure`. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from experience_buffer_server.buffer.delivery.offers import Offers
from experience_buffer_server.buffer.state import departure
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.departure import CONSUMED, Cause
from experience_buffer_server.buffer.state.entries import Entry, Group
from experience_buffer_server.buffer.state.group_table import groups_of
from experience_buffer_server.runtime.tuning import TUNING
from experience_buffer_server.sampling.units import Unit

_PAUSE_SECONDS = 1.0
"""Until a unit that couldn't leave is looked at again."""


def unit_key(entry: Entry) -> int:
    """The number of an entry's unit."""
    return entry.record.seq if entry.group is None else entry.group.row.id


def members_of(state: BufferState, key: int) -> Sequence[Entry]:
    """All that leaves with a unit, tombstones too; none of one that has left or was dropped.

    Of a group it is a live view, which changes when members come and go.
    """
    if state.settings.group_by == "none":
        entry = state.contents.by_seq(key)
        return () if entry is None else (entry,)
    group = state.contents.groups.by_id(key)
    return () if group is None or group.row.closed == "dropped" else group.members


def is_held(state: BufferState, members: Sequence[Entry]) -> bool:
    """Whether somebody has any of it, works on it, or is to get it back by a rewind."""
    return any(not state.is_idle(entry) or state.is_wanted(entry) for entry in members)


class Parked(OrderedDict[int, float]):
    """Units that couldn't leave, by number, the longest parked first, with the time. Not thread-safe."""

    def add(self, key: int, now: float) -> None:
        """Park a unit; `now` is in seconds and never less than before."""
        self[key] = now
        self.move_to_end(key)

    def take_due(self, now: float) -> Iterator[int]:
        """Take those that have been here for a while, one at a time; some may be added meanwhile."""
        while self:
            key = next(iter(self))
            if now - self[key] < _PAUSE_SECONDS:
                return
            del self[key]
            yield key


class Removal:
    """Removes entries that nobody holds. Not thread-safe."""

    def __init__(self, state: BufferState, offers: Offers) -> None:
        self._state = state
        self._offers = offers
        self._contents = state.contents
        self._changes = state.changes

    def remove_free(self, entries: Sequence[Entry], cause: Cause) -> asyncio.Future[None]:
        """Remove those of the entries that nobody holds, and let nobody else have the others.

        The future raises StoreFullError where the removal can't be stored; nothing is removed.
        """
        held = [entry for entry in entries if self._state.is_leased(entry)]
        if held:
            departure.give_up(self._state, held)
        free = [entry for entry in entries if not self._state.is_leased(entry)]
        return self._submit_removal(free, cause)

    def discard(self, entries: Sequence[Entry], cause: Cause) -> None:
        """Remove those of the entries that nobody holds, and that nobody is to get any more."""
        self._discard(entries, cause, self._drop_again)

    def discard_done(self, entries: Iterable[Entry]) -> None:
        """Remove those of the entries that every consumer has done with."""
        self._discard(
            [entry for entry in entries if self._state.progress.is_done(entry)],
            CONSUMED,
            self._discard_done_again,
        )

    def drop(self, entries: Sequence[Entry], cause: Cause) -> None:
        """Remove those of the entries that nobody holds, and offer what is left of their groups."""
        self._state.withdraw([entry for entry in entries if not self._state.is_leased(entry)])
        look = self._look_again_at
        if not self._discard(entries, cause, self._drop_again, stored=look):
            look(entries)

    def postpone(self, entries: Iterable[Entry]) -> None:
        """Remove what every consumer has done with, as soon as there is room."""
        owed = [(entry.record.seq, CONSUMED) for entry in entries]
        self._changes.owe_again(self._discard_done_again, owed)

    def _drop_again(self, owed: Sequence[tuple[int, Cause]]) -> None:
        causes: dict[Cause, list[int]] = {}
        for seq, cause in owed:
            causes.setdefault(cause, []).append(seq)
        for cause, seqs in causes.items():
            # What is left of their groups may have waited for this.
            self.drop(self._contents.by_seqs(seqs), cause)

    def _discard_done_again(self, owed: Sequence[tuple[int, Cause]]) -> None:
        # A consumer that was added since may want it.
        self.discard_done(self._contents.by_seqs(seq for seq, _ in owed))

    def _discard(
        self,
        entries: Sequence[Entry],
        cause: Cause,
        again: Callable[[Sequence[tuple[int, Cause]]], None],
        stored: Callable[[Sequence[Entry]], None] | None = None,
    ) -> bool:
        """Submitted here and now: nobody can lease them in between. False if there is nothing to do."""
        free = [
            entry for entry in entries if not entry.leaving and not self._state.is_leased(entry)
        ]
        if not free or self._state.closed:
            return False

        def failed() -> None:
            # Nobody will ask for it again: it is tried again until there is room.
            self._changes.owe_again(again, [(entry.record.seq, cause) for entry in free])

        then = None if stored is None else partial(stored, free)
        self._changes.log(self._submit_removal(free, cause, then, failed))
        return True

    def _look_again_at(self, entries: Sequence[Entry]) -> None:
        for group in groups_of(entries):
            self._look_again(group)

    def discard_units(self, units: Sequence[Unit]) -> None:
        """Units of dropped groups came back from their lease."""
        # A batch that was drawn with replacement holds a unit several times.
        seqs = dict.fromkeys(seq for unit in units for seq in unit.seqs)
        entries = self._contents.by_seqs(seqs)
        causes: dict[Cause, list[Entry]] = {}
        for entry in entries:
            note = "" if entry.group is None else entry.group.row.note
            causes.setdefault(Cause("group_dropped", note), []).append(entry)
        for cause, gone in causes.items():
            self.discard(gone, cause)
        # Others may hold them still.
        departure.give_up(self._state, [entry for entry in entries if not entry.leaving])
        # Tombstones of a dropped group aren't in its unit, and nobody else may come back for them.
        groups = (self._contents.groups.by_id(unit.key) for unit in units)
        for group in groups:
            if group is not None and group.row.closed == "dropped":
                self._state.events.check_whole(group)

    def _submit_removal(
        self,
        entries: Sequence[Entry],
        cause: Cause,
        stored: Callable[[], None] | None = None,
        failed: Callable[[], None] | None = None,
    ) -> asyncio.Future[None]:
        """Remove durable entries that nobody holds; what follows from how it ends comes last."""
        batch = self._changes.batch()
        leaving = departure.leave(self._state, batch, entries, cause)

        def on_disk() -> None:
            departure.forget(self._state, leaving, cause)
            # What they kept from being whole, or from being computed, may go on without them.
            for group in groups_of(leaving):
                self._state.events.check_whole(group)
            if stored is not None:
                stored()

        def refused(error: BaseException) -> None:
            departure.stay(self._state, leaving, cause)
            if failed is not None:
                failed()

        return self._changes.submit(batch, on_disk, refused)

    def remove_now(
        self,
        entries: Sequence[Entry],
        cause: Cause,
        stored: Callable[[], None],
        failed: Callable[[], None] | None = None,
    ) -> None:
        """Remove durable entries that nobody holds; from this moment nobody can lease them.

        Where that can't be stored, they are offered again.
        """
        self._state.withdraw(entries)

        def stay() -> None:
            self._offers.offer_again(entries)
            # What came for them meanwhile, such as other settings, has passed them by.
            self._state.events.advance(entries)
            if failed is not None:
                failed()

        self._changes.log(self._submit_removal(entries, cause, stored, stay))

    async def delete(self, entries: Sequence[Entry]) -> tuple[list[Entry], int]:
        """Remove entries that nobody holds, and offer again what is left of their groups.

        Many go part by part, with everybody else in between; of a group all go at once.

        Returns:
            The entries that a consumer holds, and the number of those removed.

        Raises:
            BufferNotFoundError: The buffer was deleted meanwhile.
            StoreFullError: The removal can't be stored; what came before that is removed.
        """
        held: list[Entry] = []
        num_deleted = 0
        for part in _in_parts(entries):
            self._state.check_open()
            held_of_part, count = await self._delete(part)
            held += held_of_part
            num_deleted += count
        return held, num_deleted

    async def _delete(self, entries: Sequence[Entry]) -> tuple[list[Entry], int]:
        held = [entry for entry in entries if self._state.is_leased(entry)]
        free = [entry for entry in entries if not (entry.leaving or self._state.is_leased(entry))]
        # Withdrawn and submitted here and now: nobody can lease them in between.
        self._state.withdraw(free)

        def over() -> None:
            for entry in free:
                self._offers.offer_entry(entry)
            self._look_again_at(free)

        def stored() -> None:
            over()
            num_deleted = sum(not entry.record.tombstone for entry in free)
            self._state.metrics.dropped(self._state.name, "deleted", num_deleted)

        await self._submit_removal(free, Cause("deleted"), stored, over)
        return held, len(free)

    def _look_again(self, group: Group) -> None:
        """Some members have been deleted: offer the rest, or compute it without them."""
        if group.available:
            self._offers.offer_group(group)
            return
        for entry in group.members:
            self._contents.set_quarantine(entry, "")
        self._state.events.advance([entry for entry in group.members if entry.durable])


def _in_parts(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """What is removed with one commit each: whole groups, as far as they are among the entries.

    Else what is left of a group could be delivered before the rest of it is removed.
    """
    units: dict[int, list[Entry]] = {}
    for entry in entries:
        units.setdefault(unit_key(entry), []).append(entry)
    part: list[Entry] = []
    for unit in units.values():
        part += unit
        if len(part) >= TUNING.deleted_at_once:
            yield part
            part = []
    if part:
        yield part
