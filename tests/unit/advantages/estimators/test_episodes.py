"""Estimators over the steps of runs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from experience_buffer_server.advantages.estimators.episodes import (
    gigpo_scores,
    step_wise_grpo_scores,
)
from tests.unit.advantages.scalars import Group, scored, step, steps


def gigpo(group: Group, **parameters: Any) -> tuple[list[float], dict[str, Any]]:
    scores, details = scored(gigpo_scores, [group], "gigpo", **parameters)
    return scores[0], details[0]


def step_wise(group: Group, **parameters: Any) -> tuple[list[float], dict[str, Any]]:
    scores, details = scored(step_wise_grpo_scores, [group], "step_wise_grpo", **parameters)
    return scores[0], details[0]


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-11, abs=1e-11)


def test_experiences_at_one_step_are_one_step_of_the_episode() -> None:
    group = [
        step(1.0, "a", 0, state="s"),
        step(1.0, "a", 0, state="t"),
        step(2.0, "a", 1, state="u"),
        step(1.0, "b", 0, state="v"),
    ]
    scores, details = gigpo(group, use_std=False)
    assert details["mean"] == 2.0
    assert scores == [1.0, 1.0, 1.0, -1.0]


def test_sparse_rewards_at_first_steps_do_not_hide_the_returns() -> None:
    group = [*steps([0.0, 1.0], "a", ["s", "t"]), *steps([0.0, 0.0], "b", ["s", "t"])]
    assert gigpo(group, turn_rewards="steps")[1]["zero_variance"] is False
    assert gigpo(group)[1]["zero_variance"] is False


def test_steps_without_a_state_share_it_with_nothing() -> None:
    group = [*steps([1.0], "a", [""]), *steps([0.0], "b", [""])]
    assert gigpo(group, use_std=False)[0] == [0.5, -0.5]


@pytest.mark.parametrize("reward", [0.1, 0.3, -7.7, 16777217.0, 3e38])
@pytest.mark.parametrize("runs", [2, 3, 7])
def test_equal_runs_give_exactly_zero(reward: float, runs: int) -> None:
    group = [
        member
        for index in range(runs)
        for member in steps([reward, 0.7, reward], f"r{index}", ["s", "t", "u"])
    ]
    scores, details = gigpo(group)
    assert scores == [0.0] * len(group)
    assert details["zero_variance"] is True
    scores, details = step_wise(group)
    assert scores == [0.0] * len(group)
    assert details["zero_variance"] is True


def test_runs_with_equal_sums_in_another_order_are_equal() -> None:
    rewards = [0.1, 0.2, 0.3]
    group = [
        member
        for index, order in enumerate(itertools.permutations(rewards))
        for member in steps(order, f"r{index}", [f"{index}{k}" for k in range(3)])
    ]
    scores, details = gigpo(group)
    assert scores == [0.0] * len(group)
    assert details["zero_variance"] is True


def test_equal_sums_over_other_steps_at_shared_states_still_teach() -> None:
    first = [*steps([1.0, 0.0], "a", ["x", "y"]), *steps([0.0, 1.0], "b", ["x", "y"])]
    scores, details = gigpo(first)
    assert details["zero_variance"] is False
    assert all(scores)
    # With returns for rewards, both begin with 1.
    assert gigpo(first, turn_rewards="steps")[1]["zero_variance"] is False
    # Nothing is compared by state, or no state occurs twice.
    assert gigpo(first, step_weight=0.0)[1]["zero_variance"] is True
    apart = [*steps([1.0, 0.0], "a", ["x", "y"]), *steps([0.0, 1.0], "b", ["v", "w"])]
    # A neighbour changes nothing, before or after.
    both, of_groups = scored(gigpo_scores, [apart, first, apart], "gigpo")
    assert [own["zero_variance"] for own in of_groups] == [True, False, True]
    assert both == [[0.0] * 4, scores, [0.0] * 4]
