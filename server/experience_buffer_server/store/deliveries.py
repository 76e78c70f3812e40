"""What a training step has consumed, in the order in which it was delivered. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from experience_buffer_server.store.rows import LeaseRow


class Delivered(NamedTuple):
    """One experience of a delivery."""

    seq: int
    lease_id: int
    """0: its delivery isn't remembered any more."""
    unit: int
    """Which unit of the lease it belongs to, from 0."""
    rank: int
    """Of a lease that ranks shared, whose part it was; else 0."""


def deliveries(
    leases: Iterable[LeaseRow], consumer: str, step: int, acked: Mapping[int, int]
) -> list[Delivered]:
    """The experiences that a consumer has acknowledged with a step, lease by lease.

    A step that was rewound and trained again has leases of before, too: the newest count.

    Args:
        leases: All that are remembered.
        consumer: Who acknowledged.
        step: The training step.
        acked: By seq, how often it is acknowledged with this step.
    """
    left = Counter(acked)
    found: list[LeaseRow] = []
    for row in sorted(leases, key=lambda row: row.id, reverse=True):
        if (row.state, row.consumer) != ("acked", consumer) or row.acked_parts.get(0) != step:
            continue
        seqs = Counter(seq for unit in row.units for seq in unit)
        # Of what has left since, nothing is known here.
        if all(count <= left[seq] or seq not in acked for seq, count in seqs.items()):
            left.subtract(seqs)
            found.append(row)
    order = [
        Delivered(seq, row.id, place, _rank(row.part_sizes, place))
        for row in reversed(found)
        for place, unit in enumerate(row.units)
        for seq in unit
        if seq in acked
    ]
    forgotten = (seq for seq in sorted(acked) for _ in range(left[seq]))
    return order + [Delivered(seq, 0, place, 0) for place, seq in enumerate(forgotten)]


def _rank(part_sizes: Iterable[int], place: int) -> int:
    for rank, size in enumerate(part_sizes):
        if place < size:
            return rank
        place -= size
    return 0
