"""Leases that ranks share: who asks gets its part again until it has acknowledged it."""

from __future__ import annotations

from tests.unit.server.timeline_model import Lease, Model


def world_size(model: Model, name: str) -> int:
    """Ranks that share what is open; 0: nothing is."""
    return max((len(lease.parts) for lease in model.leases_of(name).values()), default=0)


def due(model: Model, name: str, rank: int, after_lease_id: int) -> int | None:
    """The open lease that a rank gets, before a new batch is formed for it."""
    leases = sorted(model.leases_of(name).items())
    return next((i for i, le in leases if i > after_lease_id and rank not in le.acked), None)


def part(model: Model, lease: Lease, rank: int) -> list[list[str]]:
    """A rank's groups, member by member; a dropped one is delivered to the end of its lease."""
    start = sum(lease.parts[:rank])
    units = lease.units[start : start + lease.parts[rank]]
    return [[m.uid for m in model.groups[unit].live] for unit in units]


def ack(model: Model, lease_id: int, step: int | None, rank: int) -> None:
    """The lease ends with its last rank, at the latest of their steps."""
    lease = model.leases[lease_id]
    lease.acked[rank] = step
    if len(lease.acked) == len(lease.parts):
        given = [step for step in lease.acked.values() if step is not None]
        model.ack(lease_id, max(given, default=None))
