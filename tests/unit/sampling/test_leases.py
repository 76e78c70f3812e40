"""The table of leases: deadlines that move, pass, and wait for an ack."""

from __future__ import annotations

from experience_buffer_server.sampling.leases import Lease, LeaseTable
from experience_buffer_server.sampling.units import Unit


def grant(table: LeaseTable, key: int, deadline: float) -> Lease:
    unit = Unit(key=key, seqs=(key,), num_bytes=7, num_tokens=3)
    return table.grant("c", [unit], deadline)


def test_a_lease_that_is_being_acknowledged_keeps_no_other_from_expiring() -> None:
    table = LeaseTable()
    ending, other = grant(table, 1, 11.0), grant(table, 2, 13.0)
    ending.state = "ending"
    assert table.expired(17.0) == [other]
    table.end(other, "expired", 17.0)
    ending.state = "open"
    assert table.expired(17.5) == []
    assert table.expired(18.5) == [ending]


def test_deadlines_that_moved_take_no_memory() -> None:
    table = LeaseTable()
    leases = [grant(table, key, 100.0 + key) for key in range(5)]
    for round_ in range(1, 1001):
        for lease in leases:
            table.extend(lease, 100.0 + 7.0 * round_ + lease.id)
    assert len(table._deadlines) <= 2 * len(leases) + 65
    assert table.expired(7000.0) == []
    assert table.expired(7103.0) == leases[:3]


def test_ended_leases_leave_no_deadlines() -> None:
    table = LeaseTable()
    for key in range(1000):
        table.end(grant(table, key, 1e9), "acked", 1.0)
    assert len(table._deadlines) <= 66


def test_each_unit_of_a_shared_lease_is_one_ranks() -> None:
    table = LeaseTable()
    units = [Unit(key=key, seqs=(key,), num_bytes=7, num_tokens=3) for key in range(1, 8)]
    lease = table.grant("c", units, 11.0, part_sizes=[2, 0, 3, 2])
    assert [[unit.key for unit in lease.part(rank)] for rank in range(4)] == [
        [1, 2],
        [],
        [3, 4, 5],
        [6, 7],
    ]
    table.take_out(lease, units[1:3])
    assert [[unit.key for unit in lease.part(rank)] for rank in range(4)] == [
        [1],
        [],
        [4, 5],
        [6, 7],
    ]
