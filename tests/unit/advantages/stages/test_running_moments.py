"""Running moments: exact, whatever the order and division of updates, and across restarts."""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer_server.advantages.packing import pack
from experience_buffer_server.advantages.plan.specs import plan
from experience_buffer_server.advantages.stages.running_moments import (
    RunningMoments,
    _root,
    normalise_by_moments,
)
from tests.unit.advantages.goldens import Case, cases
from tests.unit.advantages.scalars import Group, step

finite = st.floats(allow_nan=False, allow_infinity=False)


def normalised(
    groups: list[Group],
    moments: RunningMoments | None,
    *,
    estimator: str = "dr_grpo",
    norm: str = "std",
    batches: list[int] | None = None,
    counted: list[bool] | None = None,
    **parameters: Any,
) -> tuple[list[float], list[dict[str, Any]]]:
    chosen = plan(estimator, {"running_norm": norm, **parameters})
    batch = pack(groups, chosen, batches=batches)
    details: list[dict[str, Any]] = [{} for _ in groups]
    checked: Any = chosen.parameters
    result = normalise_by_moments(batch.rewards, batch, checked, moments, details, counted=counted)
    return result.tolist(), details


@pytest.mark.parametrize("case", cases("light_running_moments", "RunningMoments.update"))
def test_agrees_with_the_original(case: Case) -> None:
    # It keeps its state in single precision, also where the numbers are in double.
    moments = RunningMoments()
    for given_batch, after in zip(
        case["inputs"]["batches"], case["expected"]["steps"], strict=True
    ):
        values = given_batch["data"]
        moments.update(values)
        assert moments.count == after["count"]
        assert moments.mean == pytest.approx(after["mean"], rel=3e-5, abs=3e-5)
        scaled = [value / moments.std for value in values]
        centred = [(value - moments.mean) / moments.std for value in values]
        if after["var"] < 1e-20:
            # One number, or equal ones: it gives infinity, or about 1e-12.
            assert moments.std == 1.0
            assert after["std"] in (math.inf, pytest.approx(1.29e-12, 0.01))
            assert scaled == values
            assert centred == [0.0] * len(values)
            continue
        assert moments.std == pytest.approx(after["std"], rel=3e-5)
        assert scaled == pytest.approx(after["scaled"]["data"], rel=3e-5, abs=3e-5)
        assert centred == pytest.approx(after["normalised"]["data"], rel=3e-5, abs=3e-5)


@settings(max_examples=200)
@given(st.lists(finite, max_size=30), st.randoms(use_true_random=False))
def test_order_division_and_restarts_change_no_bit(
    values: list[float], shuffling: random.Random
) -> None:
    at_once = RunningMoments()
    at_once.update(values)
    shuffled = shuffling.sample(values, len(values))
    in_parts = RunningMoments()
    while shuffled:
        size = shuffling.randint(1, len(shuffled))
        in_parts.update(iter(shuffled[:size]))
        in_parts = RunningMoments.from_json(in_parts.to_json())
        del shuffled[:size]
    assert in_parts.to_json() == at_once.to_json()
    assert (in_parts.count, in_parts.mean, in_parts.std) == (
        at_once.count,
        at_once.mean,
        at_once.std,
    )


@settings(max_examples=200)
@given(st.lists(st.floats(-1e150, 1e150), min_size=2, max_size=30))
def test_moments_are_correctly_rounded(values: list[float]) -> None:
    moments = RunningMoments()
    moments.update(values)
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    assert moments.mean == float(mean)
    variance = sum((value - mean) ** 2 for value in exact) / (len(exact) - 1)
    if variance == 0:
        assert moments.std == 1.0
        return
    std = moments.std
    below, above = (Fraction(math.nextafter(std, to)) for to in (0.0, math.inf))
    halfway_down, halfway_up = (Fraction(std) + below) / 2, (Fraction(std) + above) / 2
    assert halfway_down**2 <= variance <= halfway_up**2


