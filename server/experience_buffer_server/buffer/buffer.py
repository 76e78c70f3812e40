"""One named buffer: the owner of all state that decides what is delivered.

`Ingest` brings experiences in and `Delivery` hands them out; here is what happens in between:
groups become whole, advantages arrive, units are offered. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from experience_buffer_server.buffer.compute.scheduler import Computer
from experience_buffer_server.buffer.compute.submission import Computing
from experience_buffer_server.buffer.delivery.damage import Damage
from experience_buffer_server.buffer.delivery.delivery import Desk
from experience_buffer_server.buffer.intake.admission import missing_fields
from experience_buffer_server.buffer.intake.annotate import Annotating
from experience_buffer_server.buffer.intake.payload_reader import PayloadReader
from experience_buffer_server.buffer.intake.push import Ingest
from experience_buffer_server.buffer.intake.push_room import Intake
from experience_buffer_server.buffer.intake.task_pacing import Pacing
from experience_buffer_server.buffer.leaving.eviction import Eviction
from experience_buffer_server.buffer.leaving.group_closing import Grouping
from experience_buffer_server.buffer.leaving.removal import Removal
from experience_buffer_server.buffer.leaving.retention import Retention
from experience_buffer_server.buffer.settings_change import SettingsChanges
from experience_buffer_server.buffer.state.buffer_row import StoredRow
from experience_buffer_server.buffer.state.change import Changes
from experience_buffer_server.buffer.state.contents import Contents
from experience_buffer_server.buffer.state.group_table import Entry, Group, groups_of
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.runtime.tasks import Tasks
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.settings.server import ServerSection
from experience_buffer_server.store.interface import BufferRow, Store, WriteBatch

_PRUNE_SECONDS = 60.0
"""Between rounds of forgetting what was remembered for longer than the horizon."""
_PRUNE_STEP = 1000
"""Most that is forgotten in one commit: pushes don't wait for long behind it."""


