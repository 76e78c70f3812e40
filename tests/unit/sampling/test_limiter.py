"""The limiter against Reverb's rules, written out by hand, and against an exhaustive search."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from fractions import Fraction
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer_server.sampling.limiter import (
    Answer,
    Counts,
    LimiterPlan,
    can_insert,
    can_sample,
    largest_insert,
    refund,
)

OK = Answer(True, "", "")


def queue(size: int) -> LimiterPlan:
    """At most `size` items wait to be sampled, each once: Reverb's Queue."""
    return LimiterPlan(min_diff=0.0, max_diff=float(size))


# Reverb's named limiters: MinSize, SampleToInsertRatio and Queue.
MIN_SIZE = LimiterPlan(min_size=3)
RATIO = LimiterPlan(min_size=3, samples_per_insert=2.0, min_diff=2.0, max_diff=10.0)
QUEUE = queue(3)


# What Reverb answers, from its two inequalities: (inserts, deletes, samples), n.
@pytest.mark.parametrize(
    ("plan", "counts", "n", "sample", "insert"),
    [
        (MIN_SIZE, (0, 0, 0), 1, "min_size", ""),
        (MIN_SIZE, (2, 0, 0), 1, "min_size", ""),
        (MIN_SIZE, (3, 0, 0), 1, "", ""),
        (MIN_SIZE, (3, 0, 999), 999, "", ""),
        (MIN_SIZE, (3, 1, 0), 1, "min_size", ""),
        (MIN_SIZE, (4, 1, 0), 1, "", ""),
        (MIN_SIZE, (999, 1, 0), 99, "", ""),
        (RATIO, (2, 0, 0), 1, "min_size", ""),
        (RATIO, (3, 0, 0), 4, "", "max_diff"),  # 6 - 4 = 2; (3 + 4) * 2 = 14
        (RATIO, (3, 0, 0), 5, "min_diff", "max_diff"),
        (RATIO, (3, 0, 0), 2, "", ""),  # (3 + 2) * 2 = 10
        (RATIO, (3, 0, 0), 3, "", "max_diff"),  # 12
        (RATIO, (5, 0, 1), 1, "", "max_diff"),  # 12 - 1 = 11
        (RATIO, (5, 0, 2), 1, "", ""),  # 12 - 2 = 10
        (RATIO, (5, 0, 8), 1, "min_diff", ""),  # 10 - 8 - 1 = 1
        (RATIO, (5, 0, 7), 1, "", ""),  # 10 - 7 - 1 = 2
        (RATIO, (9, 7, 0), 1, "min_size", ""),  # free: 3 stored then
        (RATIO, (9, 7, 0), 2, "min_size", "max_diff"),
        (QUEUE, (0, 0, 0), 1, "min_size", ""),
        (QUEUE, (0, 0, 0), 3, "min_size", ""),
        (QUEUE, (0, 0, 0), 4, "min_size", "max_diff"),
        (QUEUE, (2, 0, 0), 1, "", ""),
        (QUEUE, (3, 0, 0), 1, "", "max_diff"),
        (QUEUE, (3, 0, 0), 3, "", "max_diff"),
        (QUEUE, (3, 0, 2), 1, "", ""),
        (QUEUE, (3, 0, 2), 2, "min_diff", ""),
        (QUEUE, (3, 2, 2), 1, "", ""),
        (QUEUE, (7, 7, 7), 1, "min_size", ""),
        (QUEUE, (9, 6, 6), 1, "", "max_diff"),
        # Exactly 29 - 28 - 1 = 0; in floats 0.29 * 100 is less than 29.
        (LimiterPlan(samples_per_insert=0.29, min_diff=0.0), (100, 0, 28), 1, "", ""),
        (LimiterPlan(samples_per_insert=0.1, max_diff=0.3), (2, 0, 0), 1, "", ""),
    ],
)
def test_vectors(
    plan: LimiterPlan, counts: tuple[int, int, int], n: int, sample: str, insert: str
) -> None:
    sampled, inserted = can_sample(plan, Counts(*counts), n), can_insert(plan, Counts(*counts), n)
    assert (sampled.label, inserted.label) == (sample, insert)
    for answer in (sampled, inserted):
        assert answer.ok == (not answer.label) == (not answer.reason)


def test_reasons_name_the_numbers() -> None:
    assert can_sample(RATIO, Counts(2, 0, 0), 1).reason == "2 stored of min_size 3"
    assert (
        can_sample(RATIO, Counts(5, 0, 5), 8).reason
        == "samples_per_insert 2 allows 3 more samples, a batch needs 8"
    )
    assert "allows 0 more samples" in can_sample(QUEUE, Counts(3, 0, 4), 1).reason
    assert (
        can_insert(RATIO, Counts(4, 0, 0), 3).reason
        == "samples_per_insert 2 allows 1 more inserts until more is sampled, 3 are wanted"
    )


