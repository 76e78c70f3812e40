"""Histograms of numbers whose range nobody knows: nothing is lost, in whatever order it comes."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experience_buffer.history import Distribution
from experience_buffer_server.buffer.telemetry.spread import MAX_BINS, WHOLE, Spread

numbers = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=30)


def spread_of(*parts: list[float], exponent: int = -20) -> Spread:
    spread = Spread(exponent)
    for part in parts:
        spread.add(np.array(part, np.float64))
    return spread


def test_no_numbers() -> None:
    assert spread_of().distribution() == Distribution()
    assert spread_of([math.nan, math.inf]).distribution() == Distribution()


def test_the_largest_numbers_there_are() -> None:
    found = spread_of([-1.7e308, 1e-320, 1.7e308]).distribution()
    assert (sum(found.counts), found.std) == (3, None)


def test_rewards_of_right_and_wrong() -> None:
    found = spread_of([0.0, 1.0, 1.0], [0.0, 1.0]).distribution()
    assert (found.mean, found.min, found.max) == (0.6, 0.0, 1.0)
    assert found.std == pytest.approx(math.sqrt(0.24))
    assert (*found.limits[:2], found.counts[0], found.counts[-1]) == (0.0, 1 / 32, 2, 3)
    assert sum(found.counts) == 5


def test_whole_numbers_have_a_bin_each() -> None:
    found = spread_of([0, 1, 3, 3], exponent=WHOLE).distribution()
    assert (found.limits, found.counts) == ((0, 1, 2, 3, 4), (1, 1, 0, 2))
    wide = spread_of([3, 131_072], exponent=WHOLE).distribution()
    assert wide.limits[1] - wide.limits[0] == 4096.0


@given(numbers, numbers, numbers)
def test_nothing_is_lost_and_parts_meet(a: list[float], b: list[float], c: list[float]) -> None:
    everything = spread_of(a + b + c).distribution()
    together = spread_of(a)
    together.merge(spread_of(b))
    together.merge(spread_of(c))
    for found in (spread_of(a, b, c).distribution(), together.distribution()):
        assert (found.limits, found.counts) == (everything.limits, everything.counts)
    assert len(everything.counts) <= MAX_BINS
    assert sum(everything.counts) == len(a + b + c)
    for (low, high), count in zip(pairwise(everything.limits), everything.counts, strict=True):
        assert count == sum(low <= number < high for number in a + b + c)
