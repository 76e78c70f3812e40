"""Leaving without being consumed: discarded, deleted, or dropped with a group.

Who may be removed is decided here; what removal means for rows and memories is the retirement's
business. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence

from experience_buffer_server.buffer.delivery.offers import Offers
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.departure import LeaveReason
from experience_buffer_server.buffer.state.events import BufferEvents
from experience_buffer_server.buffer.state.group_table import Entry, Group, groups_of
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.runtime.tasks import Tasks
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import Store, StoreFullError

_RETRY_SECONDS = 1.0
"""Between attempts to discard what found no room."""


class Removal:
    """Removes entries that nobody holds. Not thread-safe."""

    def __init__(
        self,
        state: BufferState,
        events: BufferEvents,
        offers: Offers,
        store: Store,
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        self._state = state
        self._events = events
        self._offers = offers
        self._contents = state.contents
        self._retirement = state.retirement
        self._store = store
        self._metrics = metrics
        self._tasks = tasks
        self._unwanted: set[int] = set()
        """Seqs of what nobody is to get any more, and what the store had no room to forget."""
        self._done: set[int] = set()
        """Seqs of what every consumer has done with; one that was added since may want it."""
        self._next_retry = 0.0

    async def remove_free(self, entries: Sequence[Entry]) -> None:
        """Remove those of the entries that nobody holds, and let nobody else have the others.

        Raises:
            StoreFullError: The removal can't be stored; nothing is removed.
        """
        held = [entry for entry in entries if self._state.is_leased(entry)]
        if held:
            self._retirement.give_up(held)
        await self.remove([entry for entry in entries if not self._state.is_leased(entry)])

    def discard(self, entries: Sequence[Entry]) -> None:
        """Remove those of the entries that nobody holds, and that nobody is to get any more."""
        self._discard(entries, self._unwanted)

    def discard_done(self, entries: Iterable[Entry]) -> None:
        """Remove those of the entries that every consumer has done with."""
        self._discard(
            [entry for entry in entries if self._state.progress.is_done(entry)], self._done
        )

    def drop(self, entries: Sequence[Entry]) -> None:
        """Remove those of the entries that nobody holds, and offer what is left of their groups."""
        self._state.withdraw([entry for entry in entries if not self._state.is_leased(entry)])
        if not self._discard(entries, self._unwanted, look_again=True):
            self._look_again_at(entries)

    def postpone(self, entries: Iterable[Entry]) -> None:
        """Remove what every consumer has done with, as soon as there is room."""
        self._done.update(entry.record.seq for entry in entries)

    def tick(self, now: float) -> None:
        """Try again to discard what the store had no room to forget."""
        if (self._unwanted or self._done) and now >= self._next_retry:
            self._next_retry = now + _RETRY_SECONDS
            unwanted, done = self._contents.by_seqs(self._unwanted), list(self._done)
            self._unwanted.clear()
            self._done.clear()
            # What is left of their groups may have waited for this.
            self.drop(unwanted)
            self.discard_done(self._contents.by_seqs(done))

    def _discard(
        self, entries: Sequence[Entry], postponed: set[int], *, look_again: bool = False
    ) -> bool:
        """Submitted here and now: nobody can lease them in between. False if there is nothing to do."""
        free = [
            entry for entry in entries if not entry.leaving and not self._state.is_leased(entry)
        ]
        if not free or self._state.closed:
            return False
        leaving, stored = self._submit_removal(free, "discarded")
        self._tasks.spawn(self._discarded(free, leaving, stored, postponed, look_again=look_again))
        return True

    async def _discarded(
        self,
        entries: Sequence[Entry],
        leaving: list[Entry],
        stored: Awaitable[None],
        postponed: set[int],
        *,
        look_again: bool,
    ) -> None:
        try:
            await self._removed(leaving, stored, "discarded")
        except StoreFullError:
            # Nobody will ask for it again: it is tried again until there is room.
            postponed.update(entry.record.seq for entry in entries)
            raise
        if look_again:
            self._look_again_at(entries)

    def _look_again_at(self, entries: Sequence[Entry]) -> None:
        for group in groups_of(entries):
            self._look_again(group)

    def discard_units(self, units: Sequence[Unit]) -> None:
        """Units of dropped groups came back from their lease."""
        # A batch that was drawn with replacement holds a unit several times.
        seqs = dict.fromkeys(seq for unit in units for seq in unit.seqs)
        entries = self._contents.by_seqs(seqs)
        self.discard(entries)
        # Others may hold them still.
        self._retirement.give_up([entry for entry in entries if not entry.leaving])
        # Tombstones of a dropped group aren't in its unit, and nobody else may come back for them.
        groups = (self._contents.groups.by_id(unit.key) for unit in units)
        for group in groups:
            if group is not None and group.row.closed == "dropped":
                self._events.check_whole(group)

    async def remove(self, entries: Sequence[Entry], reason: LeaveReason = "discarded") -> None:
        """Remove durable entries that nobody holds.

        Raises:
            StoreFullError: The removal can't be stored; nothing is removed.
        """
        await self._removed(*self._submit_removal(entries, reason), reason)

    def _submit_removal(
        self, entries: Sequence[Entry], reason: LeaveReason
    ) -> tuple[list[Entry], Awaitable[None]]:
        batch = self._store.batch()
        leaving = self._retirement.leave(batch, entries, reason)
        return leaving, self._store.commit(batch)

    async def _removed(
        self, leaving: list[Entry], stored: Awaitable[None], reason: LeaveReason
    ) -> None:
        try:
            await stored
        except BaseException:
            self._retirement.stay(leaving, reason)
            raise
        self._retirement.forget(leaving)
        # What they kept from being whole, or from being computed, may go on without them.
        for group in groups_of(leaving):
            self._events.check_whole(group)

    def remove_now(self, entries: Sequence[Entry]) -> Awaitable[None]:
        """Remove durable entries that nobody holds; from this moment nobody can lease them.

        The awaitable raises StoreFullError where that can't be stored; they are offered again.
        """
        self._state.withdraw(entries)
        leaving, stored = self._submit_removal(entries, "discarded")
        return self._removed_or_offered(entries, leaving, stored)

    async def _removed_or_offered(
        self, entries: Sequence[Entry], leaving: list[Entry], stored: Awaitable[None]
    ) -> None:
        try:
            await self._removed(leaving, stored, "discarded")
        except BaseException:
            self._offers.offer_again(entries)
            # What came for them meanwhile, such as other settings, has passed them by.
            self._events.advance(entries)
            raise

    async def delete(self, entries: Sequence[Entry]) -> tuple[list[Entry], int]:
        """Remove entries that nobody holds, and offer again what is left of their groups.

        Returns:
            The entries that a consumer holds, and the number of those removed.

        Raises:
            StoreFullError: The removal can't be stored; nothing is removed.
        """
        held = [entry for entry in entries if self._state.is_leased(entry)]
        free = [entry for entry in entries if not (entry.leaving or self._state.is_leased(entry))]
        # Withdrawn and submitted here and now: nobody can lease them in between.
        self._state.withdraw(free)
        leaving, stored = self._submit_removal(free, "deleted")
        await self._tasks.finish(self._deleted(free, leaving, stored))
        return held, len(free)

    async def _deleted(
        self, entries: Sequence[Entry], leaving: list[Entry], stored: Awaitable[None]
    ) -> None:
        try:
            await self._removed(leaving, stored, "deleted")
        finally:
            for entry in entries:
                self._offers.offer_entry(entry)
            for group in groups_of(entries):
                self._look_again(group)
        num_deleted = sum(not entry.record.tombstone for entry in entries)
        self._metrics.dropped(self._state.name, "deleted", num_deleted)

    def _look_again(self, group: Group) -> None:
        """Some members have been deleted: offer the rest, or compute it without them."""
        if group.available:
            self._offers.offer_group(group)
            return
        for entry in group.members:
            self._contents.set_quarantine(entry, "")
        self._events.advance([entry for entry in group.members if entry.durable])