def test_what_waiting_cannot_help_is_to_be_split() -> None:
    assert (
        can_insert(RATIO, Counts(4, 0, 0), 6).reason
        == "an insert of 6 can't go: at most 5 fit at once between min_diff 2 and max_diff 10; "
        "split it"
    )
    # 2 of 3 are stored, so that nothing is sampled, and 2 more would be too many.
    assert (
        can_insert(RATIO, Counts(9, 7, 5), 2).reason
        == "samples_per_insert 2 allows 1 of 2 inserts before anything can be sampled; split it"
    )


@pytest.mark.parametrize(
    ("plan", "largest"),
    [
        (LimiterPlan(), inf),
        (MIN_SIZE, inf),
        (LimiterPlan(max_diff=5.0), inf),
        (LimiterPlan(min_diff=5.0), inf),
        (QUEUE, 3),
        (LimiterPlan(min_diff=0.0, max_diff=3.0, min_size=7), 7),
        (LimiterPlan(min_diff=2.0, max_diff=10.0, samples_per_insert=2.0), 5),
        (LimiterPlan(min_diff=-2.0, max_diff=10.0, samples_per_insert=2.0), 6),
        (LimiterPlan(min_diff=-2.0, max_diff=10.9, samples_per_insert=2.0), 6),
        (LimiterPlan(min_diff=0.0, max_diff=2.0, samples_per_insert=0.1), 20),
    ],
)
def test_largest_inserts(plan: LimiterPlan, largest: float) -> None:
    assert largest_insert(plan) == largest
    if largest < inf:
        lowest = Counts(0, 0, max(0, -int(plan.min_diff)))
        assert can_insert(plan, lowest, int(largest)).ok
        refused = can_insert(plan, lowest, int(largest) + 1)
        assert "split it" in refused.reason
        assert not refused.can_wait


def test_bytes_are_bounded() -> None:
    plan = LimiterPlan(min_size=2, max_ahead_bytes=100)
    full = Counts(3, 0, 0, ahead_bytes=90)
    assert can_insert(plan, full, 1, num_bytes=10) == OK
    assert can_insert(plan, full, 1, num_bytes=11) == (
        False,
        "90 bytes are not sampled yet, 11 more exceed max_ahead_bytes 100",
        "ahead_bytes",
        True,
    )
    assert can_insert(plan, full, 2, num_bytes=101) == (
        False,
        "an insert of 101 bytes exceeds max_ahead_bytes 100 alone; split it",
        "ahead_bytes",
        False,
    )
    assert "101 more exceed" in can_insert(plan, full, 1, num_bytes=101).reason
    assert can_insert(plan, Counts(3, 0, 3), 1, num_bytes=101) == OK
    assert not can_insert(plan, Counts(3, 0, 3), 2, num_bytes=101).ok
    assert can_insert(LimiterPlan(), full, 1, num_bytes=1 << 40) == OK


def test_bytes_do_not_keep_a_first_sample_away() -> None:
    plan = LimiterPlan(min_size=2, min_diff=3.0, max_ahead_bytes=100)
    assert can_insert(plan, Counts(1, 0, 0, ahead_bytes=90), 1, num_bytes=90) == OK
    assert can_insert(plan, Counts(2, 0, 0, ahead_bytes=180), 2, num_bytes=180) == OK
    assert not can_insert(plan, Counts(4, 0, 0, ahead_bytes=360), 1, num_bytes=90).ok


@pytest.mark.parametrize(
    ("ratio", "times_sampled", "left"),
    [
        (1.0, 0, (0, 0)),
        (1.0, 1, (0, 0)),
        (1.0, 2, (1, 2)),
        (2.5, 2, (0, 0)),
        (2.5, 3, (1, 3)),
        (0.5, 0, (0, 0)),
        (0.5, 1, (1, 1)),
    ],
)
def test_refunds(ratio: float, times_sampled: int, left: tuple[int, int]) -> None:
    assert refund(LimiterPlan(samples_per_insert=ratio), times_sampled=times_sampled) == left


@pytest.mark.parametrize(
    ("plan", "batch_size", "problem"),
    [
        (LimiterPlan(min_diff=2, max_diff=1), 1, "between min_diff 2 and max_diff 1; swap"),
        (queue(7), 8, "with batches of 8, .* max_diff to 8,"),
        (
            LimiterPlan(samples_per_insert=1.5, min_diff=0.25, max_diff=2.4),
            1,
            "between min_diff 0.25 and max_diff 2.4, .* raise max_diff to 2.5,",
        ),
        (LimiterPlan(), 512, "^$"),
        (LimiterPlan(max_diff=5.0), 512, "^$"),
        (LimiterPlan(min_diff=5.0), 512, "^$"),
        (queue(1), 1, "^$"),
        (queue(8), 8, "^$"),
        (LimiterPlan(samples_per_insert=1.5, min_diff=0.25, max_diff=2.5), 1, "^$"),
    ],
)
def test_impossible_plans_are_named(plan: LimiterPlan, batch_size: int, problem: str) -> None:
    assert re.search(problem, plan.problem(batch_size))


