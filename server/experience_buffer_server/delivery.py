"""Delivery of one buffer: its consumers, what is offered to whom, and what leases do to them.

Who waits is the business of `line`, which units make a batch that of `picking`, leases are that of
`leasing`. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from experience_buffer import errors
from experience_buffer_server.catalog import Catalog, key_of, value_of
from experience_buffer_server.consumer_settings import ConsumerSettings
from experience_buffer_server.consumers import Consumer
from experience_buffer_server.groups import Entry
from experience_buffer_server.line import Line
from experience_buffer_server.picking import Picking
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.units import Unit


class Delivery:
    """The consumers of one buffer. Not thread-safe."""

    def __init__(
        self,
        buffer_name: Callable[[], str],
        consumers: dict[str, Consumer],
        catalog: Catalog,
        picking: Picking,
        line: Line,
        discarded: Callable[[Sequence[Unit]], None],
    ) -> None:
        self._name = buffer_name
        self._catalog = catalog
        self._picking = picking
        self._line = line
        self._discarded = discarded
        """Takes units that nobody is to get any more."""
        self.consumers = consumers
        """By name; others have a view of it."""
        self._is_closed = False

    # --- consumers and what they are offered

    def add_consumer(self, settings: ConsumerSettings) -> Consumer:
        """Add a consumer that has been offered nothing yet."""
        consumer = self.consumers[settings.name] = Consumer(settings)
        return consumer

    def remove_consumer(self, name: str) -> None:
        """Remove a consumer; calls that wait for it end."""
        self.close_consumer(name)
        del self.consumers[name]

    def close(self) -> None:
        """The buffer was deleted: calls that wait for a consumer end."""
        self._is_closed = True
        for name in list(self.consumers):
            self.remove_consumer(name)

    def close_consumer(self, name: str) -> None:
        """Deliver nothing more to a consumer; calls that wait for it end."""
        consumer = self.consumers[name]
        consumer.closed = True
        consumer.announce()
        for waiter in list(consumer.waiters):
            waiter.taken.cancel()

    def change_consumer(self, settings: ConsumerSettings) -> bool:
        """Tune a consumer that keeps its place; True if its limiter is to count anew, and then serve."""
        consumer = self.consumers[settings.name]
        if consumer.settings == settings:
            return False
        counts_anew = consumer.settings.samples_per_insert != settings.samples_per_insert
        consumer.take_on(settings, ((key, self._value(settings, key)) for key in consumer.ready))
        if not counts_anew:
            self._line.serve(consumer)
        return counts_anew

    def consumer(self, name: str) -> Consumer:
        """The consumer with this name.

        Raises:
            ConsumerNotFoundError: There is none.
            BufferNotFoundError: The buffer was deleted.
        """
        if self._is_closed:
            raise errors.BufferNotFoundError(
                f"buffer {self._name()!r} was deleted", subject=self._name()
            )
        consumer = self.consumers.get(name)
        if consumer is None or consumer.closed:
            names = sorted(other.name for other in self.consumers.values() if not other.closed)
            raise errors.ConsumerNotFoundError(
                f"buffer {self._name()!r} has no consumer {name!r}; it has {names}; add one with "
                "UpdateBuffer",
                subject=name,
            )
        return consumer

    def offer(self, consumer: Consumer, key: int, entries: Sequence[Entry]) -> None:
        """Let a consumer sample a unit once its policy version is published, and serve who waits."""
        self.offer_all(consumer, [(key, entries)])

    def offer_all(self, consumer: Consumer, units: Iterable[tuple[int, Sequence[Entry]]]) -> None:
        """Let a consumer sample many units: numbers and entries."""
        selector = consumer.settings.selector
        for key, entries in units:
            consumer.finished.discard(key)
            version = self._picking.awaited_version(entries)
            if version is not None:
                consumer.held[key] = version
            else:
                consumer.ready.add(key, value_of(selector, entries))
        self._line.serve(consumer)

    def revalue(self, entries: Sequence[Entry]) -> None:
        """What entries are chosen by has changed."""
        for consumer in self.consumers.values():
            for key in {key_of(consumer.settings, entry) for entry in entries}:
                if key in consumer.ready:
                    consumer.ready.update(key, self._value(consumer.settings, key))

    def release_held(self, published: int | None) -> None:
        """Offer what waited for a policy version that is published now; None: all, to be judged anew."""
        for consumer in self.consumers.values():
            due = [
                key
                for key, version in consumer.held.items()
                if published is None or version <= published
            ]
            for key in due:
                del consumer.held[key]
            consumer.unfit = (0, "")
            self._make_ready(consumer, due)

    def withdraw(self, entries: Sequence[Entry], *, keep_raw: bool = False) -> None:
        """Take back the units that hold any of the entries; a leased one isn't offered again."""
        for consumer in self.consumers.values():
            if keep_raw and consumer.settings.raw:
                continue
            for key in {key_of(consumer.settings, entry) for entry in entries}:
                consumer.withdraw(key)

    def is_leased(self, entry: Entry, *, to_raw: bool = True) -> bool:
        """True if a consumer holds the experience, or is about to; raw ones count or not."""
        return any(
            key_of(consumer.settings, entry) in consumer.out
            for consumer in self.consumers.values()
            if to_raw or not consumer.settings.raw
        )

    # --- what leases do to consumers

    def lent(self, lease: Lease) -> None:
        """A lease's units are out now."""
        consumer = self.consumers.get(lease.consumer)
        if consumer is not None:
            consumer.lent(lease)

    def consumed(self, lease: Lease, units: Sequence[Unit]) -> None:
        """A lease ended with an ack; what is to be sampled again is offered again."""
        consumer = self._took_back(lease)
        if consumer is not None:
            consumer.totals.acked += len(units)
            different = list(dict.fromkeys(units))
            own = [unit for unit in different if consumer.out.get(unit.key) is unit]
            for unit in own:
                del consumer.out[unit.key]
            for unit in own:
                # One that is due to leave may stay for as long as others hold it.
                if unit.gone and self._is_finished(consumer, unit.key):
                    consumer.finished.add(unit.key)
            self._make_ready(consumer, [unit.key for unit in own if not unit.gone])
        self._discarded([unit for unit in units if unit.gone])

    def returned(self, lease: Lease, units: Sequence[Unit], *, redeliver: bool) -> None:
        """A lease ended without an ack: offer its units again, in their old places."""
        consumer = self._took_back(lease)
        if consumer is not None:
            consumer.totals.redelivered += len(units) if redeliver else 0
            self._line.put_back(consumer, units)

    def _is_finished(self, consumer: Consumer, key: int) -> bool:
        entries = self._catalog.entries(consumer.settings, key)
        return bool(entries) and all(consumer.name in entry.acked for entry in entries)

    def _make_ready(self, consumer: Consumer, keys: Sequence[int]) -> None:
        for key in keys:
            self._picking.restock(consumer, key)
        self._line.serve(consumer)

    def _value(self, settings: ConsumerSettings, key: int) -> float:
        entries = self._catalog.entries(settings, key)
        return value_of(settings.selector, entries) if entries else 0.0

    def _took_back(self, lease: Lease) -> Consumer | None:
        consumer = self.consumers.get(lease.consumer)
        if consumer is None or lease.id not in consumer.leases:
            return None  # Its consumer was removed; one that was added since has its name only.
        consumer.took_back(lease)
        return consumer
