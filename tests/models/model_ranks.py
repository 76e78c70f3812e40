"""Leases that ranks share: who asks gets its part again until it has acknowledged it."""

from __future__ import annotations

from tests.models.model import Lease, Model


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


def reached(lease: Lease, step: int) -> bool:
    """Whether a rank has acknowledged its part with this step or a later one."""
    return any(given >= step for given in lease.acked.values() if given is not None)


def ack(model: Model, lease_id: int, step: int | None, rank: int) -> None:
    """The lease ends with its last rank, at the latest of their steps; for good if it is safe by now."""
    lease = model.leases[lease_id]
    lease.acked[rank] = step
    if len(lease.acked) == len(lease.parts):
        safe = model.places[lease.consumer].safe
        last = max((given for given in lease.acked.values() if given is not None), default=None)
        is_safe = last is not None and safe is not None and last <= safe
        model.ack(lease_id, None if is_safe else last)
