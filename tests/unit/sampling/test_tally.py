"""The counts of a limiter, begun anew."""

from __future__ import annotations

import pytest

from experience_buffer_server.sampling.limiter import LimiterPlan
from experience_buffer_server.sampling.tally import Tally

PLAN = LimiterPlan(samples_per_insert=4.0)


def difference(tally: Tally) -> float:
    counts = tally.counts()
    return counts.inserts * PLAN.samples_per_insert - counts.samples


def tally_of(times: dict[int, int]) -> Tally:
    tally = Tally(departed_inserts=50, departed_samples=70)
    for key, count in times.items():
        tally.arrived(key, num_bytes=9, times=count)
    return tally


def test_the_past_does_not_count() -> None:
    tally = tally_of({1: 1, 2: 0, 3: 1})
    tally.rebase({1, 99})
    assert difference(tally) == 2 * 4 - 1
    assert tally.counts().inserts - tally.counts().deletes == 3


@pytest.mark.parametrize("consumed", [True, False])
def test_what_is_finished_leaves_without_a_trace(consumed: bool) -> None:
    tally = tally_of({1: 1, 2: 0})
    tally.rebase({1})
    tally.leaving(1, PLAN, consumed=consumed)
    assert difference(tally) == 4
    tally.stays(1)
    assert difference(tally) == 4
    tally.leaving(1, PLAN, consumed=consumed)
    tally.left(1)
    assert difference(tally) == 4
    assert (tally.departed_inserts, tally.departed_samples) == (0, 0)
    tally.arrived(1, num_bytes=9, times=1)
    tally.leaving(1, PLAN, consumed=False)
    assert difference(tally) == 4, "another unit under the same number is refunded"


def test_what_is_on_its_way_out_is_the_past_unless_it_stays() -> None:
    tally = tally_of({1: 2, 2: 0})
    tally.leaving(1, PLAN, consumed=True)
    tally.rebase(())
    assert difference(tally) == 4
    tally.stays(1)
    assert difference(tally) == 4 + 4 - 2


def test_a_rewound_one_may_be_sampled_as_often_as_before() -> None:
    tally = tally_of({1: 1, 2: 0})
    tally.rebase({1})
    tally.sampled(1, -1)
    assert difference(tally) == 4 + 1