def test_moments_of_huge_and_tiny_numbers() -> None:
    moments = RunningMoments()
    moments.update([5e-324, 0.0])
    # A root that rounds to nothing would be divided by.
    assert moments.std == pytest.approx(5e-324)
    moments.update([1.7e308, -1.7e308, 1.7e308])
    assert moments.mean == 1.7e308 / 5
    assert moments.std == pytest.approx(1.7e308 * math.sqrt((3 - 1 / 5) / 4))
    assert RunningMoments.from_json(moments.to_json()).std == moments.std


def test_a_deviation_beyond_the_largest_float_is_the_largest() -> None:
    moments = RunningMoments()
    moments.update([sys.float_info.max, -sys.float_info.max])
    assert moments.mean == 0.0
    assert moments.std == sys.float_info.max


@pytest.mark.parametrize("values", [[], [0.3], [0.3] * 7, [0.0, -0.0]])
def test_without_variance_scores_stay(values: list[float]) -> None:
    moments = RunningMoments()
    moments.update(values)
    assert moments.std == 1.0
    assert moments.mean == (values[0] if values else 0.0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_as_a_whole(wrong: float) -> None:
    moments = RunningMoments()
    moments.update([1.0, 2.0])
    before = moments.to_json()
    with pytest.raises(ValueError, match="finite numbers, not"):
        moments.update([3.0, wrong])
    assert moments.to_json() == before


def test_the_empty_state_is_the_one_without_numbers() -> None:
    assert RunningMoments.from_json("{}").to_json() == RunningMoments().to_json()


@pytest.mark.parametrize(
    ("square", "root"),
    [
        # Halfway between two floats: to the even one below, but up if there is anything more.
        ((2**53 + 1) ** 2, 2.0**53),
        ((2**53 + 1) ** 2 + 1, 2.0**53 + 2),
        ((2**53 + 1) ** 2 - 1, 2.0**53),
    ],
)
def test_the_root_is_rounded_once(square: int, root: float) -> None:
    assert _root(square, 1) == root
    assert _root(square * 7, 7 << 40) == root / 2**20


def altered(**changes: object) -> str:
    moments = RunningMoments()
    moments.update([0.5, 2.0, -1.25])
    return json.dumps({**json.loads(moments.to_json()), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"count": 0}',
        "{",
        altered(sum="x"),
        altered(sum=3),
        altered(count=None),
        altered(count=-1),
        altered(count=0),
        altered(bits=-1),
        altered(bits=10**9),
        altered(squares="-0x1"),
        altered(squares="0x0"),
    ],
)
def test_states_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give what `to_json` returned, or start with new ones"):
        RunningMoments.from_json(text)


def test_a_group_is_normalised_by_all_up_to_itself() -> None:
    groups: list[Group] = [[step(1.0), step(4.0)], [step(-2.0), step(0.5), step(0.5)], []]
    moments = RunningMoments()
    result, details = normalised(groups, moments)
    first, both = statistics.stdev([1.0, 4.0]), statistics.stdev([1.0, 4.0, -2.0, 0.5, 0.5])
    assert result == pytest.approx([1 / first, 4 / first, -2 / both, 0.5 / both, 0.5 / both])
    assert details[0] == {
        "running_count": 2,
        "running_mean": 2.5,
        "running_std": pytest.approx(first),
    }
    assert [detail["running_count"] for detail in details] == [2, 5, 5]
    assert moments.count == 5
    result, _ = normalised([[step(0.5)]], moments, norm="mean_std")
    every = [1.0, 4.0, -2.0, 0.5, 0.5, 0.5]
    assert result == pytest.approx([(0.5 - statistics.mean(every)) / statistics.stdev(every)])


def test_a_statistics_batch_is_counted_before_it_is_normalised() -> None:
    groups: list[Group] = [[step(1.0), step(4.0)], [step(-2.0)], [step(9.0)]]
    _, details = normalised(groups, RunningMoments(), batches=[0, 0, 1], advantage_norm_std="batch")
    assert [detail["running_count"] for detail in details] == [3, 3, 4]
    assert details[0] == details[1]


def test_moments_are_asked_for_only_where_they_are_used() -> None:
    assert normalised([[step(3.0)]], None, norm="none") == ([3.0], [{}])
    with pytest.raises(ValueError, match="running_norm is 'std', which needs the moments so far"):
        normalised([[step(3.0)]], None)
