"""Acknowledgements of leases made durable: what may be said, what it counts for, what leaves by it.

What an acknowledged experience becomes is in `state.departure`. Belongs to one buffer and its event
loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Sequence

from experience_buffer import errors
from experience_buffer_server.buffer.delivery.leasing import Leasing, row_of
from experience_buffer_server.buffer.delivery.offers import Offers
from experience_buffer_server.buffer.state import departure
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.runtime import clock
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.store.interface import WriteBatch

_log = logging.getLogger(__name__)


class Acks:
    """Acknowledges the leases of one buffer. Not thread-safe."""

    def __init__(self, state: BufferState, offers: Offers, leasing: Leasing) -> None:
        self._state = state
        self._offers = offers
        self._leasing = leasing
        self._changes = state.changes
        self._ending: dict[int, asyncio.Future[asyncio.Future[None] | None]] = {}
        """By lease, acks on their way to the disk; each brings the removal that follows, if any."""
        self._parts: dict[tuple[int, int], asyncio.Future[None]] = {}
        """By lease and rank, acks of parts on their way to the disk."""

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
        lease = self._leasing.find(lease_id, ("open", "ending", "acked"))
        if lease.state == "open":
            problem_with = functools.partial(self._problem_with, lease.consumer)
            _check(lease, step, rank, problem_with, self._state.name)
            parts = {rank: step} | lease.acked_parts if rank is not None else {}
            if len(parts) == lease.world_size:
                last = max(_given([step, *parts.values()]), default=None)
                # For good, if it is safe by now.
                self._begin_ack(lease, None if last is None or problem_with(last) else last)
            elif rank is not None:
                part = (lease_id, rank)
                if part not in self._parts:
                    self._parts[part] = self._store_part(lease, rank, step)
                await asyncio.shield(self._parts[part])
                # It may have been returned meanwhile.
                self._leasing.find(lease_id, ("open", "ending", "acked"))
        if lease.state == "ending":
            removal = await asyncio.shield(self._ending[lease_id])
            if removal is not None:
                # It may fail, and is owed then: the ack stands all the same.
                await asyncio.wait([removal])
        return lease

    def _problem_with(self, consumer: str, step: int) -> str:
        """Why a consumer can't acknowledge with this training step; empty if it can."""
        reader = self._state.consumers.get(consumer)
        # A removed one has no timeline, and its leases are on their way back.
        return "" if reader is None else reader.timeline.problem_with(step)

    async def settle(self, consumer: str) -> None:
        """Wait until no ack of a consumer is on its way to the disk."""
        while ending := [
            self._ending[lease.id]
            for lease in self._state.leases.of_consumer(consumer)
            if lease.id in self._ending
        ]:
            await asyncio.wait(ending)

    def _store_part(self, lease: Lease, rank: int, step: int | None) -> asyncio.Future[None]:
        is_new = rank not in lease.acked_parts
        lease.acked_parts = {rank: step} | lease.acked_parts

        def stored() -> None:
            del self._parts[lease.id, rank]

        def failed(error: BaseException) -> None:
            del self._parts[lease.id, rank]
            if is_new:
                lease.acked_parts.pop(rank, None)
                # Another rank's row, stored meanwhile, says that it was acknowledged.
                self._changes.owe(self._put_open, [lease.id])

        return self._leasing.store_row(lease, stored, failed)

    def _put_open(self, batch: WriteBatch, lease_ids: Sequence[int]) -> None:
        for lease_id in lease_ids:
            lease = self._state.leases.find(lease_id)
            if lease is not None and lease.state == "open":
                batch.put_lease(self._state.id, row_of(lease))
            elif lease is not None and lease.state == "ending":
                # The ack that would end it may fail.
                self._changes.owe(self._put_open, [lease_id])

    def _begin_ack(self, lease: Lease, step: int | None) -> None:
        seqs = [seq for unit in lease.units for seq in unit.seqs]
        batch = self._changes.batch()
        batch.put_lease(self._state.id, row_of(lease, state="acked", step=step))
        leaving = departure.note_consumed(self._state, batch, seqs, lease.consumer, step=step)
        lease.state = "ending"

        def stored() -> asyncio.Future[None] | None:
            del self._ending[lease.id]
            self._state.progress.ack_ended(seqs, lease.consumer)
            self._tell(lease, seqs, step)
            self._offers.consumed(lease, self._leasing.close(lease, "acked"))
            departure.forget(self._state, leaving, departure.CONSUMED)
            self._state.metrics.acked(self._state.name, lease.consumer, lease.num_experiences)
            return None if self._state.closed else self._leave_if_done(seqs)

        def failed(error: BaseException) -> None:
            del self._ending[lease.id]
            lease.state = "open"
            departure.revert_consumed(self._state, seqs, lease.consumer, leaving, step=step)
            # Deliveries before it count as before: without the one that goes on.
            for unit in lease.units:
                times = unit.num_deliveries - 1
                self._state.progress.set_deliveries(unit.seqs, lease.consumer, times)

        self._ending[lease.id] = self._changes.submit(batch, stored, failed)

    def _tell(self, lease: Lease, seqs: Sequence[int], step: int | None) -> None:
        consumer = self._state.consumers.get(lease.consumer)
        self._state.telemetry.acked(
            lease.consumer,
            self._state.contents.by_seqs(seqs),
            step=step,
            version=lease.policy_version,
            is_raw=consumer is not None and consumer.settings.raw,
            now=clock.now(),
        )

    def _leave_if_done(self, seqs: Iterable[int]) -> asyncio.Future[None] | None:
        """Remove what all have consumed by now; where there is no room for that, later.

        Returns:
            The removal, if there is one.
        """
        entries = self._state.contents.by_seqs(dict.fromkeys(seqs))
        done = [e for e in entries if not e.leaving and self._state.progress.is_done(e)]
        if not done:
            return None
        batch = self._changes.batch()
        leaving = departure.leave(self._state, batch, done, departure.CONSUMED)

        def failed(error: BaseException) -> None:
            departure.stay(self._state, leaving, departure.CONSUMED)
            self._changes.owe_again(self._leave_if_done, [entry.record.seq for entry in done])
            _log.warning("%d consumed experiences can't be removed yet: %s", len(done), error)

        def stored() -> None:
            departure.forget(self._state, leaving, departure.CONSUMED)

        return self._changes.submit(batch, stored, failed)