class Buffer:
    """One buffer. Not thread-safe; belongs to its event loop."""

    def __init__(
        self,
        row: BufferRow,
        *,
        store: Store,
        computer: Computer,
        metrics: Metrics,
        payloads: PayloadReader,
        limits: ServerSection,
    ) -> None:
        self.row = row
        self.settings = BufferSettings.model_validate_json(row.config)
        self.closed = False
        """Deleted: what is still under way for it has no effect."""
        self.version_changed = asyncio.Event()
        """Set, and replaced, when a policy version is published or the buffer is deleted."""
        self.contents = contents = Contents()
        self._store = store
        self._computer = computer
        self._metrics = metrics
        self._tasks = tasks = Tasks()
        self._next_prune = 0.0
        self.changes = changes = Changes(store, tasks)
        """What is under way to the disk, or owed to it."""
        self.computing = Computing(self, store, changes, computer, metrics, tasks)
        self.desk = desk = Desk(self, contents, store, metrics, tasks, limits)
        self.delivery, self.leasing = desk.delivery, desk.leasing
        desk.leasing.table.reserve(row.lease_floor)
        self.damage = Damage(self, contents, desk.delivery, desk.leasing, store, tasks)
        self.removal = Removal(
            self,
            contents,
            desk.delivery,
            desk.offering,
            desk.retirement,
            desk.progress,
            store,
            metrics,
            tasks,
        )
        self.grouping = Grouping(self, contents, self.removal, store, metrics, tasks)
        self.eviction = Eviction(self, contents, desk.progress, self.removal, metrics, tasks)
        consumers = desk.delivery.consumers
        contents.on_removed = self.eviction.removed
        self.pacing = Pacing(self, contents, consumers, metrics)
        self.intake = Intake(self, contents, consumers, self.eviction, self.pacing, metrics)
        self.ingest = Ingest(
            self,
            contents,
            self.intake,
            store,
            metrics,
            tasks,
            payloads,
            limits=limits,
        )
        self.retention = Retention(
            self, contents, self.removal, self.grouping, desk.progress, metrics, tasks
        )
        self.annotating = Annotating(self, contents, self.removal, store, tasks, limits=limits)
        self.stored_row = StoredRow(self, changes, tasks)
        self._changing = SettingsChanges(
            self, contents, desk, store, computer, tasks, self.stored_row
        )
        for consumer in self.settings.consumers:
            self.delivery.add_consumer(consumer)
        self.eviction.settings_changed()
        self.retention.settings_changed()
        if self.settings.advantage.estimator:
            computer.warm_up()

    @property
    def id(self) -> int:
        """Its id in the store."""
        return self.row.id

    @property
    def name(self) -> str:
        """Its name."""
        return self.row.name

    # --- from stored to available

    def stored(self, entries: Sequence[Entry]) -> None:
        """New entries are on disk: compute, offer, and see which groups are whole now."""
        for entry in entries:
            entry.durable = True
            if entry.group is not None:
                entry.group.num_durable += 1
            self.desk.offering.entry(entry)
        self.eviction.stored(entries)
        self.advance(entries)

    def advance(self, entries: Sequence[Entry]) -> None:
        """Bring durable entries and their groups as far as they can go."""
        if self.closed:
            return
        if not self.settings.needs_groups:
            self._advance_alone([entry for entry in entries if _can_advance(entry)])
        for group in groups_of(entries):
            self.check_whole(group)

    def _advance_alone(self, entries: Sequence[Entry]) -> None:
        if not self.settings.advantage.estimator:
            self.make_available(entries)
        else:
            for entry in entries:
                self.computing.submit([entry])

    def check_whole(self, group: Group) -> None:
        """Go on with a group that is closed and all on disk, and with one that was dropped."""
        if group.row.closed == "dropped":
            self.removal.discard([entry for entry in group.members if entry.durable])
        if not group.is_whole or group.available or self.closed:
            return
        votes = [entry for entry in group.votes if entry.is_staying]
        group.available = bool(votes) and all(entry.available for entry in votes)
        if not votes:
            self.removal.discard(group.members)
            return
        self.desk.offering.group(group)
        self.eviction.stored(group.members[:1])
        self.damage.hold_back(group)
        can_be_computed = not any(
            e.computing or e.quarantine or e.missing or e.changing for e in votes
        )
        if not group.available and self.settings.needs_groups and can_be_computed:
            # All together, also those that could be sampled before the estimator was set.
            self.computing.submit(votes)

    def make_available(self, entries: Sequence[Entry]) -> None:
        """Let consumers sample the entries, and the groups that are available with them."""
        fresh = [entry for entry in entries if not entry.available]
        for entry in fresh:
            entry.available = True
            self.desk.offering.entry(entry)
        for group in groups_of(fresh):
            self.check_whole(group)

    # --- what is known of an entry

    def missing_fields(self, entry: Entry) -> tuple[str, ...]:
        """Fields that the estimator needs and an entry lacks; none where it can be sampled."""
        if entry.record.tombstone or entry.available:
            return ()
        return missing_fields(entry.record.fields, self.settings)

    def staleness(self, entry: Entry) -> int | None:
        """Published policy version minus the entry's lowest; None when either is unknown."""
        published, lowest = self.row.policy_version, entry.record.min_version
        return None if published is None or lowest is None else published - lowest

    # --- changes from outside

    def change_settings(self, new: BufferSettings) -> asyncio.Task[None]:
        """Take over new settings and store them; the task ends when they are on disk.

        They hold at once, for what is pushed next. Nothing that could not be taken back happens
        before they are on disk: until then a consumer that is to go keeps its leases, and
        experiences from leaving.

        The task raises StoreError where they can't be stored: everything is as before.
        """
        return self._changing.start(new)

    def close(self) -> None:
        """Deleted: calls that wait end, what is under way has no effect."""
        self.closed = self.leasing.closed = True
        self.version_changed.set()
        self.ingest.line.look()
        self.changes.close()
        self.computing.close()
        self.delivery.close()

    def forget(self) -> None:
        """Let go of what it held; after `close` and `drain`."""
        self.contents.clear()
        self.desk.progress.clear()

    # --- what others ask

    def set_aside(self, reasons: Mapping[int, str]) -> None:
        """Offer experiences to nobody any more: by seq, what of each can't be read back."""
        self.damage.set_aside(reasons)

    def put_notes(self, entries: Sequence[Entry]) -> None:
        """Store why entries were set aside while they were being changed."""
        self.damage.put_notes(entries)

    def withhold(self, group: Group, batch: WriteBatch) -> None:
        """Discard a group whose rewards are all equal; the batch is about to say that it is closed."""
        self._tasks.spawn(self.grouping.withhold(group, batch))

    def discard_units(self, units: Sequence[Unit]) -> None:
        """Units that nobody is to get any more came back."""
        if not self._changing.is_pending:
            units = self.retention.take(units, clock.now())
        self.removal.discard_units(units)

    def mark_expired(self, units: Sequence[Unit]) -> None:
        """Units are about to come back: mark those that are too old; the others may be evicted."""
        if not self._changing.is_pending:
            self.retention.mark(units, clock.now())
        self.eviction.returned(units)

    def postpone(self, entries: Sequence[Entry]) -> None:
        """Remove what every consumer has done with, as soon as the store has room."""
        self.removal.postpone(entries)

    def drop_stale(self, units: Iterable[list[Entry]], consumer: str) -> list[list[Entry]]:
        """Remove units that are too stale for a consumer, each as a whole or not at all.

        Returns:
            Those that stay: somebody holds any of it, or may be rewound to before it was acknowledged,
            or another consumer was and is to get it again; or it would tear a group.
        """
        kept: list[list[Entry]] = []
        dropped: list[Entry] = []
        by_item = self.delivery.consumers[consumer].settings.unit == "item"
        for unit in units:
            is_torn = by_item and any(self._is_needed(entry.group) for entry in unit)
            if is_torn or any(self._is_wanted(entry, consumer) for entry in unit):
                kept.append(unit)
            else:
                dropped += unit
        self.removal.drop(dropped)
        self._metrics.dropped(self.name, "stale", len(dropped))
        return kept

    def _is_needed(self, group: Group | None) -> bool:
        """Whether a group would never be whole, or be delivered in part, without one of its members."""
        if group is None:
            return False
        consumers = self.delivery.consumers.values()
        if any(other.settings.unit == "group" for other in consumers):
            return True
        return self.settings.needs_groups and not group.available

    def _is_wanted(self, entry: Entry, but_for: str) -> bool:
        progress = self.desk.progress
        is_promised = progress.is_retained(entry) or progress.was_rewound(entry, but_for=but_for)
        return is_promised or self.removal.is_leased(entry)

    def revalue(self, entries: Sequence[Entry]) -> None:
        """What entries are chosen by, to be delivered or to be removed, has changed."""
        self.delivery.revalue(entries)
        self.eviction.revalue(entries)

    def published(self, version: int) -> None:
        """A policy version is on disk: what waited for it is offered, who watches is told."""
        changed, self.version_changed = self.version_changed, asyncio.Event()
        changed.set()
        self.delivery.release_held(version)

    def has_delivered(self, entry: Entry) -> bool:
        """True if a consumer that isn't raw holds the entry, or has consumed it."""
        return self.delivery.is_leased(entry, to_raw=False) or any(
            not consumer.settings.raw and consumer.name in entry.acked
            for consumer in self.delivery.consumers.values()
        )

    # --- in words

    def describe_wait(self) -> str:
        """What keeps experiences from being sampled; empty when nothing does."""
        waits = (self.grouping.describe(), self.describe_computing(), self.changes.describe())
        return "; ".join(wait for wait in waits if wait)

    def describe_computing(self) -> str:
        """What computing waits for: missing fields, a batch that isn't full, a cure; or empty."""
        waits = (
            self.grouping.describe_missing(),
            self.computing.describe(),
            self.contents.describe_quarantined(),
        )
        return "; ".join(wait for wait in waits if wait)

    # --- time

    def tick(self, now: float) -> None:
        """Do what time asks for: expire leases, close groups at their deadline, forget."""
        self.changes.tick(now)
        self.leasing.expire(now)
        self.grouping.expire(now)
        self.removal.tick(now)
        self.pacing.tick(now)
        self.eviction.tick(now)
        # What they remove could not be taken back.
        if not self._changing.is_pending:
            self.retention.tick(now)
            self.eviction.shed()
        self.ingest.line.look()
        self.computing.tick(now)
        if now >= self._next_prune:
            self._next_prune = now + _PRUNE_SECONDS
            self._tasks.spawn(self._prune(now - self.settings.duplicate_horizon_seconds))

    async def _prune(self, before_time: float) -> None:
        while not self.closed:
            count = await self._store.prune(self.id, before_time, limit=_PRUNE_STEP)
            if count < _PRUNE_STEP:
                break

    def batch(self) -> WriteBatch:
        """Start a batch of changes to its rows."""
        return self._store.batch()

    def spawn_commit(self, batch: WriteBatch) -> None:
        """Store a batch that nobody waits for; its failure is logged."""
        self._tasks.spawn(self._store.commit(batch))

    async def drain(self) -> None:
        """Wait for what is under way."""
        await self._tasks.drain()


def _can_advance(entry: Entry) -> bool:
    idle = not (entry.available or entry.computing or entry.quarantine or entry.changing)
    return idle and not entry.missing and entry.is_staying and not entry.record.tombstone
