"""What the consumers of one buffer are offered, and what leases do to them.

Who waits is the business of `sample_queue`, which units make a batch that of `batch_picking`, leases are that of
`leasing`. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from experience_buffer_server.buffer.delivery.batch_picking import awaited_version, restock
from experience_buffer_server.buffer.delivery.sample_queue import Line
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.entries import Entry, Group, key_of, value_of
from experience_buffer_server.buffer.state.group_table import groups_of
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.staleness import UNKNOWN_VERSION
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.settings.consumer import ConsumerSettings


class Offers:
    """Offers one buffer's units to its consumers. Not thread-safe."""

    def __init__(self, state: BufferState, line: Line) -> None:
        self._state = state
        self.line = line

    # --- entries and groups

    def offer_entry(self, entry: Entry) -> None:
        """Offer an entry to the consumers that take items and may have it now."""
        for consumer in self._state.consumers.values():
            if consumer.settings.unit == "item" and _may_have_entry(consumer, entry):
                self._offer(consumer, entry.record.seq, [entry])

    def offer_group(self, group: Group) -> None:
        """Offer a group to the consumers that take groups and may have it now."""
        for consumer in self._state.consumers.values():
            self._group(consumer, group)

    def offer_again(self, entries: Collection[Entry]) -> None:
        """Offer entries, and their groups, to those who may have them now."""
        for entry in entries:
            self.offer_entry(entry)
        for group in groups_of(entries):
            self.offer_group(group)

    def offer_everything(self, consumer: Consumer) -> None:
        """Offer a consumer all that it may have and hasn't got or consumed; for the start."""
        if consumer.settings.unit == "item":
            units = (
                (entry.record.seq, [entry])
                for entry in self._state.contents
                if _may_have_entry(consumer, entry) and _wants(consumer, entry.record.seq, [entry])
            )
            self.offer_units(consumer, units)
        else:
            for group in self._state.contents.groups:
                self._group(consumer, group)
        self._recount_all(consumer)
        self.line.serve(consumer)

    def count_anew(self, consumer: Consumer) -> None:
        """Let the limiter count what can be sampled now, and nothing that has happened before."""
        self._recount_all(consumer)
        consumer.tally.rebase(consumer.finished)
        self.line.serve(consumer)

    def _recount_all(self, consumer: Consumer) -> None:
        """See what is consumed and still here, and what the limiter is to count."""
        has_limiter = consumer.settings.limiter is not None
        for entry in self._state.contents:
            if not has_limiter and consumer.name not in entry.acked:
                continue
            self._recount(consumer, entry)

    def _recount(self, consumer: Consumer, entry: Entry) -> None:
        key = key_of(consumer.settings, entry)
        if key and consumer.name in entry.acked and not consumer.has(key):
            consumer.finished.add(key)
        limiter = consumer.settings.limiter
        if limiter is None or not key or entry.record.tombstone:
            return
        if entry.leaving:
            return  # It is still out, and won't come back to the limiter's counts.
        if key not in consumer.tally and self._state.progress.was_passed_over(entry, consumer):
            times = self._times_sampled(entry, consumer)
            consumer.tally.passed_before(key, limiter.plan, times=times)
            return
        if key not in consumer.tally and (key in consumer.finished or consumer.has(key)):
            self._count(consumer, key, entry)

    def _times_sampled(self, entry: Entry, consumer: Consumer) -> int:
        known = self._state.progress.known(entry.record.seq)
        return known.times_sampled.get(consumer.name, 0)

    def _count(self, consumer: Consumer, key: int, entry: Entry) -> None:
        """Tell the limiter of a unit that can be sampled, or was."""
        members = [entry] if entry.group is None else entry.group.votes
        members = [entry] if consumer.settings.unit == "item" else members
        times = self._times_sampled(entry, consumer)
        times = max(times, key in consumer.finished) + _times_out(consumer, key)
        num_bytes = sum(member.record.payload_bytes for member in members)
        consumer.tally.arrived(key, num_bytes=num_bytes, times=times)

    def _group(self, consumer: Consumer, group: Group) -> None:
        if consumer.settings.unit != "group" or group.damage:
            return
        if group.available or (consumer.settings.raw and group.is_whole):
            staying = [entry for entry in group.votes if entry.is_staying]
            self._offer(consumer, group.row.id, staying)

    def _offer(self, consumer: Consumer, key: int, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        is_wanted = consumer.has(key) or _wants(consumer, key, entries)
        if consumer.settings.limiter is not None and (
            is_wanted or not all(self._state.progress.was_passed_over(e, consumer) for e in entries)
        ):
            self._count(consumer, key, entries[0])
        if not is_wanted:
            # What it hadn't consumed of it has left.
            consumer.finished.add(key)
            consumer.tally.used_up(key)
        elif not consumer.has(key):
            self.offer_units(consumer, [(key, entries)])

    # --- units

    def offer_units(self, consumer: Consumer, units: Iterable[tuple[int, Sequence[Entry]]]) -> None:
        """Let a consumer sample units, numbers and entries, once their policy version is published."""
        selector = consumer.settings.selector
        for key, entries in units:
            consumer.finished.discard(key)
            version = awaited_version(self._state, consumer.settings, entries)
            if version is not None:
                consumer.held[key] = version
            else:
                consumer.ready.add(key, value_of(selector, entries))
        self.line.serve(consumer)

    def revalue(self, entries: Sequence[Entry]) -> None:
        """What entries are chosen by, or judged by, has changed."""
        for consumer in self._state.consumers.values():
            for key in {key_of(consumer.settings, entry) for entry in entries}:
                if key in consumer.ready:
                    consumer.ready.update(key, self._value(consumer.settings, key))
                elif consumer.held.get(key) == UNKNOWN_VERSION:
                    self._release(consumer, [key])

    def release_held(self, published: int | None) -> None:
        """Offer what waited for a policy version that is published now; None: all, to be judged anew."""
        for consumer in self._state.consumers.values():
            held = consumer.held.items()
            self._release(consumer, [k for k, v in held if published is None or v <= published])

    def _release(self, consumer: Consumer, keys: Sequence[int]) -> None:
        """Let units be chosen, and judged anew then."""
        for key in keys:
            del consumer.held[key]
        consumer.unfit = (0, "")
        self._make_ready(consumer, keys)

    def change_consumer(self, settings: ConsumerSettings) -> bool:
        """Tune a consumer that keeps its place; True if its limiter is to count anew, and then serve."""
        consumer = self._state.consumers[settings.name]
        if consumer.settings == settings:
            return False
        counts_anew = consumer.settings.samples_per_insert != settings.samples_per_insert
        is_judged_anew = consumer.settings.staleness != settings.staleness
        consumer.take_on(settings, ((key, self._value(settings, key)) for key in consumer.ready))
        if is_judged_anew:
            self._release(consumer, list(consumer.held))
        if not counts_anew:
            self.line.serve(consumer)
        return counts_anew

    # --- what leases do to consumers

    def consumed(self, lease: Lease, units: Sequence[Unit]) -> None:
        """A lease ended with an ack; what is to be sampled again is offered again."""
        consumer = self._took_back(lease)
        if consumer is not None:
            consumer.num_acked += len(units)
            different = list(dict.fromkeys(units))
            own = [unit for unit in different if consumer.out.get(unit.key) is unit]
            for unit in own:
                del consumer.out[unit.key]
            for unit in [unit for unit in own if unit.gone]:
                # One that is due to leave may stay for as long as others hold it.
                left = self._state.contents.members_of(consumer.settings, unit.key)
                if left and all(consumer.name in entry.acked for entry in left):
                    consumer.finished.add(unit.key)
            self._make_ready(consumer, [unit.key for unit in own if not unit.gone])
        self._state.events.discard_units([unit for unit in units if unit.gone])

    def returned(self, lease: Lease, units: Sequence[Unit], *, redeliver: bool) -> None:
        """A lease ended without an ack: offer its units again, in their old places."""
        consumer = self._took_back(lease)
        if consumer is not None:
            consumer.num_redelivered += len(units) if redeliver else 0
            self.line.put_back(consumer, units)

    def _make_ready(self, consumer: Consumer, keys: Sequence[int]) -> None:
        for key in keys:
            restock(self._state, consumer, key)
        self.line.serve(consumer)

    def _value(self, settings: ConsumerSettings, key: int) -> float:
        entries = self._state.contents.members_of(settings, key)
        return value_of(settings.selector, entries) if entries else 0.0

    def _took_back(self, lease: Lease) -> Consumer | None:
        consumer = self._state.consumers.get(lease.consumer)
        if consumer is None or lease.id not in consumer.leases:
            return None  # Its consumer was removed; one that was added since has its name only.
        consumer.took_back(lease)
        return consumer


def _may_have_entry(consumer: Consumer, entry: Entry) -> bool:
    """Whether a consumer of items may have an entry now."""
    ready = entry.available or (consumer.settings.raw and entry.durable)
    return ready and entry.is_staying and not entry.record.tombstone and not entry.damage


def _wants(consumer: Consumer, key: int, entries: Sequence[Entry]) -> bool:
    """Whether a consumer has neither got nor consumed a unit."""
    if not entries or consumer.has(key):
        return False
    return not all(consumer.name in entry.acked for entry in entries)


def _times_out(consumer: Consumer, key: int) -> int:
    """How often a unit is in the batch that it is out with: drawn with replacement, several times."""
    unit = consumer.out.get(key)
    lease = None if unit is None else consumer.leases.get(unit.lease_id)
    return int(unit is not None) if lease is None else sum(other is unit for other in lease.units)
