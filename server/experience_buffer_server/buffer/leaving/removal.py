"""Leaving without being consumed: discarded, deleted, or dropped with a group.

Who may be removed is decided here; what removal means for rows and memories is the retirement's
business. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from typing import Protocol

from experience_buffer_server.buffer.delivery.offers import Delivery, Offering
from experience_buffer_server.buffer.state.contents import Contents
from experience_buffer_server.buffer.state.departure import LeaveReason, Retirement
from experience_buffer_server.buffer.state.group_table import Entry, Group, groups_of
from experience_buffer_server.buffer.state.progress import Progress
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.runtime.tasks import Tasks
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import Store, StoreFullError

_RETRY_SECONDS = 1.0
"""Between attempts to discard what found no room."""


class Owner(Protocol):
    """The buffer that experiences leave."""

    closed: bool

    @property
    def name(self) -> str:
        """Its name."""

    def advance(self, entries: Sequence[Entry]) -> None:
        """Bring durable entries and their groups as far as they can go."""

    def check_whole(self, group: Group) -> None:
        """Go on with a group that is closed and all on disk."""


class Removal:
    """Removes entries that nobody holds. Not thread-safe."""

    def __init__(
        self,
        owner: Owner,
        contents: Contents,
        delivery: Delivery,
        offering: Offering,
        retirement: Retirement,
        progress: Progress,
        store: Store,
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        self._owner = owner
        self._contents = contents
        self._delivery = delivery
        self._offering = offering
        self._retirement = retirement
        self._progress = progress
        self._store = store
        self._metrics = metrics
        self._tasks = tasks
        self._unwanted: set[int] = set()
        """Seqs of what nobody is to get any more, and what the store had no room to forget."""
        self._done: set[int] = set()
        """Seqs of what every consumer has done with; one that was added since may want it."""
        self._next_retry = 0.0

    def is_leased(self, entry: Entry) -> bool:
        """True if a consumer holds it, or is about to."""
        return self._delivery.is_leased(entry)

    def is_idle(self, entry: Entry) -> bool:
        """True if it is on disk and nobody holds it, computes it or changes it."""
        busy = entry.computing or entry.changing or entry.leaving
        return entry.durable and not busy and not self.is_leased(entry)

    def offer_again(self, entries: Sequence[Entry]) -> None:
        """Offer units that were withdrawn to those who may have them."""
        for entry in entries:
            self._offering.entry(entry)
        for group in groups_of(entries):
            self._offering.group(group)

    def withdraw(self, entries: Sequence[Entry], *, keep_raw: bool = False) -> None:
        """Stop offering the units that hold any of the entries, to raw consumers too or not."""
        self._delivery.withdraw(entries, keep_raw=keep_raw)

    async def remove_free(self, entries: Sequence[Entry]) -> None:
        """Remove those of the entries that nobody holds, and let nobody else have the others.

        Raises:
            StoreFullError: The removal can't be stored; nothing is removed.
        """
        held = [entry for entry in entries if self.is_leased(entry)]
        if held:
            self._retirement.give_up(held)
        await self.remove([entry for entry in entries if not self.is_leased(entry)])

    def discard(self, entries: Sequence[Entry]) -> None:
        """Remove those of the entries that nobody holds, and that nobody is to get any more."""
        self._discard(entries, self._unwanted)

    def discard_done(self, entries: Iterable[Entry]) -> None:
        """Remove those of the entries that every consumer has done with."""
        self._discard([entry for entry in entries if self._progress.is_done(entry)], self._done)

    def drop(self, entries: Sequence[Entry]) -> None:
        """Remove those of the entries that nobody holds, and offer what is left of their groups."""
        self.withdraw([entry for entry in entries if not self.is_leased(entry)])
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
        free = [entry for entry in entries if not entry.leaving and not self.is_leased(entry)]
        if not free or self._owner.closed:
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
                self._owner.check_whole(group)

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
            self._owner.check_whole(group)

    def remove_now(self, entries: Sequence[Entry]) -> Awaitable[None]:
        """Remove durable entries that nobody holds; from this moment nobody can lease them.

        The awaitable raises StoreFullError where that can't be stored; they are offered again.
        """
        self.withdraw(entries)
        leaving, stored = self._submit_removal(entries, "discarded")
        return self._removed_or_offered(entries, leaving, stored)

    async def _removed_or_offered(
        self, entries: Sequence[Entry], leaving: list[Entry], stored: Awaitable[None]
    ) -> None:
        try:
            await self._removed(leaving, stored, "discarded")
        except BaseException:
            self.offer_again(entries)
            # What came for them meanwhile, such as other settings, has passed them by.
            self._owner.advance(entries)
            raise

    async def delete(self, entries: Sequence[Entry]) -> tuple[list[Entry], int]:
        """Remove entries that nobody holds, and offer again what is left of their groups.

        Returns:
            The entries that a consumer holds, and the number of those removed.

        Raises:
            StoreFullError: The removal can't be stored; nothing is removed.
        """
        held = [entry for entry in entries if self.is_leased(entry)]
        free = [entry for entry in entries if not (entry.leaving or self.is_leased(entry))]
        # Withdrawn and submitted here and now: nobody can lease them in between.
        self.withdraw(free)
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
                self._offering.entry(entry)
            for group in groups_of(entries):
                self._look_again(group)
        num_deleted = sum(not entry.record.tombstone for entry in entries)
        self._metrics.dropped(self._owner.name, "deleted", num_deleted)

    def _look_again(self, group: Group) -> None:
        """Some members have been deleted: offer the rest, or compute it without them."""
        if group.available:
            self._offering.group(group)
            return
        for entry in group.members:
            self._contents.set_quarantine(entry, "")
        self._owner.advance([entry for entry in group.members if entry.durable])
