"""What the store hasn't been told yet of leases that ended, and is told once there is room.

Memory goes ahead of the disk where a lease ends: its units are offered again at once. Until that is
stored, every new lease brings the ends of those before it along: else a unit could be in two open
leases on disk. What an acknowledgement may say, and what it counts for, is at the end of the file. Belongs
to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from experience_buffer import errors
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.runtime import clock
from experience_buffer_server.sampling.leases import Lease, LeaseState
from experience_buffer_server.store.interface import LeaseRow, WriteBatch

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Settlement:
    """Brings the disk up to what memory knows of ended leases. Not thread-safe."""

    def __init__(self, state: BufferState) -> None:
        self._id = state.id
        self._leases = state.leases
        self._progress = state.progress
        self._retirement = state.retirement
        self._changes = state.changes
        self._ends: dict[int, LeaseRow] = {}
        """Ends of leases that may not be on disk, under way or owed, by lease."""

    # --- ends of leases

    def submit(
        self,
        batch: WriteBatch,
        leases: Sequence[Lease],
        state: LeaseState,
        stored: Callable[[], Any] | None = None,
        failed: Callable[[BaseException], object] | None = None,
    ) -> asyncio.Future[Any]:
        """Submit a batch with which leases end without an ack, and end now; see `Changes.submit`.

        If it fails, the ends are stored later.
        """
        ends = {lease.id: row_of(lease, state=state) for lease in leases}
        # Deliveries of these may have been counted.
        seqs = [seq for lease in leases for unit in lease.units for seq in unit.seqs]
        self._ends.update(ends)

        def on_disk() -> Any:
            self._forget_ends(ends)
            return None if stored is None else stored()

        def refused(error: BaseException) -> None:
            self._changes.owe(self._put_ends, ends)
            self._progress.note_behind(seqs)
            if failed is not None:
                failed(error)

        return self._changes.submit(batch, on_disk, refused)

    def _put_ends(self, batch: WriteBatch, lease_ids: Sequence[int]) -> Callable[[], None]:
        for lease_id in lease_ids:
            if (row := self._ends.get(lease_id)) is not None:
                batch.put_lease(self._id, row)
        return lambda: self._forget_ends(lease_ids)

    def _forget_ends(self, lease_ids: Iterable[int]) -> None:
        for lease_id in lease_ids:
            self._ends.pop(lease_id, None)

    def bring_along(self, batch: WriteBatch) -> None:
        """Add all ends that may not get to the disk to the batch of a new lease."""
        for row in self._ends.values():
            batch.put_lease(self._id, row)

    def owe_row(self, lease: Lease) -> None:
        """An open lease's row is to be stored again."""
        self._changes.owe(self._put_open, [lease.id])

    def _put_open(self, batch: WriteBatch, lease_ids: Sequence[int]) -> None:
        for lease_id in lease_ids:
            lease = self._leases.find(lease_id)
            if lease is not None and lease.state == "open":
                batch.put_lease(self._id, row_of(lease))
            elif lease is not None and lease.state == "ending":
                # The ack that would end it may fail.
                self.owe_row(lease)

    def forget(self, lease_ids: Sequence[int]) -> None:
        """Forget leases that ended long ago."""
        if lease_ids:
            batch = self._changes.batch()
            self._forget_ends(lease_ids)
            for lease_id in lease_ids:
                batch.delete_lease(self._id, lease_id)
            self._changes.spawn(batch)

    # --- experiences that all have consumed

    def leave_if_done(self, seqs: Iterable[int]) -> asyncio.Future[None] | None:
        """Remove what all have consumed by now; where there is no room for that, later.

        Returns:
            The removal, if there is one.
        """
        done = self._retirement.done_among(seqs)
        if not done:
            return None
        batch = self._changes.batch()
        leaving = self._retirement.leave(batch, done, "consumed")

        def failed(error: BaseException) -> None:
            self._retirement.stay(leaving, "consumed")
            self._changes.owe_again(self.leave_if_done, [entry.record.seq for entry in done])
            _log.warning("%d consumed experiences can't be removed yet: %s", len(done), error)

        return self._changes.submit(batch, lambda: self._retirement.forget(leaving), failed)


def row_of(lease: Lease, state: LeaseState | None = None) -> LeaseRow:
    """The lease as it is stored; an ended one without its units."""
    ended = state is not None
    # Nobody asks again for one that isn't shared.
    units = lease.units if lease.world_size and not ended else []
    return LeaseRow(
        id=lease.id,
        consumer=lease.consumer,
        units=[] if ended else [list(unit.seqs) for unit in lease.units],
        deadline=clock.now() if ended else lease.deadline,
        state=state or lease.state,
        num_experiences=lease.num_experiences,
        part_sizes=list(lease.part_sizes),
        acked_parts={} if ended else dict(lease.acked_parts),
        probabilities=_unless_all([unit.probability for unit in units], 1.0),
        stale=_unless_all([unit.stale for unit in units], False),
    )


def _unless_all(values: list[_T], usual: _T) -> list[_T]:
    """The values; none where all are the usual one."""
    return values if any(value != usual for value in values) else []


def check_ack(
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


def step_of(steps: Iterable[int | None], problem_with: Callable[[int], str]) -> int | None:
    """The step that the ranks' acks of a lease count for; None, for good, if it is safe by now."""
    last = max(_given(steps), default=None)
    return None if last is None or problem_with(last) else last


def not_found(lease: Lease | None, lease_id: int, buffer_name: str) -> errors.LeaseNotFoundError:
    """Say why nothing can be done with a lease."""
    if lease is None:
        state = "is not known; it may have ended long ago"
    elif lease.state == "ending":
        state = "is being acknowledged"
    else:
        ago = max(clock.now() - lease.deadline, 0.0)
        again = "" if lease.state == "acked" else "; its experiences were offered again"
        state = f"was {lease.state} {ago:.1f} s ago{again}"
    return errors.LeaseNotFoundError(
        f"lease {lease_id} of buffer {buffer_name!r} {state}", subject=str(lease_id)
    )


def _given(steps: Iterable[int | None]) -> list[int]:
    return [step for step in steps if step is not None]
