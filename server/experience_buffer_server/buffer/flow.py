"""The rooms of one buffer, each made with those that it calls, and what happens between them.

Groups become whole, advantages arrive, units are offered, come back and leave: what one room says of
that reaches the others here. Everything runs on one event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from experience_buffer_server.buffer.compute.computing import Computing
from experience_buffer_server.buffer.compute.scheduler import Computer
from experience_buffer_server.buffer.delivery import damage
from experience_buffer_server.buffer.delivery.acks import Acks
from experience_buffer_server.buffer.delivery.leasing import Leasing
from experience_buffer_server.buffer.delivery.offers import Offers
from experience_buffer_server.buffer.delivery.rank_batches import RankBatches
from experience_buffer_server.buffer.delivery.rewind import Timelines
from experience_buffer_server.buffer.delivery.sample_queue import Line
from experience_buffer_server.buffer.intake.admission import PayloadReader
from experience_buffer_server.buffer.intake.annotate import Annotating
from experience_buffer_server.buffer.intake.push import Ingest
from experience_buffer_server.buffer.intake.push_room import PushRoom
from experience_buffer_server.buffer.intake.task_pacing import Pacing
from experience_buffer_server.buffer.leaving.eviction import Eviction
from experience_buffer_server.buffer.leaving.group_closing import Grouping
from experience_buffer_server.buffer.leaving.removal import Removal
from experience_buffer_server.buffer.leaving.retention import Retention
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.departure import Cause
from experience_buffer_server.buffer.state.entries import Entry, Group
from experience_buffer_server.buffer.state.group_table import groups_of
from experience_buffer_server.buffer.telemetry.seen import ConsumerDepth, Depth
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.runtime.tuning import TUNING
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.settings.server import ServerSection
from experience_buffer_server.store.interface import BufferRow, Store, WriteBatch

_PRUNE_SECONDS = 60.0
"""Between rounds of forgetting what was remembered for longer than the horizon."""


class Flow:
    """The way of experiences through one buffer; see `BufferEvents`. Not thread-safe."""

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
        self.state = state = BufferState(row, limits, events=self, store=store, metrics=metrics)
        self._next_prune = 0.0
        self.computing = Computing(state, computer)
        self.line = Line(state)
        self.offers = Offers(state, self.line)
        self.leasing = Leasing(state, self.offers)
        self.acks = Acks(state, self.offers, self.leasing)
        self.rank_batches = RankBatches(state, self.line, self.leasing)
        self.timelines = Timelines(state, self.offers, self.leasing, self.acks)
        self.removal = Removal(state, self.offers)
        self.grouping = Grouping(state, self.removal)
        self.eviction = Eviction(state, self.removal, self.grouping)
        self.retention = Retention(state, self.offers, self.removal, self.grouping)
        self.pacing = Pacing(state)
        self.push_room = PushRoom(state, self.eviction, self.pacing)
        self.ingest = Ingest(state, self.push_room, payloads)
        self.annotating = Annotating(state)
        for consumer in state.settings.consumers:
            state.add_consumer(consumer)
        self.eviction.settings_changed()
        self.retention.settings_changed()
        if state.settings.advantage.estimator:
            computer.warm_up()

    # --- from stored to available

    def stored(self, entries: Sequence[Entry]) -> None:
        """New entries are on disk: compute, offer, and see which groups are whole now."""
        for entry in entries:
            entry.durable = True
            if entry.group is not None:
                entry.group.num_durable += 1
            self.offers.offer_entry(entry)
        self.eviction.stored(entries)
        self.advance(entries)

    def advance(self, entries: Sequence[Entry]) -> None:
        """Bring durable entries and their groups as far as they can go."""
        if self.state.closed:
            return
        if not self.state.settings.needs_groups:
            alone = [entry for entry in entries if _can_advance(entry)]
            if not self.state.settings.advantage.estimator:
                self.make_available(alone)
            else:
                for entry in alone:
                    self.computing.submit([entry])
        for group in groups_of(entries):
            self.check_whole(group)

    def check_whole(self, group: Group) -> None:
        """Go on with a group that is closed and all on disk, and with one that was dropped."""
        if group.row.closed == "dropped":
            gone = [entry for entry in group.members if entry.durable]
            self.removal.discard(gone, Cause("group_dropped", group.row.note))
        if not group.is_whole or group.available or self.state.closed:
            return
        votes = [entry for entry in group.votes if entry.is_staying]
        if not (group.completed or any(entry.missing for entry in votes)):
            group.completed = True
            self.state.telemetry.completed(votes)
        group.available = bool(votes) and all(entry.available for entry in votes)
        if not votes:
            self.removal.discard(group.members, Cause("failed", "nothing but failed rollouts"))
            return
        self.offers.offer_group(group)
        self.eviction.stored(group.members[:1])
        damage.hold_back(self.state, group)
        can_be_computed = not any(
            e.computing or e.quarantine or e.missing or e.changing for e in votes
        )
        if not group.available and self.state.settings.needs_groups and can_be_computed:
            # All together, also those that could be sampled before the estimator was set.
            self.computing.submit(votes)

    def make_available(self, entries: Sequence[Entry]) -> None:
        """Let consumers sample the entries, and the groups that are available with them."""
        fresh = [entry for entry in entries if not entry.available]
        for entry in fresh:
            entry.available = True
            self.offers.offer_entry(entry)
        for group in groups_of(fresh):
            self.check_whole(group)

    # --- on the way out

    def returning(self, units: Sequence[Unit]) -> None:
        """Units are about to come back: mark those that are too old; the others may be evicted."""
        if not self.state.num_pending_settings:
            self.retention.mark(units, clock.now())
        self.eviction.returned(units)

    def discard_units(self, units: Sequence[Unit]) -> None:
        """Units that nobody is to get any more came back."""
        if not self.state.num_pending_settings:
            units = self.retention.take(units, clock.now())
        self.removal.discard_units(units)

    def drop_stale(self, units: Iterable[list[Entry]], consumer: str) -> list[list[Entry]]:
        """Remove units that are too stale for a consumer, each as a whole or not at all.

        Returns:
            Those that stay: somebody holds any of it, or may be rewound to before it was acknowledged,
            or another consumer was and is to get it again; or it would tear a group.
        """
        kept: list[list[Entry]] = []
        dropped: list[Entry] = []
        by_item = self.state.consumers[consumer].settings.unit == "item"
        for unit in units:
            is_torn = by_item and any(self._is_needed(entry.group) for entry in unit)
            if is_torn or any(
                self.state.is_leased(entry) or self.state.is_wanted(entry, but_for=consumer)
                for entry in unit
            ):
                kept.append(unit)
            else:
                dropped += unit
        self.removal.drop(dropped, Cause("stale", f"too stale for consumer {consumer!r}"))
        self.state.metrics.dropped(self.state.name, "stale", len(dropped))
        return kept

    def _is_needed(self, group: Group | None) -> bool:
        """Whether a group would never be whole, or be delivered in part, without one of its members."""
        if group is None:
            return False
        if any(other.settings.unit == "group" for other in self.state.consumers.values()):
            return True
        return self.state.settings.needs_groups and not group.available

    def postpone(self, entries: Sequence[Entry]) -> None:
        """Remove what every consumer has done with, as soon as the store has room."""
        self.removal.postpone(entries)

    def withhold(self, group: Group, batch: WriteBatch) -> None:
        """Discard a group whose rewards are all equal; the batch is about to say that it is closed."""
        self.state.tasks.spawn(self.grouping.withhold(group, batch))

    def removed(self, entry: Entry) -> None:
        """An entry was removed; its group still has it."""
        self.eviction.removed(entry)

    def room_made(self) -> None:
        """There is less than before: pushes that wait for room may have it."""
        self.push_room.look()

    # --- changes of what is there

    def revalue(self, entries: Sequence[Entry]) -> None:
        """What entries are chosen by, to be delivered or to be removed, has changed."""
        self.offers.revalue(entries)
        self.eviction.revalue(entries)

    def set_aside(self, reasons: Mapping[int, str]) -> None:
        """Offer experiences to nobody any more: by seq, what of each can't be read back."""
        damage.set_aside(self.state, reasons)

    def published(self, version: int) -> None:
        """A policy version is on disk: what waited for it is offered, who watches is told."""
        self.state.announce_version()
        self.offers.release_held(version)

    # --- in words

    def describe_wait(self) -> str:
        """What keeps experiences from being sampled; empty when nothing does."""
        waits = (
            self.grouping.describe(),
            self.describe_computing(),
            self.push_room.describe_full(),
            self.state.changes.describe(),
        )
        return "; ".join(wait for wait in waits if wait)

    def describe_computing(self) -> str:
        """What computing waits for: missing fields, a batch that isn't full, a cure; or empty."""
        waits = (
            self.grouping.describe_missing(),
            self.computing.describe(),
            self.state.contents.describe_quarantined(),
        )
        return "; ".join(wait for wait in waits if wait)

    # --- time

    def tick(self, now: float) -> None:
        """Do what time asks for: expire leases, close groups at their deadline, forget."""
        self.state.changes.tick(now)
        self.leasing.expire(now)
        self.grouping.expire(now)
        self.pacing.reservations.expire(now)
        self.eviction.tick(now)
        # What they remove could not be taken back.
        if not self.state.num_pending_settings:
            self.retention.tick(now)
            self.eviction.shed()
        self.push_room.look()
        self.computing.tick(now)
        if self.state.telemetry.trends.is_due(now):
            self.state.telemetry.sample(now, depth_of(self.state))
        if now >= self._next_prune:
            self._next_prune = now + _PRUNE_SECONDS
            horizon = self.state.settings.duplicate_horizon_seconds
            self.state.tasks.spawn(self._prune(now - horizon))

    async def _prune(self, before_time: float) -> None:
        while not self.state.closed:
            count = await self.state.store.prune(
                self.state.id, before_time, limit=TUNING.forgotten_at_once
            )
            if count < TUNING.forgotten_at_once:
                break

    def close(self) -> None:
        """Deleted: calls that wait end, what is under way has no effect."""
        self.state.closed = True
        self.state.announce_version()
        self.push_room.look()
        self.state.changes.close()
        self.computing.close()
        for name in list(self.state.consumers):
            self.state.remove_consumer(name)


def depth_of(state: BufferState) -> Depth:
    """What a buffer holds now, for its trends."""
    return Depth(
        state.contents.num_items,
        state.contents.num_bytes,
        len(state.contents.groups.open_groups),
        tuple(
            ConsumerDepth(
                consumer.name,
                consumer.settings.raw,
                len(consumer.ready),
                consumer.num_leased,
                len(consumer.waiters),
            )
            for consumer in state.consumers.values()
        ),
    )


def _can_advance(entry: Entry) -> bool:
    idle = not (entry.available or entry.computing or entry.quarantine or entry.changing)
    return idle and not entry.missing and entry.is_staying and not entry.record.tombstone