# A table, small enough to try everything that can happen to it: how often each item that is
# stored was sampled, ascending; deletes; samples of those deleted.
Table = tuple[tuple[int, ...], int, int]
EMPTY: Table = ((), 0, 0)


def counts_of(table: Table) -> Counts:
    stored, deletes, gone = table
    return Counts(len(stored) + deletes, deletes, sum(stored) + gone)


def next_tables(plan: LimiterPlan, table: Table, batch: int) -> Iterator[Table]:
    stored, deletes, gone = table
    counts = counts_of(table)
    for n in (1, 2):
        if can_insert(plan, counts, n).ok:
            yield tuple(sorted((*stored, *[0] * n))), deletes, gone
    for place in range(len(stored)):
        others = stored[:place] + stored[place + 1 :]
        for n in {1, batch}:
            if can_sample(plan, counts, n).ok:
                yield tuple(sorted((*others, stored[place] + n))), deletes, gone
        inserts, samples = refund(plan, times_sampled=stored[place])
        yield others, deletes + inserts, gone + samples


def is_stuck(plan: LimiterPlan, table: Table, batch: int) -> bool:
    counts = counts_of(table)
    return not can_insert(plan, counts, 1).ok and not can_sample(plan, counts, batch).ok


def finds_stuck(plan: LimiterPlan, batch: int, max_tables: int) -> bool:
    seen, frontier = {EMPTY}, [EMPTY]
    while frontier and len(seen) < max_tables:
        following = []
        for table in frontier:
            if is_stuck(plan, table, batch):
                return True
            for after in next_tables(plan, table, batch):
                if after not in seen:
                    seen.add(after)
                    following.append(after)
        frontier = following
    return any(is_stuck(plan, table, batch) for table in frontier)


def boundary_plans(seed: int, count: int) -> Iterator[tuple[LimiterPlan, LimiterPlan, int]]:
    """The narrowest accepted window and the widest refused one, of random settings."""
    rng = random.Random(seed)
    for _ in range(count):
        ratio = rng.choice([Fraction(1, 2), Fraction(1), Fraction(3, 2), Fraction(2), Fraction(3)])
        min_size, batch = rng.randint(1, 3), rng.randint(1, 3)
        min_diff = Fraction(rng.choice([-2, 0, 1, 2, 4]), 2)
        step = Fraction(1, ratio.denominator)
        max_diff = min_diff
        plans = []
        while True:
            plan = LimiterPlan(
                min_size=min_size,
                samples_per_insert=float(ratio),
                min_diff=float(min_diff),
                max_diff=float(max_diff),
            )
            plans.append(plan)
            if not plan.problem(batch):
                break
            max_diff += step
        assert len(plans) > 1
        yield plans[-1], plans[-2], batch


def test_exactly_the_plans_that_can_get_stuck_are_refused() -> None:
    for accepted, refused, batch in boundary_plans(17, 60):
        assert not finds_stuck(accepted, batch, 200), (accepted, batch)
        assert finds_stuck(refused, batch, 20_000), (refused, batch)


PLANS = st.builds(
    LimiterPlan,
    min_size=st.integers(1, 9),
    samples_per_insert=st.sampled_from([0.1, 0.29, 0.5, 1.0, 1.5, 2.0, 7.0]),
    min_diff=st.just(-inf) | st.integers(-20, 40).map(lambda number: number / 4),
    max_diff=st.just(inf) | st.integers(0, 200).map(lambda number: number / 4),
)


@settings(max_examples=300)
@given(PLANS, st.integers(1, 7), st.integers(1, 7), st.randoms(use_true_random=False))
def test_accepted_plans_keep_their_window_and_never_get_stuck(
    plan: LimiterPlan, batch: int, insert: int, rng: random.Random
) -> None:
    if plan.problem(batch):
        return
    ratio = Fraction(str(plan.samples_per_insert))
    table = EMPTY
    for _ in range(60):
        assert not is_stuck(plan, table, batch)
        before, n = counts_of(table), rng.choice([1, batch, insert])
        diff = before.inserts * ratio - before.samples
        size = before.inserts - before.deletes
        stored, deletes, gone = table
        match rng.choice(["insert", "insert", "sample", "sample", "evict"]):
            case "insert" if n <= insert:
                fits = diff + n * ratio <= plan.max_diff or size + n <= plan.min_size
                assert can_insert(plan, before, n).ok == fits
                if fits:
                    table = ((*stored, *[0] * n), deletes, gone)
            case "sample" if n <= batch:
                assert can_sample(plan, before, n).ok == (
                    size >= plan.min_size and diff - n >= plan.min_diff
                )
                if can_sample(plan, before, n).ok:
                    times = list(stored)
                    for _ in range(n):
                        times[rng.randrange(len(times))] += 1
                    table = (tuple(times), deletes, gone)
            case "evict" if stored:
                place = rng.randrange(len(stored))
                inserts, samples = refund(plan, times_sampled=stored[place])
                table = (
                    stored[:place] + stored[place + 1 :],
                    deletes + inserts,
                    gone + samples,
                )
