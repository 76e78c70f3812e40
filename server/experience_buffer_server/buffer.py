"""One named buffer: the owner of all state that decides what is delivered.

`Ingest` brings experiences in and `Delivery` hands them out; here is what happens in between:
groups become whole, advantages arrive, units are offered. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from experience_buffer_server.compute import Computer, Job
from experience_buffer_server.config import BufferSettings, ServerSection
from experience_buffer_server.contents import Contents
from experience_buffer_server.delivery import Consumer, Delivery, Want
from experience_buffer_server.grouping import Grouping
from experience_buffer_server.groups import Entry, Group, groups_of
from experience_buffer_server.ingest import Ingest
from experience_buffer_server.leasing import Leasing
from experience_buffer_server.metrics import Metrics
from experience_buffer_server.retirement import Retirement
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.queue import Unit
from experience_buffer_server.store.base import AdvantageRow, BufferRow, Store
from experience_buffer_server.tasks import Tasks


class Buffer:
    """One buffer. Not thread-safe; belongs to its event loop."""

    def __init__(
        self,
        row: BufferRow,
        *,
        store: Store,
        computer: Computer,
        metrics: Metrics,
        limits: ServerSection,
    ) -> None:
        self.row = row
        self.settings = BufferSettings.model_validate_json(row.config)
        self.closed = False
        """Deleted: what is still under way for it has no effect."""
        self.contents = Contents()
        self.num_computing = 0
        self._store = store
        self._computer = computer
        self._metrics = metrics
        self._tasks = Tasks()
        self.ingest = Ingest(self, self.contents, store, metrics, max_items=limits.max_push_items)
        self.grouping = Grouping(self, self.contents, store, metrics)
        self.delivery = Delivery(
            lambda: self.name,
            self.grouping.describe,
            self._discarded,
            metrics,
            max_waiting=limits.max_waiting_samples,
            max_leased_experiences=limits.max_leased_experiences,
        )
        self.retirement = Retirement(row.id, self.contents, self.delivery.consumers)
        self.leasing = Leasing(
            row.id, lambda: self.name, self.delivery, self.retirement, store, metrics
        )
        for consumer in self.settings.consumers:
            self.delivery.add_consumer(consumer)

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
        self.advance(entries)

    def advance(self, entries: Sequence[Entry]) -> None:
        """Bring durable entries and their groups as far as they can go."""
        if not self.settings.needs_groups:
            self._compute_or_offer([e for e in entries if not e.record.tombstone], alone=True)
        for group in groups_of(entries):
            self.check_whole(group)

    def check_whole(self, group: Group) -> None:
        """Go on with a group that is closed and all on disk."""
        if group.row.closed == "dropped":
            self.discard([entry for entry in group.members if entry.durable])
        if not group.is_whole or group.available:
            return
        votes = group.votes
        if not votes:
            self.grouping.drop_soon(group, "every member is a tombstone")
        elif all(entry.available for entry in votes):
            self._offer_group(group)
        elif self.settings.needs_groups and not any(entry.available for entry in votes):
            self._compute_or_offer(votes, alone=False)

    def _compute_or_offer(self, entries: Sequence[Entry], *, alone: bool) -> None:
        waiting = [entry for entry in entries if not entry.available and not entry.quarantine]
        if not waiting or self.closed:
            return
        if not self.settings.advantage.estimator:
            self._make_available(waiting)
            return
        for members in [[entry] for entry in waiting] if alone else [waiting]:
            self.num_computing += 1
            self._computer.submit(
                Job(
                    owner=self,
                    entries=members,
                    estimator=self.settings.advantage.estimator,
                    parameters=self.settings.advantage.parameters,
                    runs=run_labels(members, self.settings.group_by),
                )
            )

    def computed(self, job: Job, rows: Sequence[AdvantageRow]) -> None:
        """Store the advantages of what is still here; then it can be sampled."""
        self.num_computing -= 1
        if not self.closed:
            self._tasks.spawn(self._store_advantages(rows))

    async def _store_advantages(self, rows: Sequence[AdvantageRow]) -> None:
        batch = self._store.batch()
        for row in rows:
            if self.contents.by_seq(row.seq) is not None:
                batch.put_advantages(self.id, row)
        await self._store.commit(batch)
        self._make_available(self.contents.by_seqs(row.seq for row in rows))

    def not_computed(self, job: Job, reason: str) -> None:
        """Quarantine what can't be computed; it stays visible and can be deleted."""
        self.num_computing -= 1
        for entry in job.entries:
            entry.quarantine = reason
        self._metrics.quarantined(self.name, job.entries[0].record.uid, len(job.entries), reason)

    def _make_available(self, entries: Sequence[Entry]) -> None:
        fresh = [entry for entry in entries if not entry.available]
        for entry in fresh:
            entry.available = True
            for consumer in self.delivery.consumers.values():
                self._offer_item(consumer, entry)
        for group in groups_of(fresh):
            self.check_whole(group)

    def _offer_group(self, group: Group) -> None:
        group.available = True
        for consumer in self.delivery.consumers.values():
            self._offer_votes(consumer, group)

    def _offer_item(self, consumer: Consumer, entry: Entry) -> None:
        if consumer.settings.unit == "item":
            self._offer(consumer, [entry])

    def _offer_votes(self, consumer: Consumer, group: Group) -> None:
        if consumer.settings.unit == "group":
            self._offer(consumer, group.votes)

    def _offer(self, consumer: Consumer, entries: Sequence[Entry]) -> None:
        entries = [entry for entry in entries if consumer.name not in entry.acked]
        if not entries:
            return
        unit = Unit(
            tuple(sorted(entry.record.seq for entry in entries)),
            sum(entry.record.payload_bytes for entry in entries),
        )
        if unit.order in consumer.units:
            return
        unit.num_deliveries = self.retirement.num_deliveries(unit.order, consumer.name)
        self.delivery.offer(consumer, unit)

    def offer_all(self, consumer: Consumer) -> None:
        """Offer a consumer everything that is available and that it hasn't got or consumed."""
        for entry in self.contents:
            if entry.available:
                self._offer_item(consumer, entry)
        for group in self.contents.groups:
            if group.available:
                self._offer_votes(consumer, group)

    # --- sampling

    async def sample(
        self, consumer_name: str, want: Want, stop: asyncio.Event
    ) -> tuple[Lease | None, str]:
        """Lease one batch, waiting for it if need be; None and the reason if there is none.

        Raises:
            ConsumerNotFoundError: The buffer has no such consumer.
            ResourceExhaustedError: Too many calls wait, or too much is leased.
            StoreFullError: The lease can't be stored.
        """
        consumer = self.delivery.consumer(consumer_name)
        units, shortfall = await self.delivery.take(consumer, want, stop)
        if not units:
            return None, shortfall
        lease = await self.leasing.grant(consumer.name, units, want.lease_seconds)
        self._note_delivery(consumer, lease)
        return lease, shortfall

    def _note_delivery(self, consumer: Consumer, lease: Lease) -> None:
        now = time.time()
        entries = self.contents.by_seqs(seq for unit in lease.units for seq in unit.seqs)
        self._metrics.sampled(
            self.name,
            consumer.name,
            num_bytes=sum(entry.record.payload_bytes for entry in entries),
            ages=[now - entry.record.push_time for entry in entries],
            staleness=[s for entry in entries if (s := self.staleness(entry)) is not None],
        )

    def staleness(self, entry: Entry) -> int | None:
        """Published policy version minus the entry's lowest; None when either is unknown."""
        published, lowest = self.row.policy_version, entry.record.min_version
        return None if published is None or lowest is None else published - lowest

    # --- changes from outside

    def change_settings(self, new: BufferSettings) -> None:
        """Take over new settings: consumers come and go, what waits is looked at again."""
        old_units = {consumer.name: consumer.unit for consumer in self.settings.consumers}
        new_units = {consumer.name: consumer.unit for consumer in new.consumers}
        self.settings = new
        for name, unit in old_units.items():
            if new_units.get(name) != unit:
                held = [lease.id for lease in self.leasing.table.of_consumer(name)]
                self.leasing.give_back(held, "consumer_removed")
                self.delivery.remove_consumer(name)
        for consumer in new.consumers:
            if consumer.name not in self.delivery.consumers:
                self.offer_all(self.delivery.add_consumer(consumer))
        for group in self.contents.groups:
            self.contents.groups.schedule(group, new)
        self.discard([entry for entry in self.contents if self.retirement.is_done(entry)])
        self.advance([entry for entry in self.contents if entry.durable])

    def close(self) -> None:
        """Deleted: calls that wait end, what is under way has no effect."""
        self.closed = True
        for name in list(self.delivery.consumers):
            self.delivery.remove_consumer(name)

    # --- leaving without being consumed

    def unit_orders(self, entries: Iterable[Entry]) -> dict[str, set[int]]:
        """The units, by kind, that hold any of the entries."""
        entries = list(entries)
        firsts = {
            min(e.record.seq for e in group.votes) for group in groups_of(entries) if group.votes
        }
        return {"item": {entry.record.seq for entry in entries}, "group": firsts}

    def is_leased(self, entry: Entry) -> bool:
        """True if a consumer holds it."""
        orders = self.unit_orders([entry])
        return any(self.delivery.is_leased(kind, found) for kind, found in orders.items())

    def withdraw(self, entries: Sequence[Entry]) -> None:
        """Stop offering the units that hold any of the entries."""
        for kind, orders in self.unit_orders(entries).items():
            self.delivery.withdraw(kind, orders)

    def discard(self, entries: Sequence[Entry]) -> None:
        """Remove entries that nobody is to get any more."""
        if entries:
            self._tasks.spawn(self.remove(entries))

    async def remove(self, entries: Sequence[Entry], *, remember_uids: bool = True) -> None:
        """Remove durable entries that nobody holds."""
        batch = self._store.batch()
        self.retirement.leave(batch, entries, remember_uids=remember_uids)
        await self._store.commit(batch)
        self.retirement.forget(entries)

    async def delete(self, entries: Sequence[Entry]) -> None:
        """Remove entries that nobody holds, and offer again what is left of their groups.

        Raises:
            StoreFullError: The removal can't be stored; nothing is removed.
        """
        groups = groups_of(entries)
        self.withdraw(entries)
        try:
            await self._tasks.finish(self.remove(entries, remember_uids=False))
        finally:
            for entry in entries:
                if entry.available and self.contents.by_seq(entry.record.seq) is entry:
                    for consumer in self.delivery.consumers.values():
                        self._offer_item(consumer, entry)
            for group in groups:
                if group.available and group.members:
                    self._offer_group(group)
                else:
                    self.check_whole(group)
        self._metrics.dropped(self.name, "deleted", len(entries))

    def _discarded(self, units: Sequence[Unit]) -> None:
        """Units of dropped groups came back from their lease."""
        entries = self.contents.by_seqs(seq for unit in units for seq in unit.seqs)
        self.discard([entry for entry in entries if not self.is_leased(entry)])

    def tick(self, now: float) -> None:
        """Do what time asks for: expire leases, close groups at their deadline."""
        self.leasing.expire(now)
        self.grouping.expire(now)

    async def drain(self) -> None:
        """Wait for what is under way."""
        for part in (self.ingest, self.grouping, self.leasing, self._tasks):
            await part.drain()


def run_labels(entries: Sequence[Entry], group_by: str) -> list[str]:
    """Which entries are the steps of one run, and so have one vote together; empty: alone.

    Only in groups by task, and only where the run's steps differ: equal steps under one run are
    separate samples whose run was never set.
    """
    if group_by != "task":
        return [""] * len(entries)
    steps: dict[str, list[int]] = {}
    for entry in entries:
        steps.setdefault(entry.record.rid, []).append(entry.record.step)
    return [
        rid if len(set(steps[rid])) == len(steps[rid]) else ""
        for rid in (entry.record.rid for entry in entries)
    ]
