"""Leases of one buffer made durable: grant, acknowledge, give back, expire.

The rules of leases are in `sampling.leases`; what an acknowledged experience becomes is the
retirement's business; whom a returned unit is offered to is the delivery's.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, Literal, TypeVar

from experience_buffer_server.buffer.delivery.lease_settlement import (
    Settlement,
    check_ack,
    not_found,
    row_of,
    step_of,
)
from experience_buffer_server.buffer.delivery.offers import Offers
from experience_buffer_server.buffer.delivery.quarantine import Quarantine
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.runtime import clock
from experience_buffer_server.sampling.leases import Lease, LeaseState
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import WriteBatch

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

ReturnReason = Literal[
    "nacked", "expired", "stream_closed", "consumer_removed", "rewound", "undeliverable", "unread"
]
"""Why a lease ended without an ack; a label of the metrics."""
_BLAMED: Final = frozenset({"nacked", "expired", "stream_closed"})
"""Reasons that may be the experiences' fault: they count towards `max_deliveries`."""
_UNSEEN: Final = frozenset({"undeliverable", "unread"})
"""Reasons of leases that nobody has looked at: they come for the first time, not again."""


class Leasing:
    """The leases of one buffer. Not thread-safe."""

    def __init__(self, state: BufferState, offers: Offers, quarantine: Quarantine) -> None:
        self._state = state
        self._offers = offers
        self._quarantine = quarantine
        self._retirement = state.retirement
        self._changes = state.changes
        self._ending: dict[int, asyncio.Future[asyncio.Future[None] | None]] = {}
        """By lease, acks on their way to the disk; each brings the removal that follows, if any."""
        self._acking: dict[tuple[int, int], asyncio.Future[None]] = {}
        """By lease and rank, acks of parts on their way to the disk."""
        self._settlement = Settlement(state)

    async def grant(
        self,
        consumer: str,
        units: list[Unit],
        seconds: float,
        *,
        part_sizes: Sequence[int] = (),
        meanwhile: Callable[[Lease], Awaitable[None]] | None = None,
    ) -> Lease:
        """Lease units for some seconds; they are on their way once the lease is on disk.

        Args:
            consumer: Who gets them.
            units: Taken from the consumer's ready ones.
            seconds: Until the lease expires.
            part_sizes: For a lease that ranks share, how many of the units are each rank's.
            meanwhile: What can be done with the lease while it is being stored, without telling
                anybody of it; if that fails, the units are offered again.

        Returns:
            The lease; it isn't open any more if it was returned while it was being stored.

        Raises:
            StoreFullError: The lease can't be stored; the units are offered again.
        """
        deadline = clock.now() + seconds
        lease = self._state.leases.grant(consumer, units, deadline, part_sizes=part_sizes)
        self._offers.lent(lease)
        batch = self._changes.batch()
        self._settlement.bring_along(batch)
        batch.put_lease(self._state.id, row_of(lease))
        granting = self._changes.submit(
            batch, lambda: self._granted(lease), lambda error: self._refused(lease)
        )
        try:
            if meanwhile is not None:
                await meanwhile(lease)
            await granting
        except asyncio.CancelledError:
            self._cancel(lease)
            raise
        except BaseException:
            self.give_back([lease.id], "undeliverable")
            raise
        return lease

    def _granted(self, lease: Lease) -> None:
        lease.is_stored = True

    def _refused(self, lease: Lease) -> None:
        if lease.state == "open":
            self._end(lease, "nacked", redeliver=False)

    def _cancel(self, lease: Lease) -> None:
        """Nobody will hear of a lease: without this its units would wait for its expiry."""
        # A shared one that is stored may have been given to another rank.
        if (
            lease.state == "open"
            and not self._state.closed
            and not (lease.world_size and lease.is_stored)
        ):
            batch = self._changes.batch()
            batch.put_lease(self._state.id, row_of(lease, state="nacked"))
            self._changes.log(self._settlement.submit(batch, [lease], "nacked"))
            self._end(lease, "nacked", redeliver=False)

    async def ack(
        self, lease_id: int, *, step: int | None = None, rank: int | None = None
    ) -> Lease:
        """End a lease: its experiences are consumed. Idempotent.

        Args:
            lease_id: The lease.
            step: The training step that used it, for a rewind; None: consumed for good.
            rank: Of a shared lease, whose part it is; the lease ends with the last one.

        Raises:
            LeaseNotFoundError: No such lease, or it has expired or was given back.
            InvalidRequestError: The lease is shared and the rank is none of those that share it.
            WrongStateError: The step is safe already.
            StoreFullError: The ack can't be stored; the lease stays open.
        """
        lease = self._find(lease_id, ("open", "ending", "acked"))
        if lease.state == "open":
            check_ack(lease, step, rank, self._problem_with(lease), self._state.name)
            parts = {rank: step} | lease.acked_parts if rank is not None else {}
            if len(parts) == lease.world_size:
                steps = [step, *parts.values()]
                self._begin_ack(lease, step_of(steps, self._problem_with(lease)))
            elif rank is not None:
                part = (lease_id, rank)
                if part not in self._acking:
                    self._acking[part] = self._store_part(lease, rank, step)
                await asyncio.shield(self._acking[part])
                # It may have been returned meanwhile.
                self._find(lease_id, ("open", "ending", "acked"))
        if lease.state == "ending":
            removal = await asyncio.shield(self._ending[lease_id])
            if removal is not None:
                # It may fail, and is owed then: the ack stands all the same.
                await asyncio.wait([removal])
        return lease

    def _problem_with(self, lease: Lease) -> Callable[[int], str]:
        return functools.partial(self._retirement.problem_with, lease.consumer)

    def _store_part(self, lease: Lease, rank: int, step: int | None) -> asyncio.Future[None]:
        is_new = rank not in lease.acked_parts
        lease.acked_parts = {rank: step} | lease.acked_parts

        def stored() -> None:
            del self._acking[lease.id, rank]

        def failed(error: BaseException) -> None:
            del self._acking[lease.id, rank]
            if is_new:
                lease.acked_parts.pop(rank, None)
                # Another rank's row, stored meanwhile, says that it was acknowledged.
                self._settlement.owe_row(lease)

        return self._store_row(lease, stored, failed)

    def _begin_ack(self, lease: Lease, step: int | None) -> None:
        seqs = [seq for unit in lease.units for seq in unit.seqs]
        batch = self._changes.batch()
        batch.put_lease(self._state.id, row_of(lease, state="acked"))
        leaving = self._retirement.note_consumed(batch, seqs, lease.consumer, step=step)
        lease.state = "ending"

        def stored() -> asyncio.Future[None] | None:
            del self._ending[lease.id]
            self._state.progress.ack_ended(seqs, lease.consumer)
            units = self._close(lease, "acked")
            self._state.events.returning(units)
            self._offers.consumed(lease, units)
            self._retirement.forget(leaving)
            self._state.metrics.acked(self._state.name, lease.consumer, lease.num_experiences)
            return None if self._state.closed else self._settlement.leave_if_done(seqs)

        def failed(error: BaseException) -> None:
            del self._ending[lease.id]
            lease.state = "open"
            self._retirement.revert_consumed(seqs, lease.consumer, leaving, step=step)
            self._retirement.blame_again(lease.units, lease.consumer)

        self._ending[lease.id] = self._changes.submit(batch, stored, failed)

    async def extend(self, lease_id: int, seconds: float) -> Lease:
        """Let a lease expire some seconds from now, never earlier than it would.

        Raises:
            LeaseNotFoundError: No such lease, or it has ended.
            StoreFullError: It can't be stored; until a restart the new deadline holds.
        """
        lease = self._find(lease_id, ("open", "ending"))
        if lease.state == "open":
            self._state.leases.extend(lease, clock.now() + seconds)
            await self._store_row(lease)
        return lease

    async def nack(self, lease_id: int, *, reason: str, unread: bool = False) -> int:
        """End a lease: its experiences are offered again at once. Returns their number. Idempotent.

        One that is `unread` doesn't count as a delivery.

        Raises:
            LeaseNotFoundError: No such lease, or it was acknowledged or has expired.
        """
        lease = self._find(lease_id, ("open", "nacked"))
        if lease.state == "open":
            _log.info("lease %d of buffer %r nacked: %s", lease_id, self._state.name, reason)
            why: ReturnReason = "unread" if unread else "nacked"
            await self._give_back(lease, "nacked", why)
        return lease.num_experiences

    def is_open(self, lease_id: int) -> bool:
        """Whether a lease hasn't ended; one whose end is being stored may be open again."""
        lease = self._state.leases.find(lease_id)
        return lease is not None and lease.state in ("open", "ending")

    def give_back(self, lease_ids: Iterable[int], reason: ReturnReason) -> None:
        """Give back those of the leases that are still open; for a stream that has ended.

        Of an `undeliverable` lease nothing was sent, and one that is `unread` nobody has looked at:
        they don't count as deliveries.
        """
        for lease_id in lease_ids:
            lease = self._state.leases.find(lease_id)
            if lease is not None and lease.state == "open" and not self._state.closed:
                self._changes.log(self._give_back(lease, "nacked", reason))

    def expire(self, now: float) -> None:
        """End the leases past their deadline; their experiences are offered again."""
        for lease in self._state.leases.expired(now):
            self._changes.log(self._give_back(lease, "expired", "expired"))

    async def settle(self, consumer: str) -> None:
        """Wait until no ack of a consumer is on its way to the disk."""
        while ending := [
            self._ending[lease.id]
            for lease in self._state.leases.of_consumer(consumer)
            if lease.id in self._ending
        ]:
            await asyncio.wait(ending)

    def note_returns(self, batch: WriteBatch, consumer: str) -> list[Lease]:
        """Add the end of a consumer's open leases to a batch.

        `submit_ends` follows.
        """
        leases = [
            lease for lease in self._state.leases.of_consumer(consumer) if lease.state == "open"
        ]
        for lease in leases:
            self._note_return(batch, lease, "nacked", "rewound")
        return leases

    def submit_ends(
        self,
        batch: WriteBatch,
        leases: Sequence[Lease],
        stored: Callable[[], _T],
        failed: Callable[[BaseException], object],
    ) -> asyncio.Future[_T]:
        """Submit a batch with the ends of leases, and offer their experiences again."""
        submitted = self._settlement.submit(batch, leases, "nacked", stored, failed)
        for lease in leases:
            self._end(lease, "nacked", redeliver=True)
        return submitted

    def _give_back(
        self, lease: Lease, state: LeaseState, reason: ReturnReason
    ) -> asyncio.Future[None]:
        """Offer again first, store afterwards: after a crash in between the lease just expires."""
        batch = self._changes.batch()
        self._note_return(batch, lease, state, reason)
        submitted = self._settlement.submit(batch, [lease], state)
        self._end(lease, state, redeliver=reason not in _UNSEEN)
        return submitted

    def _note_return(
        self, batch: WriteBatch, lease: Lease, state: LeaseState, reason: ReturnReason
    ) -> None:
        batch.put_lease(self._state.id, row_of(lease, state=state))
        for unit in dict.fromkeys(lease.units) if reason in _BLAMED else ():
            self._state.progress.note_delivery(batch, unit, lease.consumer)
            self._quarantine.blame(batch, lease.consumer, unit, reason)
        self._state.metrics.redelivered(
            self._state.name, lease.consumer, reason, lease.num_experiences
        )

    def _store_row(
        self,
        lease: Lease,
        stored: Callable[[], None] | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> asyncio.Future[None]:
        batch = self._changes.batch()
        batch.put_lease(self._state.id, row_of(lease))
        return self._changes.submit(batch, stored, failed)

    def _end(self, lease: Lease, state: LeaseState, *, redeliver: bool) -> None:
        units = self._close(lease, state)
        self._state.events.returning(units)
        self._offers.returned(lease, units, redeliver=redeliver)

    def _close(self, lease: Lease, state: LeaseState) -> list[Unit]:
        units = list(lease.units)
        self._settlement.forget(self._state.leases.end(lease, state, clock.now()))
        return units

    def _find(self, lease_id: int, allowed: tuple[LeaseState, ...]) -> Lease:
        lease = None if self._state.closed else self._state.leases.find(lease_id)
        if lease is not None and lease.state in allowed:
            return lease
        raise not_found(lease, lease_id, self._state.name)
