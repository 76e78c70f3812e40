"""CPGD: sequences scored against their batch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from experience_buffer_server.advantages.estimators.sequence_scores import (
    cpgd_scores,
    filter_weights,
)
from tests.unit.advantages.goldens import TOLERANCE, Case, cases, rows
from tests.unit.advantages.scalars import Group, scored, step, steps

WEIGHTS = {"STD_weight": "std", "clip_filter_like_weight": "clip_filter", "mean_only": "none"}


def cpgd(groups: Sequence[Group], **parameters: Any) -> tuple[list[list[float]], list[Any]]:
    return scored(cpgd_scores, groups, "cpgd", **parameters)


@pytest.mark.parametrize(
    "case",
    [
        *cases("light_cpgd", "get_cpgd_advantages_returns"),
        *cases("light_cpgd", "CPGDCalculator.compute"),
    ],
)
def test_sequences_are_scored_as_by_the_original(case: Case) -> None:
    tensor = case["inputs"].get("reward", case["inputs"].get("info_reward"))
    # It sums over all of a row, whatever the action mask says: here all of these are valid.
    groups: list[Group] = [
        [step(None, mask=[True] * len(row), token_rewards=row) for row in rows(tensor)]
    ]
    weight = WEIGHTS[case["params"].get("weight_factor", "STD_weight")]
    if weight == "clip_filter":
        # It takes each sequence for a group, and all but one for constant: a weight of 3. Here two
        # constant groups do that, which lie on the mean and so don't move it.
        middle = [statistics.mean(map(math.fsum, rows(tensor)))]
        groups += [[step(None, mask=[True], token_rewards=middle)] * 2] * 2
    scores, _ = cpgd(groups, weight=weight)
    tolerance = TOLERANCE[tensor["dtype"]]
    masks = rows(case["inputs"]["action_mask"])
    expected = rows(case["expected"]["advantages"])
    for score, row, mask in zip(scores[0], expected, masks, strict=True):
        valid = [value for value, flag in zip(row, mask, strict=True) if flag]
        assert [score] * len(valid) == pytest.approx(valid, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("case", cases("light_cpgd", "CPGDCalculator.compute", noted=True))
def test_scalar_rewards_are_scores_per_sequence(case: Case) -> None:
    # The original sums the scalars of the whole batch instead, and every advantage is 0.
    rewards = case["inputs"]["info_reward"]["data"]
    assert set(case["expected"]["advantages"]["data"]) == {0.0}
    scores, details = cpgd([[step(reward) for reward in rewards]])
    mean, std = statistics.mean(rewards), statistics.pstdev(rewards)
    expected = [(reward - mean) / (std + 1e-6) for reward in rewards]
    # Rewards are read as float32.
    assert scores[0] == pytest.approx(expected, rel=1e-6)
    assert details[0] == {"batch_mean": pytest.approx(mean), "batch_std": pytest.approx(std)}


@pytest.mark.parametrize("case", cases("light_clip_fraction", "clip_filter_like_weight_func"))
def test_filter_weights(case: Case) -> None:
    groups = rows(case["inputs"]["rewards"])
    constant = [len(set(group)) == 1 for group in groups]
    for key, largest in (("weights", 3.0), ("weights_eps1_5_lam0", 1.5)):
        expected = [row[0] for row in rows(case["expected"][key])]
        if key == "weights_eps1_5_lam0" and not all(constant):
            # With lamda 0 the original silences constant groups; that isn't offered.
            expected = [1.0 if flag else w for flag, w in zip(constant, expected, strict=True)]
        assert filter_weights(constant, max_weight=largest) == pytest.approx(expected, rel=3e-5)


def test_groups_that_vary_are_weighed_up_for_those_that_do_not() -> None:
    groups = [[step(1.0), step(0.0)], [step(0.5), step(0.5)], [], [step(0.25), step(0.25)]]
    scores, details = cpgd(groups, weight="clip_filter")
    mean = 2.5 / 6
    assert scores[0] == pytest.approx([3 * (1 - mean), 3 * (0 - mean)], rel=1e-12)
    assert scores[1] == pytest.approx([0.5 - mean] * 2, rel=1e-12)
    assert [detail["weight"] for detail in details] == [3.0, 1.0, 1.0, 1.0]
    assert [detail["zero_variance"] for detail in details] == [False, True, False, True]
    capped, _ = cpgd(groups, weight="clip_filter", max_weight=2.0)
    assert capped[0] == pytest.approx([2 * (1 - mean), 2 * (0 - mean)], rel=1e-12)


@pytest.mark.parametrize("weight", ["none", "std", "clip_filter"])
@pytest.mark.parametrize("reward", [0.1, 0.3, -7.7, 16777217.0, 3e38])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 61])
def test_equal_sequences_give_exactly_zero(weight: str, reward: float, size: int) -> None:
    scores, _ = cpgd([[step(reward) for _ in range(size)], [step(reward)]], weight=weight)
    assert scores == [[0.0] * size, [0.0]]


def test_returns_of_steps_are_scored_against_whole_runs() -> None:
    group = [*steps([2.0, 1.0], "a"), *steps([1.0, 0.0], "b")]
    scores, details = cpgd([group], turn_rewards="steps", weight="none")
    assert scores == [[1.0, -1.0, -1.0, -2.0]]
    assert details[0]["batch_mean"] == 2.0
    group = [*steps([0.0, 1.0], "a"), *steps([0.0, 2.0], "b")]
    details = cpgd([group], turn_rewards="steps", weight="clip_filter")[1]
    assert details[0]["zero_variance"] is False
    flat = [*steps([0.0, 1.0], "a"), *steps([1.0, 0.0], "b")]
    assert cpgd([flat], turn_rewards="steps", weight="std")[0] == [[0.0] * 4]
