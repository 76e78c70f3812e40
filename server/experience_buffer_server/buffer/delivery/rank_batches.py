"""Batches that the ranks of a consumer share: each gets its part of the same lease.

Any rank's call forms the next shared batch; the others get their parts of it. A rank that comes back
asks for the oldest batch that it hasn't acknowledged, and gets the same part. Belongs to one buffer
and its event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass

from experience_buffer import errors
from experience_buffer_server.buffer.delivery.leasing import RETURNED, Leasing, Prepare, note_holder
from experience_buffer_server.buffer.delivery.sample_queue import Line
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer, Want
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.ranks import split
from experience_buffer_server.sampling.units import Unit

_MAX_WORLD_SIZE = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOf:
    """Which part of which shared batch a call asks for."""

    rank: int
    world_size: int
    after_lease_id: int
    """The shared lease that the rank received last; 0: the oldest that it hasn't acknowledged.

    One that was never given is of a buffer that was deleted since, and counts as 0."""


class RankBatches:
    """Leases batches to be shared. Not thread-safe."""

    def __init__(self, state: BufferState, line: Line, leasing: Leasing) -> None:
        self._state = state
        self._line = line
        self._leasing = leasing

    async def sample(
        self,
        consumer: Consumer,
        want: Want,
        rank_of: RankOf,
        stop: asyncio.Event,
        prepare: Prepare | None,
    ) -> tuple[Lease | None, str]:
        """Give a rank its part of a batch, waiting for it if need be; see `Buffer.sample`."""
        lease, shortfall = await self._shared(consumer, want, rank_of, stop)
        if lease is None or lease.state != "open":
            return None, shortfall if lease is None else RETURNED
        note_holder(lease, rank_of.rank)
        self._leasing.note_delivery(consumer, lease.part(rank_of.rank))
        if prepare is not None:
            await self._prepare_shared(lease, shortfall, prepare)
            if lease.state != "open":
                return None, RETURNED
        return lease, shortfall

    async def _prepare_shared(self, lease: Lease, shortfall: str, prepare: Prepare) -> None:
        try:
            await prepare(shortfall, lease)
        except Exception as error:
            # A rank that goes gets its part when it comes again, and others may be at theirs.
            comes_again = isinstance(error, errors.ResourceExhaustedError) and (
                error.retry_delay_seconds is not None
            )
            if not comes_again:
                self._leasing.give_back([lease.id], "undeliverable")
            raise

    async def _shared(
        self, consumer: Consumer, want: Want, rank_of: RankOf, stop: asyncio.Event
    ) -> tuple[Lease | None, str]:
        """The lease whose part this rank gets next, or None and the reason why there is none."""
        _check(rank_of)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + want.timeout_seconds
        while True:
            lease = self._find(consumer, rank_of)
            if lease is not None:
                return lease, ""
            left = max(deadline - loop.time(), 0.0)
            if not consumer.forming:
                want = dataclasses.replace(want, timeout_seconds=left)
                return await self._form(consumer, want, rank_of.world_size, stop)
            if not await _wait(consumer.changed, left, stop) or consumer.closed:
                why = self._line.explain_wait(consumer, want.batch_size)
                return None, "the server is stopping" if stop.is_set() else why

    async def _form(
        self, consumer: Consumer, want: Want, world_size: int, stop: asyncio.Event
    ) -> tuple[Lease | None, str]:
        consumer.forming = True
        try:
            units, shortfall = await self._line.take(consumer, want, stop)
            if not units:
                return None, shortfall
            ordered, sizes = _parts(units, world_size)
            lease = await self._leasing.grant(
                consumer.name, ordered, want.lease_seconds, part_sizes=sizes
            )
        finally:
            consumer.forming = False
            consumer.announce()
        return lease, shortfall

    def _find(self, consumer: Consumer, rank_of: RankOf) -> Lease | None:
        """The first open batch after the given one, of which this rank hasn't acknowledged its part."""
        after = rank_of.after_lease_id
        after = 0 if after > self._state.leases.last_id else after
        for lease in sorted(consumer.leases.values(), key=lambda lease: lease.id):
            if not lease.world_size:
                continue
            if lease.world_size != rank_of.world_size:
                raise errors.WrongStateError(
                    f"lease {lease.id} of consumer {consumer.name!r} of buffer {self._state.name!r} is "
                    f"shared by {lease.world_size} ranks, this call says {rank_of.world_size}; "
                    "acknowledge or nack it, or rewind to the step of the last checkpoint, first",
                    subject="world_size",
                )
            is_next = lease.id > after and rank_of.rank not in lease.acked_parts
            if is_next and lease.is_stored and lease.state == "open":
                return lease
        return None


def _parts(units: list[Unit], world_size: int) -> tuple[list[Unit], list[int]]:
    """The units in the order of the ranks, and how many are each rank's."""
    parts = split([unit.num_tokens for unit in units], world_size)
    return [units[index] for part in parts for index in part], [len(part) for part in parts]


def _check(rank_of: RankOf) -> None:
    if not 0 < rank_of.world_size <= _MAX_WORLD_SIZE or not 0 <= rank_of.rank < rank_of.world_size:
        raise errors.InvalidRequestError(
            f"rank {rank_of.rank} of {rank_of.world_size}: rank must be at least 0 and below "
            f"world_size, world_size 1 to {_MAX_WORLD_SIZE}",
            subject="rank",
        )


async def _wait(changed: asyncio.Event, seconds: float, stop: asyncio.Event) -> bool:
    """Wait for a change; False when the time is over or the server stops."""
    loop = asyncio.get_running_loop()
    waits = [loop.create_task(changed.wait()), loop.create_task(stop.wait())]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return changed.is_set()
    finally:
        for wait in waits:
            wait.cancel()
