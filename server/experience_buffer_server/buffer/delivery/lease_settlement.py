"""What the store hasn't been told yet of leases that ended, and is told once there is room.

Memory goes ahead of the disk where a lease ends: its units are offered again at once. Until that is
stored, every new lease brings the ends of those before it along: else a unit could be in two open
leases on disk. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.departure import Behind
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.tasks import Tasks
from experience_buffer_server.sampling.leases import Lease, LeaseState
from experience_buffer_server.store.interface import LeaseRow, Store, StoreError, WriteBatch

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
"""Between attempts to store what found no room."""


@dataclass(slots=True)
class _End:
    """A lease's end that isn't on disk."""

    row: LeaseRow
    seqs: list[int]
    """Its experiences, of which deliveries may have been counted."""
    failed: bool = False
    """Its commit has failed; else it is under way."""


class Settlement:
    """Brings the disk up to what memory knows of ended leases. Not thread-safe."""

    def __init__(self, state: BufferState, store: Store, tasks: Tasks) -> None:
        self._id = state.id
        self._retirement = state.retirement
        self._store = store
        self._tasks = tasks
        self._ends: dict[int, _End] = {}
        """By lease."""
        self._open: dict[int, Lease] = {}
        """Open leases whose rows may be others on disk."""
        self._consumed: set[int] = set()
        """Seqs of experiences that all have consumed, and whose removal found no room."""
        self._next_retry = 0.0

    # --- ends of leases

    def owe(
        self, leases: Iterable[Lease], state: LeaseState, committed: Awaitable[None]
    ) -> Awaitable[None]:
        """Leases end now without an ack, and the commit of that is under way.

        Returns:
            The commit, to be awaited: if it fails, the ends are stored later.
        """
        ends = [
            _End(row_of(lease, state=state), [seq for unit in lease.units for seq in unit.seqs])
            for lease in leases
        ]
        self._ends.update((end.row.id, end) for end in ends)
        return self._stored([end.row.id for end in ends], committed)

    async def _stored(self, lease_ids: Sequence[int], committed: Awaitable[None]) -> None:
        try:
            await committed
        except BaseException:
            for lease_id in lease_ids:
                if (end := self._ends.get(lease_id)) is not None:
                    end.failed = True
                    self._retirement.note_behind(end.seqs)
            raise
        for lease_id in lease_ids:
            self._ends.pop(lease_id, None)

    def bring_along(self, batch: WriteBatch) -> None:
        """Add all ends that may not get to the disk to the batch of a new lease."""
        for end in self._ends.values():
            batch.put_lease(self._id, end.row)

    def owe_row(self, lease: Lease) -> None:
        """An open lease's row is to be stored again."""
        self._open[lease.id] = lease

    def forget(self, lease_ids: Sequence[int]) -> None:
        """Forget leases that ended long ago."""
        if lease_ids:
            batch = self._store.batch()
            for lease_id in lease_ids:
                self._ends.pop(lease_id, None)
                batch.delete_lease(self._id, lease_id)
            self._tasks.spawn(self._store.commit(batch))

    # --- experiences that all have consumed

    async def leave_if_done(self, seqs: Iterable[int]) -> None:
        """Remove what all have consumed by now; where there is no room for that, later."""
        done = self._retirement.done_among(seqs)
        if not done:
            return
        batch = self._store.batch()
        leaving = self._retirement.leave(batch, done, "consumed")
        try:
            await self._store.commit(batch)
        except StoreError as error:
            self._retirement.stay(leaving, "consumed")
            self._consumed.update(entry.record.seq for entry in done)
            _log.warning("%d consumed experiences can't be removed yet: %s", len(done), error)
            return
        self._retirement.forget(leaving)

    # --- time

    def tick(self, now: float) -> None:
        """Try again to store what found no room."""
        if now < self._next_retry:
            return
        failed = [end for end in self._ends.values() if end.failed]
        leases = [lease for lease in self._open.values() if lease.state == "open"]
        # The ack that would end it may fail.
        self._open = {key: lease for key, lease in self._open.items() if lease.state == "ending"}
        behind = self._retirement.take_behind()
        consumed, self._consumed = self._consumed, set()
        if failed or leases or any(behind) or consumed:
            self._next_retry = now + _RETRY_SECONDS
        if failed or leases or any(behind):
            self._tasks.spawn(self._catch_up(failed, leases, behind))
        if consumed:
            self._tasks.spawn(self.leave_if_done(consumed))

    async def _catch_up(
        self, failed: Sequence[_End], leases: Sequence[Lease], behind: Behind
    ) -> None:
        batch = self._store.batch()
        for lease in leases:
            batch.put_lease(self._id, row_of(lease))
        for end in failed:
            end.failed = False
            batch.put_lease(self._id, end.row)
        self._retirement.put_behind(batch, behind)
        committed = self._store.commit(batch)
        try:
            await self._stored([end.row.id for end in failed], committed)
        except BaseException:
            self._retirement.stay_behind(behind)
            self._open.update((lease.id, lease) for lease in leases)
            raise


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
