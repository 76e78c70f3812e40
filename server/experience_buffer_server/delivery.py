"""Delivery of one buffer: its consumers, who waits for what, and what is offered to whom.

The order of units is the business of `sampling`, leases are that of `leasing`. Belongs to one
buffer and its event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from experience_buffer import errors
from experience_buffer_server.config import ConsumerSettings
from experience_buffer_server.metrics import Metrics
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.queue import ReadyQueue, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What one sample call asks for."""

    batch_size: int
    """Units in a full batch."""
    min_batch_size: int
    """Fewest units worth delivering once the timeout has passed."""
    timeout_seconds: float
    lease_seconds: float
    max_bytes: int
    """Most payload bytes in the batch, unless its first unit alone exceeds them."""


@dataclass(slots=True, eq=False)
class _Waiter:
    want: Want
    units: asyncio.Future[list[Unit]]


@dataclass(slots=True, eq=False)
class Consumer:
    """One consumer's place in the buffer."""

    settings: ConsumerSettings
    queue: ReadyQueue = field(default_factory=ReadyQueue)
    units: dict[int, Unit] = field(default_factory=dict)
    """Waiting and leased units, each under the seq of every experience in it."""
    waiters: deque[_Waiter] = field(default_factory=deque)
    """First come, first served: a large batch is not starved by small ones."""
    leases: set[int] = field(default_factory=set)
    """Ids of its open leases."""
    num_leased: int = 0
    num_leased_experiences: int = 0
    num_acked: int = 0
    num_redelivered: int = 0
    closed: bool = False
    """Removed from the buffer."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.settings.name

    def hold(self, unit: Unit) -> None:
        """Note a unit that waits or is leased."""
        self.units.update(dict.fromkeys(unit.seqs, unit))

    def let_go(self, unit: Unit) -> None:
        """Forget a unit: consumed, or not to be delivered."""
        for seq in unit.seqs:
            del self.units[seq]


class Delivery:
    """The consumers of one buffer and the calls that wait. Not thread-safe."""

    def __init__(
        self,
        buffer_name: Callable[[], str],
        describe_groups: Callable[[], str],
        discarded: Callable[[Sequence[Unit]], None],
        metrics: Metrics,
        *,
        max_waiting: int,
        max_leased_experiences: int,
    ) -> None:
        self._name = buffer_name
        self._describe_groups = describe_groups
        self._discarded = discarded
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._max_leased = max_leased_experiences
        self.consumers: dict[str, Consumer] = {}

    # --- consumers and what they are offered

    def add_consumer(self, settings: ConsumerSettings) -> Consumer:
        """Add a consumer that has been offered nothing yet."""
        consumer = self.consumers[settings.name] = Consumer(settings)
        return consumer

    def remove_consumer(self, name: str) -> None:
        """Remove a consumer; calls that wait for it end."""
        consumer = self.consumers.pop(name)
        consumer.closed = True
        for waiter in list(consumer.waiters):
            waiter.units.cancel()

    def consumer(self, name: str) -> Consumer:
        """The consumer with this name.

        Raises:
            ConsumerNotFoundError: There is none.
        """
        consumer = self.consumers.get(name)
        if consumer is None:
            raise errors.ConsumerNotFoundError(
                f"buffer {self._name()!r} has no consumer {name!r}; it has "
                f"{sorted(self.consumers)}; add one with UpdateBuffer",
                subject=name,
            )
        return consumer

    def offer(self, consumer: Consumer, unit: Unit) -> None:
        """Let a consumer sample a unit, and serve who waits for it."""
        consumer.hold(unit)
        consumer.queue.push(unit)
        self._serve(consumer)

    def withdraw(self, seqs: Iterable[int], *, keep_raw: bool = False) -> None:
        """Take back the units that hold these experiences; a leased one isn't offered again."""
        for consumer, unit in self._units(seqs):
            if keep_raw and consumer.settings.raw:
                continue
            if unit.waiting:
                consumer.queue.discard(unit)
                consumer.let_go(unit)
            else:
                unit.gone = True

    def is_leased(self, seq: int) -> bool:
        """True if any consumer holds the experience, or is about to."""
        return any(not unit.waiting for _, unit in self._units([seq]))

    def is_leased_with_advantages(self, seq: int) -> bool:
        """True if a consumer that isn't raw holds the experience, or is about to."""
        units = self._units([seq])
        return any(not unit.waiting and not consumer.settings.raw for consumer, unit in units)

    def _units(self, seqs: Iterable[int]) -> list[tuple[Consumer, Unit]]:
        wanted = list(seqs)
        found: dict[int, tuple[Consumer, Unit]] = {}
        for consumer in self.consumers.values():
            for seq in wanted:
                unit = consumer.units.get(seq)
                if unit is not None:
                    found[id(unit)] = (consumer, unit)
        return list(found.values())

    # --- waiting for a batch

    async def take(
        self, consumer: Consumer, want: Want, stop: asyncio.Event
    ) -> tuple[list[Unit], str]:
        """Take units out of the queue, waiting for them if need be, and say why there are fewer.

        Raises:
            ResourceExhaustedError: Too many calls wait, or too much is leased.
        """
        if consumer.num_leased_experiences >= self._max_leased:
            raise errors.ResourceExhaustedError(
                f"consumer {consumer.name!r} holds leases on {consumer.num_leased_experiences} "
                f"experiences, the limit server.max_leased_experiences is {self._max_leased}; "
                "acknowledge some first",
                retry_delay_seconds=1.0,
            )
        started = time.monotonic()
        units = await self._take(consumer, want, stop)
        self._metrics.sample_wait(self._name(), consumer.name, time.monotonic() - started)
        if len(units) == want.batch_size:
            return units, ""
        self._metrics.shortfall(self._name(), consumer.name)
        if stop.is_set() and not units:
            return units, "the server is stopping"
        return units, self._shortfall(consumer, want, units)

    def explain_wait(self, consumer: Consumer, batch_size: int) -> str:
        """What a sample call waits for, in words."""
        words = [f"{len(consumer.queue)} ready of {batch_size} {consumer.settings.unit}s"]
        if consumer.num_leased:
            words.append(f"{consumer.num_leased} leased and not acknowledged")
        groups = self._describe_groups()
        if groups:
            words.append(groups)
        if not consumer.units and not groups:
            words.append("nothing is stored that this consumer hasn't consumed")
        return "; ".join(words)

    async def _take(self, consumer: Consumer, want: Want, stop: asyncio.Event) -> list[Unit]:
        if not consumer.waiters and len(consumer.queue) >= want.batch_size:
            return consumer.queue.take(want.batch_size, want.max_bytes)
        was_first = not consumer.waiters
        if want.timeout_seconds > 0 and not stop.is_set():
            units, was_first = await self._wait_in_line(consumer, want, stop)
            if units:
                return units
        units, num_ready = [], len(consumer.queue)
        may_go = was_first and not consumer.closed and not stop.is_set()
        if may_go and num_ready >= want.min_batch_size:
            units = consumer.queue.take(want.batch_size, want.max_bytes)
        self._serve(consumer)
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
        loop = asyncio.get_running_loop()
        waiter = _Waiter(want, loop.create_future())
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

    def put_back(self, consumer: Consumer, units: Sequence[Unit]) -> None:
        """Offer units that were taken and not delivered."""
        for unit in units:
            if unit.gone or consumer.closed:
                consumer.let_go(unit)
            else:
                consumer.queue.push(unit)
        self._discarded([unit for unit in units if unit.gone])
        self._serve(consumer)

    def _serve(self, consumer: Consumer) -> None:
        while consumer.waiters:
            waiter = consumer.waiters[0]
            if waiter.units.done():
                consumer.waiters.popleft()
                continue
            want = waiter.want
            if len(consumer.queue) < want.batch_size:
                return
            consumer.waiters.popleft()
            waiter.units.set_result(consumer.queue.take(want.batch_size, want.max_bytes))

    def _shortfall(self, consumer: Consumer, want: Want, units: Sequence[Unit]) -> str:
        if consumer.closed:
            return f"consumer {consumer.name!r} was removed from buffer {self._name()!r}"
        size = f"{want.batch_size} {consumer.settings.unit}s"
        if units and len(consumer.queue) + len(units) >= want.batch_size:
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
            consumer.leases.add(lease.id)
            consumer.num_leased += len(lease.units)
            consumer.num_leased_experiences += lease.num_experiences

    def consumed(self, lease: Lease, units: Sequence[Unit]) -> None:
        """A lease ended with an ack."""
        consumer = self._took_back(lease, units)
        if consumer is not None:
            consumer.num_acked += len(units)
            for unit in units:
                consumer.let_go(unit)
        self._discarded([unit for unit in units if unit.gone])

    def returned(self, lease: Lease, units: Sequence[Unit], *, redeliver: bool) -> None:
        """A lease ended without an ack: offer its units again, in their old places."""
        consumer = self._took_back(lease, units)
        if consumer is not None:
            consumer.num_redelivered += len(units) if redeliver else 0
            self.put_back(consumer, units)

    def _took_back(self, lease: Lease, units: Sequence[Unit]) -> Consumer | None:
        consumer = self.consumers.get(lease.consumer)
        if consumer is None or lease.id not in consumer.leases:
            return None  # Its consumer was removed; one that was added since has its name only.
        consumer.leases.remove(lease.id)
        consumer.num_leased -= len(units)
        consumer.num_leased_experiences -= lease.num_experiences
        return consumer


def _result(waiter: _Waiter) -> list[Unit]:
    if waiter.units.done() and not waiter.units.cancelled():
        return waiter.units.result()
    waiter.units.cancel()
    return []
