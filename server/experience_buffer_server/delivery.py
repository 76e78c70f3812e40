"""Delivery of one buffer: its consumers, who waits in line, and what is offered to whom.

Which units make a batch is the business of `picking`, leases are that of `leasing`. Belongs to one
buffer and its event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from experience_buffer import errors
from experience_buffer_server.catalog import Catalog, key_of, value_of
from experience_buffer_server.consumer_settings import ConsumerSettings
from experience_buffer_server.consumers import Consumer, Waiter, Want
from experience_buffer_server.groups import Entry
from experience_buffer_server.metrics import Metrics
from experience_buffer_server.picking import Picking
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.staleness import Verdict
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.waits import Wait, explain, wait_of


class Owner(Protocol):
    """The buffer whose units are delivered."""

    @property
    def name(self) -> str:
        """Its name."""

    def describe_wait(self) -> str:
        """What keeps experiences from being sampled; empty when nothing does."""

    def discard_units(self, units: Sequence[Unit]) -> None:
        """Units that nobody is to get any more came back."""

    def set_aside(self, consumer: Consumer, stale: Sequence[tuple[int, Verdict]]) -> None:
        """Units are too stale for a consumer: drop them, or let it pass them over."""


class Delivery:
    """The consumers of one buffer and the calls that wait. Not thread-safe."""

    def __init__(
        self,
        owner: Owner,
        consumers: dict[str, Consumer],
        catalog: Catalog,
        picking: Picking,
        metrics: Metrics,
        *,
        max_waiting: int,
        max_leased: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._owner = owner
        self._catalog = catalog
        self._picking = picking
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._max_leased = max_leased
        self._clock = clock
        self.consumers = consumers
        """By name; others have a view of it."""

    # --- consumers and what they are offered

    def add_consumer(self, settings: ConsumerSettings) -> Consumer:
        """Add a consumer that has been offered nothing yet."""
        consumer = self.consumers[settings.name] = Consumer(settings)
        return consumer

    def remove_consumer(self, name: str) -> None:
        """Remove a consumer; calls that wait for it end."""
        consumer = self.consumers.pop(name)
        consumer.closed = True
        consumer.announce()
        for waiter in list(consumer.waiters):
            waiter.units.cancel()

    def change_consumer(self, settings: ConsumerSettings) -> bool:
        """Tune a consumer that keeps its place; True if its units are to be counted anew."""
        consumer = self.consumers[settings.name]
        if consumer.settings != settings:
            limited = consumer.settings.limiter is not None
            consumer.take_on(
                settings, ((key, self._value(settings, key)) for key in consumer.ready)
            )
            self.serve(consumer)
            return limited != (settings.limiter is not None)
        return False

    def consumer(self, name: str) -> Consumer:
        """The consumer with this name.

        Raises:
            ConsumerNotFoundError: There is none.
        """
        consumer = self.consumers.get(name)
        if consumer is None:
            raise errors.ConsumerNotFoundError(
                f"buffer {self._owner.name!r} has no consumer {name!r}; it has "
                f"{sorted(self.consumers)}; add one with UpdateBuffer",
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
        self.serve(consumer)

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

    # --- waiting for a batch

    async def take(
        self, consumer: Consumer, want: Want, stop: asyncio.Event
    ) -> tuple[list[Unit], str]:
        """Take units to be delivered, waiting for them if need be, and say why there are fewer.

        Raises:
            ResourceExhaustedError: Too many calls wait.
        """
        started = time.monotonic()
        units = await self._take(consumer, want, stop)
        self._metrics.sample_wait(self._owner.name, consumer.name, time.monotonic() - started)
        if len(units) == want.batch_size:
            return units, ""
        self._metrics.shortfall(self._owner.name, consumer.name)
        if stop.is_set() and not units:
            return units, "the server is stopping"
        return units, self._shortfall(consumer, want, units)

    async def _take(self, consumer: Consumer, want: Want, stop: asyncio.Event) -> list[Unit]:
        if not consumer.waiters and (units := self._try(consumer, want)):
            return units
        was_first = not consumer.waiters
        if want.timeout_seconds > 0 and not stop.is_set():
            units, was_first = await self._wait_in_line(consumer, want, stop)
            if units:
                return units
        units = []
        if was_first and not consumer.closed and not stop.is_set():
            units = self._take_fewer(consumer, want)
        self.serve(consumer)
        return units

    async def _wait_in_line(
        self, consumer: Consumer, want: Want, stop: asyncio.Event
    ) -> tuple[list[Unit], bool]:
        """Units, or none and whether nobody had come earlier when the wait ended."""
        num_waiting = sum(len(other.waiters) for other in self.consumers.values())
        if num_waiting >= self._max_waiting:
            raise errors.ResourceExhaustedError(
                f"{num_waiting} sample calls wait already, the limit server.max_waiting_samples "
                f"is {self._max_waiting}",
                retry_delay_seconds=1.0,
            )
        reason = self.wait_of(consumer, want.batch_size).label
        self._metrics.wait_began(self._owner.name, consumer.name, reason, len(consumer.ready))
        loop = asyncio.get_running_loop()
        waiter = Waiter(want, loop.create_future())
        consumer.waiters.append(waiter)
        stopping = loop.create_task(stop.wait())
        was_first = False
        try:
            await asyncio.wait(
                (waiter.units, stopping),
                timeout=want.timeout_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        except asyncio.CancelledError:
            self.put_back(consumer, _result(waiter))
            raise
        finally:
            stopping.cancel()
            if waiter in consumer.waiters:
                was_first = consumer.waiters[0] is waiter
                consumer.waiters.remove(waiter)
        if consumer.closed:
            self.put_back(consumer, _result(waiter))
            return [], was_first
        return _result(waiter), was_first

    def serve(self, consumer: Consumer) -> None:
        """Give batches to the calls that wait, in the order in which they came."""
        while consumer.waiters:
            waiter = consumer.waiters[0]
            if waiter.units.done():
                consumer.waiters.popleft()
                continue
            units = self._try(consumer, waiter.want)
            if not units:
                return
            consumer.waiters.popleft()
            waiter.units.set_result(units)

    def _try(self, consumer: Consumer, want: Want) -> list[Unit]:
        """A full batch, or nothing."""
        if self.wait_of(consumer, want.batch_size).label:
            return []
        picked = self._picking.pick(consumer, want.batch_size, want.max_bytes, self._clock())
        full = len(picked.units) == want.batch_size or picked.cut_by == "message"
        if not full:
            consumer.window_is_full = picked.cut_by == "window"
            self._return(consumer, picked.units)
        self._owner.set_aside(consumer, picked.stale)
        return picked.units if full else []

    def _take_fewer(self, consumer: Consumer, want: Want) -> list[Unit]:
        """The largest batch that may go now, at least `min_batch_size`; or nothing."""
        size = want.batch_size
        while size >= want.min_batch_size and self.wait_of(consumer, size).label:
            size -= 1
        if size < want.min_batch_size:
            return []
        picked = self._picking.pick(consumer, size, want.max_bytes, self._clock())
        enough = len(picked.units) >= want.min_batch_size
        if not enough:
            self._return(consumer, picked.units)
        self._owner.set_aside(consumer, picked.stale)
        return picked.units if enough else []

    # --- why a call waits

    def wait_of(self, consumer: Consumer, batch_size: int) -> Wait:
        """What keeps a batch of this size from going."""
        return wait_of(consumer, batch_size, max_leased=self._max_leased)

    def explain_wait(self, consumer: Consumer, batch_size: int) -> str:
        """What a sample call waits for, in words."""
        wait = self.wait_of(consumer, batch_size)
        return explain(consumer, batch_size, wait, self._owner.describe_wait())

    def _shortfall(self, consumer: Consumer, want: Want, units: Sequence[Unit]) -> str:
        if consumer.closed:
            return f"consumer {consumer.name!r} was removed from buffer {self._owner.name!r}"
        size = f"{want.batch_size} {consumer.settings.unit}s"
        if units and len(consumer.ready) + len(units) >= want.batch_size:
            return (
                f"{len(units)} of {size}: more would exceed {want.max_bytes} bytes "
                "(server.max_message_bytes); SampleStream sends any batch in frames"
            )
        why = self.explain_wait(consumer, want.batch_size)
        return f"{len(units)} of {size} after waiting {want.timeout_seconds:g} s: {why}"

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
            for unit in different:
                del consumer.out[unit.key]
            self._make_ready(consumer, [unit.key for unit in different if not unit.gone])
        self._owner.discard_units([unit for unit in units if unit.gone])

    def returned(self, lease: Lease, units: Sequence[Unit], *, redeliver: bool) -> None:
        """A lease ended without an ack: offer its units again, in their old places."""
        consumer = self._took_back(lease)
        if consumer is not None:
            consumer.totals.redelivered += len(units) if redeliver else 0
            self.put_back(consumer, units)

    def put_back(self, consumer: Consumer, units: Sequence[Unit]) -> None:
        """Offer units that were taken and not delivered."""
        self._return(consumer, units)
        self._owner.discard_units([unit for unit in units if unit.gone])
        self.serve(consumer)

    def _return(self, consumer: Consumer, units: Sequence[Unit]) -> None:
        for unit, count in Counter(units).items():
            del consumer.out[unit.key]
            consumer.tally.sampled(unit.key, -count)
            if not unit.gone and not consumer.closed:
                self._add(consumer, unit.key)

    def _make_ready(self, consumer: Consumer, keys: Sequence[int]) -> None:
        for key in keys:
            self._add(consumer, key)
        self.serve(consumer)

    def _add(self, consumer: Consumer, key: int) -> None:
        """Add a unit to the ready ones, if any of it is left that the consumer is to get."""
        entries = self._catalog.entries(consumer.settings, key)
        if key in consumer.quarantined or not entries:
            return
        if all(consumer.name in entry.acked for entry in entries):
            consumer.finished.add(key)
            return
        consumer.ready.add(key, value_of(consumer.settings.selector, entries))

    def _value(self, settings: ConsumerSettings, key: int) -> float:
        entries = self._catalog.entries(settings, key)
        return value_of(settings.selector, entries) if entries else 0.0

    def _took_back(self, lease: Lease) -> Consumer | None:
        consumer = self.consumers.get(lease.consumer)
        if consumer is None or lease.id not in consumer.leases:
            return None  # Its consumer was removed; one that was added since has its name only.
        consumer.took_back(lease)
        return consumer


def _result(waiter: Waiter) -> list[Unit]:
    if waiter.units.done() and not waiter.units.cancelled():
        return waiter.units.result()
    waiter.units.cancel()
    return []
