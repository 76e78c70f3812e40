"""What a training step has consumed: by its leases, of which the newest count, in their order."""

from __future__ import annotations

from typing import Any

from experience_buffer_server.store.deliveries import Delivered, deliveries
from experience_buffer_server.store.interface import LeaseRow


def lease(number: int, units: list[list[int]], step: int = 5, **others: Any) -> LeaseRow:
    given: dict[str, Any] = {"consumer": "trainer", "deadline": 1.0, "state": "acked"} | others
    return LeaseRow(id=number, units=units, acked_parts={0: step}, **given)


def found(leases: list[LeaseRow], acked: dict[int, int]) -> list[tuple[int, int, int]]:
    return [(d.seq, d.lease_id, d.unit) for d in deliveries(leases, "trainer", 5, acked)]


def test_leases_come_in_the_order_in_which_they_were_granted() -> None:
    leases = [lease(9, [[4, 2], [7]]), lease(8, [[3], [1, 5]])]
    acked = dict.fromkeys((1, 2, 3, 4, 5, 7), 1)
    assert found(leases, acked) == [
        (3, 8, 0), (1, 8, 1), (5, 8, 1), (4, 9, 0), (2, 9, 0), (7, 9, 1),
    ]  # fmt: skip


def test_others_leases_and_steps_are_none_of_it() -> None:
    leases = [
        lease(1, [[1]], consumer="critic"),
        lease(2, [[1]], step=4),
        lease(3, [[1]], state="open"),
        LeaseRow(id=4, consumer="trainer", units=[], deadline=1.0, state="acked"),
        lease(5, [[1]]),
    ]
    assert found(leases, {1: 1}) == [(1, 5, 0)]


def test_of_a_step_that_was_trained_twice_the_newest_leases_count() -> None:
    leases = [lease(1, [[1], [2]]), lease(2, [[3], [4]]), lease(7, [[4], [1]]), lease(8, [[2]])]
    assert found(leases, {1: 1, 2: 1, 4: 1}) == [(4, 7, 0), (1, 7, 1), (2, 8, 0)]


def test_what_a_step_got_twice_comes_twice() -> None:
    leases = [lease(1, [[1], [2]]), lease(2, [[1]])]
    assert found(leases, {1: 2, 2: 1}) == [(1, 1, 0), (2, 1, 1), (1, 2, 0)]


def test_what_has_left_since_is_left_out_and_what_is_forgotten_comes_last() -> None:
    leases = [lease(3, [[1, 2], [9]])]
    assert found(leases, {1: 1, 9: 1, 12: 1, 10: 2}) == [
        (1, 3, 0), (9, 3, 1), (10, 0, 0), (10, 0, 1), (12, 0, 2),
    ]  # fmt: skip
    assert found([], {}) == []


def test_parts_of_a_shared_lease_say_their_rank() -> None:
    leases = [lease(3, [[1], [2], [3, 4]], part_sizes=[1, 0, 2])]
    acked = dict.fromkeys((1, 2, 3, 4), 1)
    assert deliveries(leases, "trainer", 5, acked) == [
        Delivered(1, 3, 0, 0), Delivered(2, 3, 1, 2), Delivered(3, 3, 2, 2), Delivered(4, 3, 2, 2),
    ]  # fmt: skip
