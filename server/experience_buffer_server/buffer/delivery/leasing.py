"""Leases of one buffer made durable: granted, extended, given back, expired.

Memory goes ahead of the disk where a lease ends: its units are offered again at once. Until that is
stored, every new lease brings the ends of those before it along: else a unit could be in two open
leases on disk. The rules of leases are in `sampling.leases`; acknowledgements are in `acks`, which units
are offered to whom is the business of `offers`. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final, Literal, TypeAlias, TypeVar

from experience_buffer import errors
from experience_buffer_server.buffer.delivery import quarantine
from experience_buffer_server.buffer.delivery.offers import Offers
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer, Want
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.callers import LOCAL_NAME, address_of, current_caller
from experience_buffer_server.sampling.leases import Holder, Lease, LeaseState
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import LeaseRow, WriteBatch

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

Prepare: TypeAlias = Callable[[str, Lease], Awaitable[None]]
"""Makes an answer of a lease, given why it holds fewer than were asked for."""
RETURNED: Final = (
    "the batch was returned before it was sent: its consumer was rewound or changed; ask again"
)
ReturnReason = Literal[
    "nacked",
    "expired",
    "stream_closed",
    "consumer_removed",
    "rewound",
    "undeliverable",
    "unread",
    "cancelled",
]
"""Why a lease ended without an ack; a label of the metrics."""
_BLAMED: Final = frozenset({"nacked", "expired", "stream_closed"})
"""Reasons that may be the experiences' fault: they count towards `max_deliveries`."""
_UNSEEN: Final = frozenset({"undeliverable", "unread", "cancelled"})
"""Reasons of leases that nobody has looked at: they come for the first time, not again."""