def _check(
    lease: Lease,
    step: int | None,
    rank: int | None,
    problem_with: Callable[[int], str],
    buffer_name: str,
) -> None:
    """See whether an open lease can be acknowledged with this step, by this rank.

    `problem_with` says why an ack can't carry a step; empty if it can.

    Raises:
        InvalidRequestError: The lease is shared and the rank is none of those that share it.
        WrongStateError: The step is safe already.
    """
    if (rank is None) != (not lease.world_size) or (rank or 0) >= max(lease.world_size, 1):
        shared = f"is shared by {lease.world_size} ranks" if lease.world_size else "isn't shared"
        raise errors.InvalidRequestError(
            f"lease {lease.id} of buffer {buffer_name!r} {shared}; acknowledge it "
            f"{'as one of them' if lease.world_size else 'without a rank'}, not as {rank}",
            subject="rank",
        )
    if step is None or 0 <= step <= max(_given(lease.acked_parts.values()), default=-1):
        # A step that another rank has acknowledged with may have become safe since: the ranks that
        # come later must still be able to end the lease.
        return
    if problem := problem_with(step):
        raise errors.WrongStateError(
            f"lease {lease.id} of buffer {buffer_name!r}: {problem}", subject="step"
        )


def _given(steps: Iterable[int | None]) -> list[int]:
    return [step for step in steps if step is not None]
