"""Deliveries that aren't acknowledged yet, and the memory of those that ended."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from experience_buffer_server.sampling.units import Unit

LeaseState = Literal["open", "ending", "acked", "nacked", "expired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who has received a lease, or a rank's part of one, and when."""

    name: str
    """As the client named itself; empty where it didn't."""
    address: str
    """From which it called; empty where there is none."""
    caller: str
    """The name of its token or certificate; empty where it showed none."""
    on_stream: bool
    """The lease goes with the end of its stream, unless ranks share it."""
    time: float
    """Seconds since the Unix epoch."""


_NO_UNITS: Final[list[Unit]] = []
_NO_PARTS: Final[dict[int, int | None]] = {}
_NO_HOLDERS: Final[dict[int, Holder]] = {}
"""Of leases that have ended, which are many: shared, and never changed."""
_SPARE_DEADLINES = 64
"""Deadlines that don't hold any more, beside one for each open lease, before they are cleared."""


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """One delivery to one consumer.

    `open -> ending -> acked`, or `open -> nacked | expired`. While `ending`, the ack's commit is
    under way: the lease can neither expire nor be given back.
    """

    id: int
    consumer: str
    units: list[Unit]
    """In order of delivery, those of a rank together; empty once it has ended."""
    deadline: float
    """When it expires, or when it ended; seconds since the Unix epoch."""
    state: LeaseState = "open"
    is_stored: bool = False
    """It is on disk: its units may travel."""
    num_units: int = 0
    num_experiences: int = 0
    num_bytes: int = 0
    part_sizes: Sequence[int] = ()
    """Of a lease that ranks share: how many of the units, in order, are each rank's."""
    acked_parts: dict[int, int | None] = field(default_factory=dict)
    """Ranks that have acknowledged their part, with the training step."""
    policy_version: int | None = None
    """The published one when it was granted; None where there was none, or after a restart."""
    grant_time: float | None = None
    """Seconds since the Unix epoch; None: before the server started. Kept in memory only, as are holders."""
    holders: dict[int, Holder] = field(default_factory=dict)
    """By rank, who has received its part last; 0 where it isn't shared. Nobody yet, since the start."""

    @property
    def world_size(self) -> int:
        """Ranks that share it; 0: it isn't shared."""
        return len(self.part_sizes)

    @property
    def num_waiting_ranks(self) -> int:
        """Ranks that haven't acknowledged their part; 0 once it has ended."""
        return self.world_size - len(self.acked_parts) if self.state == "open" else 0

    def part(self, rank: int) -> list[Unit]:
        """The units of one rank."""
        start = sum(self.part_sizes[:rank])
        return self.units[start : start + self.part_sizes[rank]]


class LeaseTable:
    """The leases of one buffer. Not thread-safe; owned by its buffer."""

    def __init__(self, *, max_ended: int = 10_000) -> None:
        self._open: dict[int, Lease] = {}
        self._ended: dict[int, Lease] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._last_id = 0
        self._max_ended = max_ended

    def __len__(self) -> int:
        return len(self._open)

    @property
    def last_id(self) -> int:
        """The id that was given last; 0 before the first."""
        return self._last_id

    def open_ids(self) -> list[int]:
        """The ids of the leases that haven't ended, ascending."""
        return sorted(self._open)

    def of_consumer(self, consumer: str) -> list[Lease]:
        """A consumer's leases that haven't ended, by id."""
        return [lease for lease in self._open.values() if lease.consumer == consumer]

    def grant(
        self, consumer: str, units: list[Unit], deadline: float, *, part_sizes: Sequence[int] = ()
    ) -> Lease:
        """Lease units that were taken; each must be held by no other lease."""
        self._last_id += 1
        lease = Lease(
            id=self._last_id,
            consumer=consumer,
            units=units,
            deadline=deadline,
            num_units=len(units),
            num_experiences=sum(len(unit.seqs) for unit in units),
            num_bytes=sum(unit.num_bytes for unit in units),
            part_sizes=part_sizes,
        )
        for unit in dict.fromkeys(units):
            assert unit.lease_id == 0, "a unit is leased twice"
            unit.lease_id = lease.id
            unit.num_deliveries += 1
        self._add(lease)
        return lease

    def reserve(self, lease_id: int) -> None:
        """Give ids above this one only: it was given to a lease that can't be read back."""
        self._last_id = max(self._last_id, lease_id)

    def restore(self, lease: Lease) -> None:
        """Put back a lease as stored; its units' counts are already those of the delivery."""
        self._last_id = max(self._last_id, lease.id)
        if lease.state != "open":
            self._ended[lease.id] = lease
            return
        for unit in lease.units:
            unit.lease_id = lease.id
        self._add(lease)

    def find(self, lease_id: int) -> Lease | None:
        """An open or remembered lease."""
        return self._open.get(lease_id) or self._ended.get(lease_id)

    def take_out(self, lease: Lease, units: Collection[Unit]) -> None:
        """Let an open lease go on without some of its units; each rank keeps what is left of its own."""
        parts = [lease.part(rank) for rank in range(lease.world_size)] or [lease.units]
        kept = [[unit for unit in part if unit not in units] for part in parts]
        lease.units = [unit for part in kept for unit in part]
        lease.part_sizes = [len(part) for part in kept] if lease.world_size else ()
        lease.num_units = len(lease.units)
        lease.num_experiences = sum(len(unit.seqs) for unit in lease.units)
        lease.num_bytes = sum(unit.num_bytes for unit in lease.units)
        for unit in units:
            unit.lease_id = 0
            unit.num_deliveries -= 1

    def extend(self, lease: Lease, deadline: float) -> None:
        """Let an open lease expire later; never earlier."""
        if deadline > lease.deadline:
            lease.deadline = deadline
            self._watch(lease)

    def end(self, lease: Lease, state: LeaseState, now: float) -> list[int]:
        """Close a lease and free its units; returns ids of ended leases that are now forgotten."""
        del self._open[lease.id]
        for unit in lease.units:
            unit.lease_id = 0
        lease.units = _NO_UNITS
        lease.acked_parts = _NO_PARTS
        lease.holders = _NO_HOLDERS
        lease.state = state
        lease.deadline = now
        self._ended[lease.id] = lease
        forgotten = []
        while len(self._ended) > self._max_ended:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            forgotten.append(oldest)
        return forgotten

    def expired(self, now: float) -> list[Lease]:
        """Open leases past their deadline, earliest first; the caller ends them."""
        due: dict[int, Lease] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._open.get(lease_id)
            if lease is None or lease.deadline > now:
                continue
            if lease.state == "ending":
                # Its ack is being committed; look again if that fails.
                heapq.heappush(self._deadlines, (now + 1.0, lease_id))
                continue
            due[lease_id] = lease
        return list(due.values())

    def _add(self, lease: Lease) -> None:
        self._open[lease.id] = lease
        self._watch(lease)

    def _watch(self, lease: Lease) -> None:
        """Note a deadline; those of before an extension and of ended leases are cleared at times."""
        if len(self._deadlines) > 2 * len(self._open) + _SPARE_DEADLINES:
            self._deadlines = [(lease.deadline, lease.id) for lease in self._open.values()]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (lease.deadline, lease.id))
