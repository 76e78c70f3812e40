"""What is offered to which consumer, and when: single experiences or whole groups.

An experience is offered once its advantages are there; to a `raw` consumer once it is stored. What
consumers do with their offers is the business of `delivery`. Belongs to one buffer and its event
loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from experience_buffer_server.catalog import key_of
from experience_buffer_server.consumers import Consumer
from experience_buffer_server.contents import Contents
from experience_buffer_server.delivery import Delivery
from experience_buffer_server.groups import Entry, Group
from experience_buffer_server.line import Line
from experience_buffer_server.progress import Progress


class Offering:
    """Turns entries and groups into units of delivery. Not thread-safe."""

    def __init__(
        self, contents: Contents, delivery: Delivery, line: Line, progress: Progress
    ) -> None:
        self._contents = contents
        self._delivery = delivery
        self._line = line
        self._progress = progress

    def entry(self, entry: Entry) -> None:
        """Offer an entry to the consumers that take items and may have it now."""
        for consumer in self._delivery.consumers.values():
            self._entry(consumer, entry)

    def group(self, group: Group) -> None:
        """Offer a group to the consumers that take groups and may have it now."""
        for consumer in self._delivery.consumers.values():
            self._group(consumer, group)

    def everything(self, consumer: Consumer) -> None:
        """Offer a consumer all that it may have and hasn't got or consumed; for the start."""
        if consumer.settings.unit == "item":
            units = (
                (entry.record.seq, [entry])
                for entry in self._contents
                if _may_have_entry(consumer, entry) and _wants(consumer, entry.record.seq, [entry])
            )
            self._delivery.offer_all(consumer, units)
        else:
            for group in self._contents.groups:
                self._group(consumer, group)
        self.recount(consumer)

    def recount(self, consumer: Consumer) -> None:
        """See what is consumed and still here, and what the limiter is to count."""
        self._recount_all(consumer)
        self._line.serve(consumer)

    def count_anew(self, consumer: Consumer) -> None:
        """Let the limiter count what can be sampled now, and nothing that has happened before."""
        self._recount_all(consumer)
        consumer.tally.rebase(consumer.finished)
        self._line.serve(consumer)

    def _recount_all(self, consumer: Consumer) -> None:
        has_limiter = consumer.settings.limiter is not None
        for entry in self._contents:
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
        if key not in consumer.tally and self._progress.was_passed_over(entry, consumer):
            times = self._progress.times_sampled(entry.record.seq, consumer.name)
            consumer.tally.passed_before(key, limiter.plan, times=times)
            return
        if key not in consumer.tally and (key in consumer.finished or consumer.has(key)):
            self._count(consumer, key, entry)

    def _count(self, consumer: Consumer, key: int, entry: Entry) -> None:
        """Tell the limiter of a unit that can be sampled, or was."""
        members = [entry] if entry.group is None else entry.group.votes
        members = [entry] if consumer.settings.unit == "item" else members
        times = self._progress.times_sampled(entry.record.seq, consumer.name)
        times = max(times, key in consumer.finished) + _times_out(consumer, key)
        num_bytes = sum(member.record.payload_bytes for member in members)
        consumer.tally.arrived(key, num_bytes=num_bytes, times=times)

    def _entry(self, consumer: Consumer, entry: Entry) -> None:
        if consumer.settings.unit == "item" and _may_have_entry(consumer, entry):
            self._offer(consumer, entry.record.seq, [entry])

    def _group(self, consumer: Consumer, group: Group) -> None:
        if consumer.settings.unit != "group":
            return
        if group.damage:
            return
        if group.available or (consumer.settings.raw and group.is_whole):
            staying = [entry for entry in group.votes if entry.is_staying]
            self._offer(consumer, group.row.id, staying)

    def _offer(self, consumer: Consumer, key: int, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        is_wanted = consumer.has(key) or _wants(consumer, key, entries)
        if consumer.settings.limiter is not None and (
            is_wanted or not all(self._progress.was_passed_over(e, consumer) for e in entries)
        ):
            self._count(consumer, key, entries[0])
        if not is_wanted:
            # What it hadn't consumed of it has left.
            consumer.finished.add(key)
            consumer.tally.used_up(key)
        elif not consumer.has(key):
            self._delivery.offer(consumer, key, entries)


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
