"""The desk of one buffer: everything between available and consumed, and what its consumers ask for.

Wires the rooms of delivery, each with those that it calls. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from experience_buffer import errors
from experience_buffer_server.buffer.delivery.batch_picking import Picking
from experience_buffer_server.buffer.delivery.lease_settlement import row_of
from experience_buffer_server.buffer.delivery.leasing import Leasing
from experience_buffer_server.buffer.delivery.offers import Delivery, Offering
from experience_buffer_server.buffer.delivery.priorities import Priorities
from experience_buffer_server.buffer.delivery.quarantine import Quarantine
from experience_buffer_server.buffer.delivery.rank_batches import RankOf, Sharing
from experience_buffer_server.buffer.delivery.rewind import Timelines
from experience_buffer_server.buffer.delivery.sample_queue import Line
from experience_buffer_server.buffer.state.consumers import Consumer, Want
from experience_buffer_server.buffer.state.contents import Contents
from experience_buffer_server.buffer.state.departure import Retirement
from experience_buffer_server.buffer.state.group_table import Entry
from experience_buffer_server.buffer.state.progress import Progress
from experience_buffer_server.buffer.state.units import Catalog, key_of
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.runtime.tasks import Tasks
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.staleness import Verdict
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.settings.server import ServerSection
from experience_buffer_server.store.interface import BufferRow, ProgressRow, Store, WriteBatch

Prepare: TypeAlias = Callable[[str, Lease], Awaitable[None]]
"""Makes an answer of a lease, given why it holds fewer than were asked for."""
_RETURNED = (
    "the batch was returned before it was sent: its consumer was rewound or changed; ask again"
)


class Owner(Protocol):
    """The buffer that the desk belongs to."""

    row: BufferRow
    settings: BufferSettings

    @property
    def name(self) -> str:
        """Its name."""

    def describe_wait(self) -> str:
        """What keeps experiences from being sampled; empty when nothing does."""

    def discard_units(self, units: Sequence[Unit]) -> None:
        """Units that nobody is to get any more came back."""

    def mark_expired(self, units: Sequence[Unit]) -> None:
        """Units are about to come back: mark those that nobody is to get any more."""

    def postpone(self, entries: Sequence[Entry]) -> None:
        """Remove what every consumer has done with, as soon as the store has room."""

    def drop_stale(self, units: Iterable[list[Entry]], consumer: str) -> list[list[Entry]]:
        """Remove what is too stale; returns what stays because somebody has or may want it."""

    def revalue(self, entries: Sequence[Entry]) -> None:
        """What entries are chosen by has changed."""

    def staleness(self, entry: Entry) -> int | None:
        """Published policy version minus the entry's lowest; None when either is unknown."""