class Leasing:
    """The leases of one buffer. Not thread-safe."""

    def __init__(self, state: BufferState, offers: Offers) -> None:
        self._state = state
        self._offers = offers
        self._changes = state.changes
        self._ends: dict[int, LeaseRow] = {}
        """Ends of leases that may not be on disk, under way or owed, by lease."""

    async def sample(
        self, consumer: Consumer, want: Want, stop: asyncio.Event, prepare: Prepare | None
    ) -> tuple[Lease | None, str]:
        """Lease one batch that nobody shares, waiting for it if need be; see `Buffer.sample`."""
        units, shortfall = await self._offers.line.take(consumer, want, stop)
        if not units:
            return None, shortfall
        meanwhile = None if prepare is None else partial(prepare, shortfall)
        lease = await self.grant(consumer.name, units, want.lease_seconds, meanwhile=meanwhile)
        if lease.state != "open":
            return None, RETURNED
        # Once the answer is on its way: counting takes long enough to be felt.
        asyncio.get_running_loop().call_soon(self.note_delivery, consumer, units)
        return lease, shortfall

    def note_delivery(self, consumer: Consumer, units: Sequence[Unit]) -> None:
        """Count units that are on their way to a consumer."""
        if self._state.closed:
            return  # The series of a deleted buffer have ended.
        now = clock.now()
        entries = self._state.contents.by_seqs(seq for unit in units for seq in unit.seqs)
        behind = self._state.staleness
        ages = [max(now - entry.record.push_time, 0.0) for entry in entries]
        staleness = [versions for entry in entries if (versions := behind(entry)) is not None]
        self._state.metrics.sampled(
            self._state.name,
            consumer.name,
            num_bytes=sum(entry.record.payload_bytes for entry in entries),
            ages=ages,
            staleness=staleness,
        )
        self._state.telemetry.trends.delivered(
            consumer.name, ages, staleness, is_raw=consumer.settings.raw
        )

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
        lease.policy_version = self._state.row.policy_version
        lease.grant_time = deadline - seconds
        if not part_sizes:
            note_holder(lease)
        if (holder := self._state.consumers.get(consumer)) is not None:
            holder.lent(lease)
        batch = self._changes.batch()
        for row in self._ends.values():
            batch.put_lease(self._state.id, row)
        batch.put_lease(self._state.id, row_of(lease))
        granting = self._changes.submit(
            batch, lambda: self._granted(lease), lambda error: self._refused(lease)
        )
        try:
            if meanwhile is not None:
                await meanwhile(lease)
            await granting
        except BaseException as error:
            # Nobody will hear of it: its units would wait for its expiry. But a shared one that is
            # stored may have been given to another rank.
            if not (lease.world_size and lease.is_stored):
                is_over = isinstance(error, asyncio.CancelledError)
                self.give_back([lease.id], "cancelled" if is_over else "undeliverable")
            raise
        return lease

    def _granted(self, lease: Lease) -> None:
        lease.is_stored = True

    def _refused(self, lease: Lease) -> None:
        if lease.state == "open":
            self._end(lease, "nacked", redeliver=False)

    async def extend(self, lease_id: int, seconds: float) -> Lease:
        """Let a lease expire some seconds from now, never earlier than it would.

        Raises:
            LeaseNotFoundError: No such lease, or it has ended.
            StoreFullError: It can't be stored; until a restart the new deadline holds.
        """
        lease = self.find(lease_id, ("open", "ending"))
        if lease.state == "open":
            self._state.leases.extend(lease, clock.now() + seconds)
            await self.store_row(lease)
        return lease

    async def nack(self, lease_id: int, *, reason: str, unread: bool = False) -> int:
        """End a lease: its experiences are offered again at once. Returns their number. Idempotent.

        One that is `unread` doesn't count as a delivery.

        Raises:
            LeaseNotFoundError: No such lease, or it was acknowledged or has expired.
        """
        lease = self.find(lease_id, ("open", "nacked"))
        if lease.state == "open":
            _log.info("lease %d of buffer %r nacked: %s", lease_id, self._state.name, reason)
            await self._give_back(lease, "nacked", "unread" if unread else "nacked")
        return lease.num_experiences

    def is_open(self, lease_id: int) -> bool:
        """Whether a lease hasn't ended; one whose end is being stored may be open again."""
        lease = self._state.leases.find(lease_id)
        return lease is not None and lease.state in ("open", "ending")

    def give_back(self, lease_ids: Iterable[int], reason: ReturnReason) -> None:
        """Give back those of the leases that are still open; for a stream that has ended.

        Of an `undeliverable` lease nothing was sent, one that is `unread` nobody has looked at, and of one
        that is `cancelled` nobody waits for the answer: they don't count as deliveries.
        """
        for lease_id in lease_ids:
            lease = self._state.leases.find(lease_id)
            if lease is not None and lease.state == "open" and not self._state.closed:
                self._changes.log(self._give_back(lease, "nacked", reason))

    def expire(self, now: float) -> None:
        """End the leases past their deadline; their experiences are offered again."""
        for lease in self._state.leases.expired(now):
            self._changes.log(self._give_back(lease, "expired", "expired"))

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

    def _give_back(
        self, lease: Lease, state: LeaseState, reason: ReturnReason
    ) -> asyncio.Future[None]:
        """Offer again first, store afterwards: after a crash in between the lease just expires."""
        batch = self._changes.batch()
        self._note_return(batch, lease, state, reason)
        return self.submit_ends(
            batch, [lease], lambda: None, state=state, redeliver=reason not in _UNSEEN
        )

    def _note_return(
        self, batch: WriteBatch, lease: Lease, state: LeaseState, reason: ReturnReason
    ) -> None:
        batch.put_lease(self._state.id, row_of(lease, state=state))
        for unit in dict.fromkeys(lease.units) if reason in _BLAMED else ():
            self._state.progress.note_delivery(batch, unit, lease.consumer)
            quarantine.blame(self._state, batch, lease.consumer, unit, reason)
        self._state.metrics.redelivered(
            self._state.name, lease.consumer, reason, lease.num_experiences
        )

    def submit_ends(
        self,
        batch: WriteBatch,
        leases: Sequence[Lease],
        stored: Callable[[], _T],
        failed: Callable[[BaseException], object] | None = None,
        *,
        state: LeaseState = "nacked",
        redeliver: bool = True,
    ) -> asyncio.Future[_T]:
        """Submit a batch with which leases end without an ack, and offer their experiences again.

        If it fails, the ends are stored later; see `Changes.submit`.
        """
        ends = {lease.id: row_of(lease, state=state) for lease in leases}
        # Deliveries of these may have been counted.
        seqs = [seq for lease in leases for unit in lease.units for seq in unit.seqs]
        self._ends.update(ends)

        def on_disk() -> _T:
            self._forget_ends(ends)
            return stored()

        def refused(error: BaseException) -> None:
            self._changes.owe(self._put_ends, ends)
            self._state.progress.note_behind(seqs)
            if failed is not None:
                failed(error)

        submitted = self._changes.submit(batch, on_disk, refused)
        for lease in leases:
            self._end(lease, state, redeliver=redeliver)
        return submitted

    def _put_ends(self, batch: WriteBatch, lease_ids: Sequence[int]) -> Callable[[], None]:
        for lease_id in lease_ids:
            if (row := self._ends.get(lease_id)) is not None:
                batch.put_lease(self._state.id, row)
        return lambda: self._forget_ends(lease_ids)

    def _forget_ends(self, lease_ids: Iterable[int]) -> None:
        for lease_id in lease_ids:
            self._ends.pop(lease_id, None)

    def _end(self, lease: Lease, state: LeaseState, *, redeliver: bool) -> None:
        self._offers.returned(lease, self.close(lease, state), redeliver=redeliver)

    def close(self, lease: Lease, state: LeaseState) -> list[Unit]:
        """A lease has ended in memory; returns its units, and forgets leases that ended long ago."""
        units = list(lease.units)
        if forgotten := self._state.leases.end(lease, state, clock.now()):
            batch = self._changes.batch()
            self._forget_ends(forgotten)
            for lease_id in forgotten:
                batch.delete_lease(self._state.id, lease_id)
            self._changes.spawn(batch)
        self._state.events.returning(units)
        return units

    def store_row(
        self,
        lease: Lease,
        stored: Callable[[], None] | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> asyncio.Future[None]:
        """Store an open lease as it is; see `Changes.submit`."""
        batch = self._changes.batch()
        batch.put_lease(self._state.id, row_of(lease))
        return self._changes.submit(batch, stored, failed)

    def find(self, lease_id: int, allowed: tuple[LeaseState, ...]) -> Lease:
        """The lease, which is in one of these states.

        Raises:
            LeaseNotFoundError: It is in another, or there is none.
        """
        lease = None if self._state.closed else self._state.leases.find(lease_id)
        if lease is not None and lease.state in allowed:
            return lease
        raise _not_found(lease, lease_id, self._state.name)


def note_holder(lease: Lease, rank: int = 0) -> None:
    """Whoever calls receives a lease, or a rank's part of it."""
    caller = current_caller()
    lease.holders[rank] = Holder(
        name=caller.holder,
        address=caller.address,
        caller="" if caller.name in (LOCAL_NAME, address_of(caller.peer)) else caller.name,
        on_stream=caller.on_stream,
        time=clock.now(),
    )


def row_of(lease: Lease, state: LeaseState | None = None, *, step: int | None = None) -> LeaseRow:
    """The lease as it is stored; an ended one without its units.

    But one that was acknowledged with a training step keeps them: what the step has consumed, and in
    which order, can be asked for as long as the lease is remembered.
    """
    ended = state is not None
    # Nobody asks again for one that isn't shared.
    units = lease.units if lease.world_size and not ended else []
    return LeaseRow(
        id=lease.id,
        consumer=lease.consumer,
        units=[list(unit.seqs) for unit in lease.units] if step is not None or not ended else [],
        deadline=clock.now() if ended else lease.deadline,
        state=state or lease.state,
        num_experiences=lease.num_experiences,
        part_sizes=list(lease.part_sizes),
        acked_parts=_parts_of(lease, step, ended=ended),
        probabilities=_unless_all([unit.probability for unit in units], 1.0),
        stale=_unless_all([unit.stale for unit in units], False),
    )


def _parts_of(lease: Lease, step: int | None, *, ended: bool) -> dict[int, int | None]:
    if step is not None:
        return {0: step}
    return {} if ended else dict(lease.acked_parts)


def _unless_all(values: list[_T], usual: _T) -> list[_T]:
    """The values; none where all are the usual one."""
    return values if any(value != usual for value in values) else []


def _not_found(lease: Lease | None, lease_id: int, buffer_name: str) -> errors.LeaseNotFoundError:
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
