"""One named buffer behind one door: what can be asked of it, each as one call.

What happens behind it is in `flow` and the rooms. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from experience_buffer.looking import ConsumerPlace, ExperienceState
from experience_buffer_server.buffer.delivery import damage, quarantine, read_ahead
from experience_buffer_server.buffer.delivery.batch_picking import is_fresh
from experience_buffer_server.buffer.delivery.leasing import Prepare, ReturnReason
from experience_buffer_server.buffer.delivery.priorities import (
    PriorityUpdate,
    Updated,
    update_priorities,
)
from experience_buffer_server.buffer.delivery.rank_batches import RankOf
from experience_buffer_server.buffer.delivery.rewind import Released, Rewound
from experience_buffer_server.buffer.flow import Flow
from experience_buffer_server.buffer.inspection.delivered import delivered_at
from experience_buffer_server.buffer.inspection.places import kept_from, places_of, state_of
from experience_buffer_server.buffer.intake.annotation import AnnotateOutcome, Annotation
from experience_buffer_server.buffer.intake.push_reading import (
    Admitted,
    Outcome,
    Push,
)
from experience_buffer_server.buffer.intake.push_room import Patience
from experience_buffer_server.buffer.intake.task_pacing import Reserved
from experience_buffer_server.buffer.settings_change import SettingsChanges
from experience_buffer_server.buffer.state.consumers import Consumer, Want, checked_seconds
from experience_buffer_server.buffer.state.entries import Entry, Group
from experience_buffer_server.buffer.stats import BufferStats, buffer_stats
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.loop_turns import Turn
from experience_buffer_server.runtime.quotas import Charge
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.store.deliveries import Delivered
from experience_buffer_server.store.interface import BufferRow, LeaseRow

_UNCOUNTED = Charge()


class Buffer:
    """One buffer. Not thread-safe; belongs to its event loop.

    `flow` and `state` are for those who make, restore and change a buffer; others use its verbs.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.state = flow.state
        self._changing = SettingsChanges(flow)

    # --- what it is

    @property
    def id(self) -> int:
        """Its id in the store."""
        return self.state.row.id

    @property
    def name(self) -> str:
        """Its name."""
        return self.state.row.name

    @property
    def row(self) -> BufferRow:
        """As it is stored, or is about to be."""
        return self.state.row

    @property
    def settings(self) -> BufferSettings:
        """Those that hold now."""
        return self.state.settings

    @property
    def closed(self) -> bool:
        """Deleted: what is still under way for it has no effect."""
        return self.state.closed

    @property
    def policy_version(self) -> int | None:
        """The published one; None before the first."""
        return self.state.row.policy_version

    @property
    def create_time(self) -> float:
        """Seconds since the Unix epoch."""
        return self.state.row.create_time

    @property
    def version_changed(self) -> asyncio.Event:
        """Set, and replaced, when a policy version is published or the buffer is deleted."""
        return self.state.version_changed

    @property
    def num_items(self) -> int:
        """Experiences stored, tombstones not counted."""
        return self.state.contents.num_items

    @property
    def num_bytes(self) -> int:
        """Their payload bytes."""
        return self.state.contents.num_bytes

    # --- coming

    def check_push(self, *, num_tombstones: int, group_size: int) -> None:
        """Refuse a push before anything is made of it; see `Reading.check`."""
        self.flow.ingest.reading.check(num_tombstones=num_tombstones, group_size=group_size)

    async def admit(self, push: Push, turn: Turn) -> Admitted:
        """Read a push, a slice at a time; see `Reading.admit`."""
        return await self.flow.ingest.reading.admit(push, turn)

    async def push(
        self,
        push: Push,
        patience: Patience | None = None,
        charge: Charge = _UNCOUNTED,
        admitted: Admitted | None = None,
    ) -> list[Outcome]:
        """Store what can be stored; one outcome per experience, then one per tombstone.

        See `Ingest.push` for what it takes and raises.
        """
        pushing = self.flow.ingest.push(push, patience, charge, admitted)
        del admitted  # While it waits for room, it must hold nothing that was read.
        return await pushing

    async def annotate(self, annotations: Sequence[Annotation]) -> list[AnnotateOutcome]:
        """Add late fields to stored experiences; see `Annotating.annotate`."""
        return await self.flow.annotating.annotate(annotations)

    def check_annotations(self, count: int) -> None:
        """Refuse too many annotations before anything is made of them; see `Annotating.check_count`."""
        self.flow.annotating.check_count(count)

    def reserve(self, groups: Iterable[str], *, ttl_seconds: float = 0.0) -> Reserved:
        """Take places for tasks that are about to begin; see `Pacing.reserve`."""
        return self.flow.pacing.reserve(groups, now=clock.now(), ttl_seconds=ttl_seconds)

    async def seal(self, key: str, size: int = 0) -> Group:
        """Close a group, now or with `size` members; see `Grouping.seal`."""
        return await self.flow.grouping.seal(key, size)

    # --- delivery

    async def sample(
        self,
        consumer: str,
        want: Want,
        stop: asyncio.Event,
        *,
        rank_of: RankOf | None = None,
        prepare: Prepare | None = None,
    ) -> tuple[Lease | None, str]:
        """Lease one batch, waiting for it if need be; None and the reason if there is none.

        Args:
            consumer: Who asks.
            want: What it asks for.
            stop: Set when the server stops: the wait ends.
            rank_of: The lease is shared by the ranks of the consumer; this call is of one of them.
            prepare: Takes the lease and why it is short, and makes an answer of it, while it is
                being stored if it isn't shared. If that fails, the lease is given back, unless it
                is shared and the rank may come again.

        Raises:
            ConsumerNotFoundError: The buffer has no such consumer.
            BufferNotFoundError: The buffer was deleted.
            InvalidRequestError: The rank is not below the world size.
            ResourceExhaustedError: Too many calls wait.
            WrongStateError: An open batch is shared by another number of ranks.
            StoreFullError: The lease can't be stored.
        """
        asker = self.state.consumer(consumer)
        if rank_of is None:
            return await self.flow.leasing.sample(asker, want, stop, prepare)
        return await self.flow.rank_batches.sample(asker, want, rank_of, stop, prepare)

    async def ack(
        self, lease_id: int, *, step: int | None = None, rank: int | None = None
    ) -> Lease:
        """End a lease: its experiences are consumed; see `Acks.ack`."""
        lease = await self.flow.acks.ack(lease_id, step=step, rank=rank)
        consumer = self.state.consumers.get(lease.consumer)
        if step is not None and consumer is not None:
            self.flow.timelines.keep_newest(consumer)
        return lease

    async def nack(self, lease_id: int, *, reason: str, unread: bool = False) -> int:
        """End a lease: its experiences are offered again at once; see `Leasing.nack`."""
        return await self.flow.leasing.nack(lease_id, reason=reason, unread=unread)

    async def extend(self, lease_id: int, seconds: float = 0.0) -> Lease:
        """Let a lease expire some seconds from now, 0: the buffer's default; see `Leasing.extend`.

        Raises:
            InvalidRequestError: The time is out of bounds.
        """
        seconds = checked_seconds(self.settings, seconds)
        return await self.flow.leasing.extend(lease_id, seconds)

    def give_back(self, lease_ids: Iterable[int], reason: ReturnReason) -> None:
        """Give back those of the leases that are still open; see `Leasing.give_back`."""
        self.flow.leasing.give_back(lease_ids, reason)

    def is_open(self, lease_id: int) -> bool:
        """Whether a lease hasn't ended; one whose end is being stored may be open again."""
        return self.flow.leasing.is_open(lease_id)

    def is_fresh(self, lease: Lease) -> bool:
        """Whether a batch that was put together a while ago, and that nobody has, may still go."""
        consumer = self.state.consumers.get(lease.consumer)
        return consumer is None or is_fresh(self.state, consumer, lease.units, clock.now())

    def fetched(self, units: Iterable[Unit]) -> AbstractAsyncContextManager[None]:
        """Have in memory, within the block, what of units would wait for the disk."""
        return read_ahead.fetched_units(self.state, units)

    def fetched_bytes(self, units: Iterable[Unit]) -> int:
        """What `fetched` has in memory, beside what is made of it."""
        return sum([e.record.payload_bytes for e in read_ahead.large_entries(self.state, units)])

    def prefetches(self) -> read_ahead.Prefetches:
        """For one stream: reads large payloads of its leases before these can be sent."""
        return read_ahead.Prefetches(self.state)

    def settle(
        self, lease: Lease, units: Collection[Unit], reasons: Mapping[int, str], *, is_enough: bool
    ) -> bool:
        """Go on with a lease of which some units can't be read; see `damage.settle`."""
        leasing = self.flow.leasing
        return damage.settle(self.state, leasing, lease, units, reasons, is_enough=is_enough)

    async def rewind(self, consumer: str, step: int) -> Rewound:
        """Undo a consumer's acks after a step and return its open leases; see `Timelines.rewind`."""
        return await self.flow.timelines.rewind(self.state.consumer(consumer), step)

    async def declare_safe(self, consumer: str, step: int) -> Released:
        """Keep a consumer's acks up to a step no longer; see `Timelines.declare_safe`."""
        return await self.flow.timelines.declare_safe(self.state.consumer(consumer), step)

    async def release(self, consumer: str, uids: Sequence[str] = ()) -> int:
        """Offer quarantined units to their consumer again; see `quarantine.release`."""
        reader = self.state.consumer(consumer)
        return await quarantine.release(self.state, self.flow.offers, reader, uids)

    async def update_priorities(self, updates: Sequence[PriorityUpdate]) -> Updated:
        """Set the priorities that can be set, all or none; see `delivery.priorities`."""
        return await update_priorities(self.state, updates)

    async def publish(self, version: int) -> int | None:
        """Note the policy version that the trainer has published; see `BufferState.publish`."""
        return await self.state.publish(version)

    # --- leaving

    async def drop(self, key: str, reason: str) -> int:
        """Discard the newest group of a key, and treat later members as late; see `Grouping.drop`.

        The place that was reserved for it is free.
        """
        num_dropped = await self.flow.grouping.drop(key, reason)
        self.flow.pacing.reservations.release(key)
        return num_dropped

    async def delete(self, entries: Sequence[Entry]) -> tuple[list[Entry], int]:
        """Remove entries that nobody holds; a removed uid can be pushed again. See `Removal.delete`."""
        return await self.flow.removal.delete(entries)

    # --- looking

    def consumer(self, name: str) -> Consumer:
        """The consumer with this name; see `BufferState.consumer`."""
        return self.state.consumer(name)

    def find(self, uid: str) -> Entry | None:
        """What is stored under a uid, or is about to be."""
        return self.state.contents.by_uid(uid)

    def stored(self, uid: str) -> Entry | None:
        """What is on disk under a uid; not what is leaving: its payload may be gone, undamaged."""
        entry = self.find(uid)
        return entry if entry is not None and entry.durable and not entry.leaving else None

    def entries(self, seqs: Iterable[int]) -> list[Entry]:
        """Those of the entries that are still here."""
        return self.state.contents.by_seqs(seqs)

    def since(self, seq: int) -> Iterator[Entry]:
        """The entries with larger numbers, oldest first; nothing may change meanwhile."""
        return self.state.contents.since(seq)

    def delivered_at(
        self, consumer: str, step: int, leases: Iterable[LeaseRow], gone: Mapping[int, int]
    ) -> tuple[dict[int, Entry], list[Delivered]]:
        """What a training step has consumed, as delivered; see `inspection.delivered`."""
        return delivered_at(self.state, consumer, step, leases, gone)

    @property
    def last_seq(self) -> int:
        """The number that was given last to an entry, or to a priority."""
        return self.state.contents.last_seq

    def times_sampled(self, entry: Entry) -> int:
        """Deliveries of an experience that were acknowledged, over all consumers."""
        return self.state.progress.times_acked(entry)

    def staleness(self, entry: Entry) -> int | None:
        """Published policy version minus the entry's lowest; None when either is unknown."""
        return self.state.staleness(entry)

    def magnitude(self, entry: Entry) -> float | None:
        """Mean of |advantage| over an entry's response tokens; None where none were computed."""
        return self.state.magnitude(entry)

    def check_sound(self, entry: Entry) -> None:
        """Refuse, with a DataLossError, to look at what is set aside; see `damage.check`."""
        damage.check(self.state, entry)

    def set_aside(self, reasons: Mapping[int, str]) -> None:
        """Offer experiences to nobody any more: by seq, what of each can't be read back."""
        damage.set_aside(self.state, reasons)

    def state_of(self, entry: Entry) -> ExperienceState:
        """Where an experience is on its way."""
        return state_of(self.state, entry)

    def places_of(self, entry: Entry) -> tuple[ConsumerPlace, ...]:
        """Where an experience is for each consumer."""
        return places_of(self.state, entry)

    def kept_from(self, entry: Entry) -> str:
        """What keeps an experience from being delivered, in words; empty where nothing does."""
        return kept_from(self.state, entry)

    def stats(self) -> BufferStats:
        """What it holds, and what waits for what."""
        return buffer_stats(self.flow)

    # --- the buffer itself

    def change_settings(self, new: BufferSettings) -> asyncio.Future[None]:
        """Take over new settings and store them; the task ends when they are on disk.

        They hold at once, for what is pushed next. Nothing that could not be taken back happens
        before they are on disk: until then a consumer that is to go keeps its leases, and
        experiences from leaving.

        The task raises StoreError where they can't be stored: everything is as before.
        """
        return self._changing.start(new)

    def tick(self, now: float) -> None:
        """Do what time asks for."""
        self.flow.tick(now)

    def close(self) -> None:
        """Deleted: calls that wait end, what is under way has no effect."""
        self.flow.close()

    async def drain(self) -> None:
        """Wait for what is under way."""
        await self.state.tasks.drain()

    def forget(self) -> None:
        """Let go of what it held; after `close` and `drain`."""
        self.state.contents.clear()
        self.state.progress.clear()
        self.state.telemetry.clear()