class Desk:
    """Serves the consumers of one buffer. Not thread-safe."""

    def __init__(
        self,
        owner: Owner,
        contents: Contents,
        store: Store,
        metrics: Metrics,
        tasks: Tasks,
        limits: ServerSection,
    ) -> None:
        self._owner = owner
        self._contents = contents
        self._store = store
        self._metrics = metrics
        self._tasks = tasks
        consumers: dict[str, Consumer] = {}
        row = owner.row
        self.catalog = catalog = Catalog(contents, lambda: bool(owner.settings.advantage.estimator))
        self.progress = progress = Progress(row.id, contents, consumers)
        self._picking = picking = Picking(
            catalog,
            lambda: owner.row.policy_version,
            lambda: owner.settings.on_future_version != "deliver",
            progress.history,
            max_leased=limits.max_leased_experiences,
        )
        self.line = line = Line(
            self,
            consumers,
            picking,
            metrics,
            max_waiting=limits.max_waiting_samples,
            max_leased=limits.max_leased_experiences,
        )
        self.delivery = delivery = Delivery(
            self._name, consumers, catalog, picking, line, owner.discard_units
        )
        self.retirement = retirement = Retirement(row.id, contents, consumers, progress)
        self.offering = offering = Offering(contents, delivery, line, progress)
        self.quarantine = Quarantine(
            self._name, contents, catalog, delivery, progress, store, metrics, tasks
        )
        self.leasing = leasing = Leasing(
            row.id, self._name, self, retirement, store, metrics, tasks
        )
        self._sharing = Sharing(self._name, line, leasing)
        self.timelines = Timelines(
            self._name, contents, offering, progress, retirement, leasing, store, tasks
        )
        self.priorities = Priorities(row.id, contents, owner.revalue, store, tasks)

    def _name(self) -> str:
        return self._owner.name

    # --- what consumers ask for

    async def sample(
        self,
        consumer_name: str,
        want: Want,
        stop: asyncio.Event,
        *,
        rank_of: RankOf | None = None,
        prepare: Prepare | None = None,
    ) -> tuple[Lease | None, str]:
        """Lease one batch, waiting for it if need be; None and the reason if there is none.

        Args:
            consumer_name: Who asks.
            want: What it asks for.
            stop: Set when the server stops: the wait ends.
            rank_of: The lease is shared by the ranks of the consumer; this call is of one of them.
            prepare: Takes the lease and why it is short, and makes an answer of it, while it is
                being stored if it isn't shared. If that fails, the lease is given back, unless it
                is shared and the rank may come again.

        Raises:
            ConsumerNotFoundError: The buffer has no such consumer.
            BufferNotFoundError: The buffer was deleted.
            ResourceExhaustedError: Too many calls wait.
            WrongStateError: An open batch is shared by another number of ranks.
            StoreFullError: The lease can't be stored.
        """
        consumer = self.delivery.consumer(consumer_name)
        if rank_of is not None:
            lease, shortfall = await self._sharing.sample(consumer, want, rank_of, stop)
            if lease is None or lease.state != "open":
                return None, shortfall if lease is None else _RETURNED
            self._note_delivery(consumer, lease.part(rank_of.rank))
            if prepare is not None:
                await self._prepare_shared(lease, shortfall, prepare)
                if lease.state != "open":
                    return None, _RETURNED
            return lease, shortfall
        units, shortfall = await self.line.take(consumer, want, stop)
        if not units:
            return None, shortfall
        meanwhile = None if prepare is None else partial(prepare, shortfall)
        lease = await self.leasing.grant(
            consumer.name, units, want.lease_seconds, meanwhile=meanwhile
        )
        if lease.state != "open":
            return None, _RETURNED
        # Once the answer is on its way: counting takes long enough to be felt.
        asyncio.get_running_loop().call_soon(self._note_delivery, consumer, units)
        return lease, shortfall

    async def _prepare_shared(self, lease: Lease, shortfall: str, prepare: Prepare) -> None:
        try:
            await prepare(shortfall, lease)
        except asyncio.CancelledError:
            raise  # The rank gets its part when it comes again, and others may be at theirs.
        except BaseException as error:
            comes_again = isinstance(error, errors.ResourceExhaustedError) and (
                error.retry_delay_seconds is not None
            )
            if not comes_again:
                self.leasing.give_back([lease.id], "undeliverable")
            raise

    async def ack(
        self, lease_id: int, *, step: int | None = None, rank: int | None = None
    ) -> Lease:
        """End a lease: its experiences are consumed; see `Leasing.ack`."""
        lease = await self.leasing.ack(lease_id, step=step, rank=rank)
        consumer = self.delivery.consumers.get(lease.consumer)
        if step is not None and consumer is not None:
            self.timelines.keep_newest(consumer)
        return lease

    def _note_delivery(self, consumer: Consumer, units: Sequence[Unit]) -> None:
        if self.leasing.closed:
            return  # The series of a deleted buffer have ended.
        now = clock.now()
        entries = self._contents.by_seqs(seq for unit in units for seq in unit.seqs)
        ages = self._owner.staleness
        self._metrics.sampled(
            self._name(),
            consumer.name,
            num_bytes=sum(entry.record.payload_bytes for entry in entries),
            ages=[now - entry.record.push_time for entry in entries],
            staleness=[versions for entry in entries if (versions := ages(entry)) is not None],
        )

    def count_anew(self, consumer: Consumer) -> None:
        """A limiter came, went, or has another ratio: what has left doesn't count for it."""
        self.offering.count_anew(consumer)
        batch = self._store.batch()
        self.progress.put_consumer(batch, consumer)
        self._tasks.spawn(self._stored_or_behind((), self._store.commit(batch)))

    async def _stored_or_behind(self, seqs: Iterable[int], committed: Awaitable[None]) -> None:
        """Rows of consumers, and of the progress of these, are stored now or later."""
        try:
            await committed
        except BaseException:
            self.progress.note_behind(seqs)
            raise

    # --- consumers that are removed

    def note_removed(self, batch: WriteBatch, name: str) -> Mapping[int, ProgressRow]:
        """Add a consumer's removal to a batch: nothing more is delivered to it.

        Until that is on disk its leases, and what it keeps from leaving, are as before.

        Returns:
            Progress rows as they are stored, for `forget_consumer`; `keep_consumer` follows instead
            if the commit fails.
        """
        self.delivery.close_consumer(name)
        for lease in self.leasing.table.of_consumer(name):
            if lease.state == "open":
                batch.put_lease(self._owner.row.id, row_of(lease, state="nacked"))
        return self.progress.note_removed(batch, name)

    def forget_consumer(self, name: str, rows: Mapping[int, ProgressRow]) -> None:
        """A consumer's removal is on disk."""
        # Stored again: what happened to them meanwhile may have overwritten that they ended.
        held = [lease.id for lease in self.leasing.table.of_consumer(name)]
        self.leasing.give_back(held, "consumer_removed")
        self.delivery.remove_consumer(name)
        batch = self._store.batch()
        seqs = self.progress.forget_consumer(batch, name, rows)
        self._tasks.spawn(self._stored_or_behind(seqs, self._store.commit(batch)))

    def keep_consumer(self, name: str) -> None:
        """A consumer's removal could not be stored: offer it also what came or came back meanwhile."""
        consumer = self.delivery.consumers[name]
        consumer.closed = False
        self.offering.everything(consumer)

    # --- what the line asks for

    @property
    def name(self) -> str:
        """The buffer's name."""
        return self._owner.name

    def describe_wait(self) -> str:
        """What keeps experiences from being sampled; empty when nothing does."""
        return self._owner.describe_wait()

    def discard_units(self, units: Sequence[Unit]) -> None:
        """Units that nobody is to get any more came back."""
        self._owner.discard_units(units)

    def is_fresh(self, lease: Lease) -> bool:
        """Whether a batch that was put together a while ago, and that nobody has, may still go."""
        consumer = self.delivery.consumers.get(lease.consumer)
        return consumer is None or self._picking.is_fresh(consumer, lease.units, clock.now())

    def set_aside(self, consumer: Consumer, stale: Sequence[tuple[int, Verdict]]) -> None:
        """Units are too stale for a consumer: drop them, or let it pass them over."""
        if not stale or consumer.settings.staleness is None:
            return
        consumer.totals.stale += len(stale)
        policy = consumer.settings.staleness.on_stale
        units: list[list[Entry]] = []
        for key, verdict in stale:
            found = self.catalog.entries(consumer.settings, key)
            self._metrics.stale(self._name(), consumer.name, policy, verdict.label, len(found))
            units.append(found)
        if policy == "drop":
            units = self._owner.drop_stale(units, consumer.name)
        if entries := [entry for unit in units for entry in unit]:
            self._tasks.spawn(self._pass_over(consumer.name, entries))

    def _pass_over(self, consumer: str, entries: Sequence[Entry]) -> Awaitable[None]:
        batch = self._store.batch()
        reader = self.delivery.consumers[consumer]
        for key in {key_of(reader.settings, entry) for entry in entries}:
            reader.finished.add(key)
            if reader.settings.limiter is not None:
                reader.tally.passed_over(key, reader.settings.limiter.plan)
        self.progress.put_consumer(batch, reader)
        leaving = self.retirement.pass_over(batch, entries, consumer)
        return self._passed_over(leaving, self._store.commit(batch))

    async def _passed_over(self, leaving: Sequence[Entry], committed: Awaitable[None]) -> None:
        try:
            await committed
        except BaseException:
            # Passed over in memory all the same: after a restart it is judged again.
            self.retirement.stay(leaving, "consumed")
            self._owner.postpone(leaving)
            raise
        self.retirement.forget(leaving)

    # --- what leasing asks for

    def lent(self, lease: Lease) -> None:
        """A lease's units are out now."""
        self.delivery.lent(lease)

    def consumed(self, lease: Lease, units: Sequence[Unit]) -> None:
        """A lease ended with an ack."""
        self._owner.mark_expired(units)
        self.delivery.consumed(lease, units)

    def returned(self, lease: Lease, units: Sequence[Unit], *, redeliver: bool) -> None:
        """A lease ended without an ack."""
        self._owner.mark_expired(units)
        self.delivery.returned(lease, units, redeliver=redeliver)

    def blame(self, batch: WriteBatch, consumer: str, unit: Unit, reason: str) -> None:
        """A delivery ended badly: after too many of them the unit isn't offered any more."""
        self.quarantine.blame(batch, consumer, unit, reason)
