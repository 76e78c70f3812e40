"""Deliveries that aren't acknowledged yet, and the memory of those that ended."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from experience_buffer_server.sampling.queue import Unit

LeaseState = Literal["open", "ending", "acked", "nacked", "expired"]


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """One delivery to one consumer.

    `open -> ending -> acked`, or `open -> nacked | expired`. While `ending`, the ack's commit is
    under way: the lease can neither expire nor be given back.
    """

    id: int
    consumer: str
    units: list[Unit]
    deadline: float
    """When it expires, or when it ended; seconds since the Unix epoch."""
    state: LeaseState = "open"
    num_experiences: int = 0


class LeaseTable:
    """The leases of one buffer. Not thread-safe; owned by its buffer."""

    def __init__(self, *, max_ended: int = 10_000) -> None:
        self._open: dict[int, Lease] = {}
        self._ended: OrderedDict[int, Lease] = OrderedDict()
        self._deadlines: list[tuple[float, int]] = []
        self._last_id = 0
        self._max_ended = max_ended

    def __len__(self) -> int:
        return len(self._open)

    def of_consumer(self, consumer: str) -> list[Lease]:
        """A consumer's leases that haven't ended, by id."""
        return [lease for lease in self._open.values() if lease.consumer == consumer]

    def grant(self, consumer: str, units: list[Unit], deadline: float) -> Lease:
        """Lease waiting units; each must be held by no other lease."""
        self._last_id += 1
        lease = Lease(
            id=self._last_id,
            consumer=consumer,
            units=units,
            deadline=deadline,
            num_experiences=sum(len(unit.seqs) for unit in units),
        )
        for unit in units:
            assert unit.lease_id == 0, "a unit is leased twice"
            unit.lease_id = lease.id
            unit.num_deliveries += 1
        self._add(lease)
        return lease

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

    def end(self, lease: Lease, state: LeaseState, now: float) -> list[int]:
        """Close a lease and free its units; returns ids of ended leases that are now forgotten."""
        del self._open[lease.id]
        for unit in lease.units:
            unit.lease_id = 0
        lease.units = []
        lease.state = state
        lease.deadline = now
        self._ended[lease.id] = lease
        forgotten = []
        while len(self._ended) > self._max_ended:
            forgotten.append(self._ended.popitem(last=False)[0])
        return forgotten

    def expired(self, now: float) -> list[Lease]:
        """Open leases past their deadline, earliest first; the caller ends them."""
        due = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._open.get(lease_id)
            if lease is None:
                continue
            if lease.state == "ending":
                # Its ack is being committed; look again if that fails.
                heapq.heappush(self._deadlines, (now + 1.0, lease_id))
                break
            due.append(lease)
        return due

    def _add(self, lease: Lease) -> None:
        self._open[lease.id] = lease
        heapq.heappush(self._deadlines, (lease.deadline, lease.id))
