"""Calls that wait in line for a batch: first come, first served, each told what it waits for.

Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import bisect_left
from collections.abc import Sequence

from experience_buffer import errors
from experience_buffer_server.buffer.delivery.batch_picking import (
    Picked,
    pick,
    put_back,
    wait_of,
    window_of,
    words_beyond,
    words_of_window,
)
from experience_buffer_server.buffer.state import departure
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import (
    Consumer,
    Cut,
    Taken,
    WaitClock,
    Waiter,
    Want,
)
from experience_buffer_server.buffer.state.entries import Entry, key_of
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.callers import current_caller
from experience_buffer_server.sampling.staleness import UNKNOWN_VERSION, Reason
from experience_buffer_server.sampling.units import Unit


class Line:
    """The calls of one buffer that wait, per consumer. Not thread-safe."""

    def __init__(self, state: BufferState) -> None:
        self._state = state
        self._metrics = state.metrics

    async def take(
        self, consumer: Consumer, want: Want, stop: asyncio.Event
    ) -> tuple[list[Unit], str]:
        """Take units to be delivered, waiting for them if need be, and say why there are fewer.

        Raises:
            ResourceExhaustedError: Too many calls wait.
        """
        started = time.monotonic()
        consumer.asked_batch_size = want.batch_size
        taken = await self._take(consumer, want, stop)
        units = taken.units
        self._metrics.sample_wait(self._state.name, consumer.name, time.monotonic() - started)
        if len(units) == want.batch_size:
            return units, ""
        self._metrics.shortfall(self._state.name, consumer.name)
        if stop.is_set() and not units:
            return units, "the server is stopping"
        return units, self._shortfall(consumer, want, taken)

    async def _take(self, consumer: Consumer, want: Want, stop: asyncio.Event) -> Taken:
        taken = Taken([])
        if self._is_next(consumer):
            # What didn't fit then needn't be what comes next now: each call is tried itself.
            consumer.unfit = (0, "")
            if (taken := self._try(consumer, want)).units:
                return taken
        was_first, is_beyond = self._is_next(consumer), taken.cut_by == "window"
        if want.timeout_seconds > 0 and not stop.is_set():
            waiter, was_first = await self._wait_in_line(consumer, want, stop, taken.cut_by)
            taken = _result(waiter)
            if consumer.closed:
                self.put_back(consumer, taken.units)
            elif taken.units:
                return taken
            is_beyond = waiter.is_beyond_window
        taken = Taken([], words="" if was_first else "other calls came earlier")
        if was_first and not consumer.closed and not stop.is_set():
            taken = self._take_fewer(consumer, want)
        self.serve(consumer)
        return taken._replace(cut_by="window") if is_beyond and not taken.cut_by else taken

    async def _wait_in_line(
        self, consumer: Consumer, want: Want, stop: asyncio.Event, cut_by: Cut
    ) -> tuple[Waiter, bool]:
        """The wait that has ended, and whether nobody had come earlier then.

        What cut a first try says whether others are to wait, too.
        """
        num_waiting = sum(len(other.waiters) for other in self._state.consumers.values())
        if num_waiting >= self._state.limits.max_waiting_samples:
            raise errors.ResourceExhaustedError(
                f"{num_waiting} sample calls wait already, the limit server.max_waiting_samples "
                f"is {self._state.limits.max_waiting_samples}",
                retry_delay_seconds=1.0,
            )
        reason = wait_of(self._state, consumer, want.batch_size).label
        if consumer.waiters and not reason:
            reason = "line"
        self._metrics.wait_began(self._state.name, consumer.name, reason, len(consumer.ready))
        loop = asyncio.get_running_loop()
        now, caller = time.monotonic(), current_caller()
        waiter = Waiter(
            want,
            loop.create_future(),
            WaitClock(reason or cut_by, now),
            is_beyond_window=cut_by == "window",
            since=now,
            holder=caller.holder or caller.address or caller.name,
        )
        consumer.waiters.append(waiter)
        stopping = loop.create_task(stop.wait())
        was_first = False
        try:
            await asyncio.wait(
                (waiter.taken, stopping),
                timeout=want.timeout_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        except asyncio.CancelledError:
            consumer.promised.pop(waiter, None)
            self.put_back(consumer, _result(waiter).units)
            raise
        finally:
            consumer.promised.pop(waiter, None)
            stopping.cancel()
            seconds = waiter.clock.until(time.monotonic())
            self._metrics.waited(self._state.name, consumer.name, seconds)
            if waiter in consumer.waiters:
                was_first = self._is_next(consumer, waiter)
                consumer.waiters.remove(waiter)
        return waiter, was_first

    def serve(self, consumer: Consumer) -> None:
        """Give batches to the calls that wait, in the order in which they came."""
        place = 0
        while place < len(consumer.waiters):
            waiter = consumer.waiters[place]
            if waiter.taken.done():
                del consumer.waiters[place]
                continue
            taken = self._try(consumer, waiter.want)
            if taken.units:
                del consumer.waiters[place]
                consumer.promised[waiter] = taken.units
                waiter.taken.set_result(taken)
                continue
            reason = taken.cut_by or wait_of(self._state, consumer, waiter.want.batch_size).label
            waiter.clock.look(reason, time.monotonic())
            waiter.is_beyond_window |= taken.cut_by == "window"
            if not self._is_beyond_window(consumer, waiter):
                return
            place += 1

    def _is_next(self, consumer: Consumer, waiter: Waiter | None = None) -> bool:
        """Whether nobody before it can have a batch; None: one that comes now."""
        before = itertools.takewhile(lambda other: other is not waiter, consumer.waiters)
        return all(self._is_beyond_window(consumer, other) for other in before)

    def _is_beyond_window(self, consumer: Consumer, waiter: Waiter) -> bool:
        """Whether its batch never goes: it gets fewer when its time is up, and others needn't wait."""
        return waiter.is_beyond_window or (
            waiter.want.batch_size > window_of(self._state, consumer)
        )

    def _try(self, consumer: Consumer, want: Want) -> Taken:
        """A batch that is full, or as full as a message or all that may be leased; or nothing."""
        if wait_of(self._state, consumer, want.batch_size).label:
            return Taken([])
        picked = pick(self._state, consumer, want.batch_size, want.max_bytes, clock.now())
        cut_by = _most_cut_by(consumer, picked)
        full = (
            cut_by == "message"
            or len(picked.units) == want.batch_size
            or (cut_by == "window" and len(picked.units) >= want.min_batch_size)
        )
        if not full:
            consumer.unfit = (want.batch_size if picked.cut_by else 0, picked.cut_by)
            put_back(self._state, consumer, picked.units)
        self._set_aside(consumer, picked.stale)
        return Taken(picked.units if full else [], cut_by)

    def _take_fewer(self, consumer: Consumer, want: Want) -> Taken:
        """The largest batch that may go now, at least `min_batch_size`; or nothing."""
        consumer.unfit = (0, "")
        size = self._largest(consumer, want)
        if size < want.min_batch_size:
            return Taken([])
        words = wait_of(self._state, consumer, want.batch_size).words
        picked = pick(self._state, consumer, size, want.max_bytes, clock.now())
        cut_by = _most_cut_by(consumer, picked)
        if not words and picked.cut_by in ("experiences", "bytes"):
            words = words_of_window(self._state, consumer, picked.cut_by)
        enough = len(picked.units) >= want.min_batch_size
        if not enough:
            put_back(self._state, consumer, picked.units)
        self._set_aside(consumer, picked.stale)
        return Taken(picked.units if enough else [], cut_by, words)

    def _largest(self, consumer: Consumer, want: Want) -> int:
        """The most units that nothing keeps from going, by bisection; 0: not even one may."""
        most = want.batch_size
        if not consumer.settings.with_replacement:
            most = min(most, len(consumer.ready))
        return bisect_left(
            range(1, most + 1),
            True,
            key=lambda size: bool(wait_of(self._state, consumer, size).label),
        )

    def put_back(self, consumer: Consumer, units: Sequence[Unit]) -> None:
        """Offer units that were taken and not delivered, in their old places."""
        put_back(self._state, consumer, units)
        consumer.unfit = (0, "")
        self._state.events.discard_units([unit for unit in units if unit.gone])
        self.serve(consumer)

    # --- units that are too stale

    def _set_aside(self, consumer: Consumer, stale: Sequence[tuple[int, Reason]]) -> None:
        """Units are too stale for a consumer: drop them, or let it pass them over."""
        if not stale or consumer.settings.staleness is None:
            return
        consumer.num_stale += len(stale)
        policy = consumer.settings.staleness.on_stale
        units: list[list[Entry]] = []
        for key, why in stale:
            found = self._state.contents.members_of(consumer.settings, key)
            self._metrics.stale(self._state.name, consumer.name, policy, why, len(found))
            units.append(found)
        if policy == "drop":
            units = self._state.events.drop_stale(units, consumer.name)
        if entries := [entry for unit in units for entry in unit]:
            self._pass_over(consumer, entries)

    def _pass_over(self, consumer: Consumer, entries: Sequence[Entry]) -> None:
        batch = self._state.changes.batch()
        for key in {key_of(consumer.settings, entry) for entry in entries}:
            consumer.finished.add(key)
            if consumer.settings.limiter is not None:
                consumer.tally.passed_over(key, consumer.settings.limiter.plan)
        self._state.progress.put_consumer(batch, consumer)
        for entry in entries:
            self._state.progress.pass_over(entry, consumer.name)
        leaving = departure.leave_if_done(self._state, batch, entries)

        def failed(error: BaseException) -> None:
            # Passed over in memory all the same: after a restart it is judged again.
            departure.stay(self._state, leaving, departure.CONSUMED)
            self._state.events.postpone(leaving)

        def stored() -> None:
            why = f"too stale for consumer {consumer.name!r}"
            departure.forget(self._state, leaving, departure.Cause("stale", why))

        self._state.changes.spawn(batch, stored, failed)

    # --- why a call waits

    def explain_wait(self, consumer: Consumer, batch_size: int, words: str = "") -> str:
        """What a sample call waits for, in words; those given are of before its units were taken."""
        wait = wait_of(self._state, consumer, batch_size)
        if consumer.unfit == (batch_size, "experiences") and not consumer.num_leased:
            words = words_beyond(self._state, consumer)
        texts = [f"{len(consumer.ready)} ready of {batch_size} {consumer.settings.unit}s"]
        if wait.words or words:
            texts.append(wait.words or words)
        if consumer.num_leased:
            texts.append(f"{consumer.num_leased} leased and not acknowledged")
        texts += _held(consumer)
        if consumer.num_stale:
            texts.append(f"{consumer.num_stale} were too stale and left out")
        if consumer.quarantined:
            texts.append(
                f"{len(consumer.quarantined)} quarantined after too many deliveries; see "
                "release_quarantined"
            )
        if consumer.timeline.num_retained:
            texts.append(f"{consumer.timeline.num_retained} acknowledged and kept for a rewind")
        if buffer_waits := self._state.events.describe_wait():
            texts.append(buffer_waits)
        if len(texts) == 1 and not len(consumer.ready):
            texts.append("nothing is stored that this consumer hasn't consumed")
        return "; ".join(texts)

    def _shortfall(self, consumer: Consumer, want: Want, taken: Taken) -> str:
        if consumer.closed:
            return f"consumer {consumer.name!r} was removed from buffer {self._state.name!r}"
        size = f"{len(taken.units)} of {want.batch_size} {consumer.settings.unit}s"
        if taken.cut_by == "window":
            return f"{size}: {words_beyond(self._state, consumer)}"
        if taken.units and taken.cut_by == "message":
            return (
                f"{size}: more would exceed {want.max_bytes} bytes (server.max_message_bytes); "
                "a stream sends any batch in frames"
            )
        why = self.explain_wait(consumer, want.batch_size, taken.words)
        return f"{size} after waiting {want.timeout_seconds:g} s: {why}"


def _most_cut_by(consumer: Consumer, picked: Picked) -> Cut:
    """What keeps even the largest batch that may ever go from taking more."""
    if picked.cut_by == "message":
        return "message"
    return "window" if picked.cut_by == "experiences" and not consumer.window_use[0] else ""


def _result(waiter: Waiter) -> Taken:
    if waiter.taken.done() and not waiter.taken.cancelled():
        return waiter.taken.result()
    waiter.taken.cancel()
    return Taken([])


def _held(consumer: Consumer) -> list[str]:
    """What held units wait for, in words."""
    versions = [version for version in consumer.held.values() if version != UNKNOWN_VERSION]
    num_unknown = len(consumer.held) - len(versions)
    texts = []
    if versions:
        texts.append(f"{len(versions)} held until policy version {min(versions)} is published")
    if num_unknown:
        texts.append(f"{num_unknown} held because {consumer.why_unversioned}")
    return texts
