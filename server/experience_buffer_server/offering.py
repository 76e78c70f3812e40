"""What is offered to which consumer, and when: single experiences or whole groups.

An experience is offered once its advantages are there; to a `raw` consumer once it is stored. What
consumers do with their offers is the business of `delivery`. Belongs to one buffer and its event
loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from experience_buffer_server.contents import Contents
from experience_buffer_server.delivery import Consumer, Delivery
from experience_buffer_server.groups import Entry, Group
from experience_buffer_server.retirement import Retirement
from experience_buffer_server.sampling.queue import Unit


class Offering:
    """Turns entries and groups into units of delivery. Not thread-safe."""

    def __init__(self, contents: Contents, delivery: Delivery, retirement: Retirement) -> None:
        self._contents = contents
        self._delivery = delivery
        self._retirement = retirement

    def entry(self, entry: Entry) -> None:
        """Offer an entry to the consumers that take items and may have it now."""
        for consumer in self._delivery.consumers.values():
            self._entry(consumer, entry)

    def group(self, group: Group) -> None:
        """Offer a group to the consumers that take groups and may have it now."""
        for consumer in self._delivery.consumers.values():
            self._group(consumer, group)

    def everything(self, consumer: Consumer) -> None:
        """Offer a consumer all that it may have and hasn't got or consumed."""
        for entry in self._contents:
            self._entry(consumer, entry)
        for group in self._contents.groups:
            self._group(consumer, group)

    def _entry(self, consumer: Consumer, entry: Entry) -> None:
        if consumer.settings.unit != "item" or entry.record.tombstone:
            return
        if entry.available or (consumer.settings.raw and entry.durable):
            self._offer(consumer, [entry])

    def _group(self, consumer: Consumer, group: Group) -> None:
        if consumer.settings.unit != "group":
            return
        if group.available or (consumer.settings.raw and group.is_whole):
            self._offer(consumer, group.votes)

    def _offer(self, consumer: Consumer, entries: Sequence[Entry]) -> None:
        entries = [entry for entry in entries if entry.is_staying]
        if all(consumer.name in entry.acked for entry in entries) or any(
            entry.record.seq in consumer.units for entry in entries
        ):
            return
        unit = Unit(
            tuple(sorted(entry.record.seq for entry in entries)),
            sum(entry.record.payload_bytes for entry in entries),
        )
        unit.num_deliveries = self._retirement.num_deliveries(unit.order, consumer.name)
        self._delivery.offer(consumer, unit)
