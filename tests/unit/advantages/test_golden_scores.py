"""Group statistics agree with the original implementations, where those are right."""

from __future__ import annotations

import math
from typing import Any

import pytest

from experience_buffer_server.advantages import compute
from experience_buffer_server.advantages.group_relative import score_grpo, score_rloo

from . import reference
from .builders import advantages, computed, experience
from .goldens import Case, cases, chunks

GROUP_CASES = [
    *cases("light_rloo", "RLOOCalculator.preprocess_rewards"),
    *cases("light_group_norm", "GroupNormCalculator.preprocess_rewards"),
]
NOTED_GROUP_CASES = [
    *cases("light_rloo", "NaiveExperienceMaker(.VL).process_experiences", noted=True),
    *cases("light_group_norm", "NaiveExperienceMaker(.VL).process_experiences", noted=True),
]


def group_scores(case: Case, eps: float) -> tuple[list[float], float]:
    """Scores of a case's groups and the tolerance of its dtype."""
    rewards, size = case["inputs"]["rewards"], case["params"]["n_samples_per_prompt"]
    groups = chunks(rewards["data"], size)
    rloo = case["params"]["estimator"] == "rloo"
    if rewards["dtype"] == "float64":
        scored = [score_rloo(g) if rloo else score_grpo(g, eps=eps) for g in groups]
        return [score for group in scored for score in group.scores], 1e-11
    outcomes = compute(
        [[experience(reward, [True]) for reward in group] for group in groups],
        estimator=case["params"]["estimator"],
        parameters={} if rloo else {"eps": eps},
    )
    items = [item for outcome in outcomes for item in computed(outcome).items]
    return [advantages(item)[0] for item in items], 3e-5


def is_singleton(case: Any) -> bool:
    return bool(case.values[0]["params"]["n_samples_per_prompt"] == 1)


def loses_float32_digits(case: Any) -> bool:
    """Rewards around 10000, or equal ones that the original's float32 mean misses."""
    values = case.values[0]
    expected = values["expected"]["rewards"]["data"]
    constant = len(set(values["inputs"]["rewards"]["data"])) == 1
    return bool(
        values["inputs"]["rewards"]["dtype"] == "float32"
        and ("offset" in values["name"] or (constant and any(expected)))
    )


def upstream_eps(case: Case) -> float:
    return 1e-8 if "naive" in case["name"] else 1e-9


@pytest.mark.parametrize(
    "case", [c for c in GROUP_CASES if not is_singleton(c) and not loses_float32_digits(c)]
)
def test_group_scores(case: Case) -> None:
    scores, tolerance = group_scores(case, upstream_eps(case))
    assert scores == pytest.approx(
        case["expected"]["rewards"]["data"], rel=tolerance, abs=tolerance
    )


@pytest.mark.parametrize(
    "case", [c for c in NOTED_GROUP_CASES if not is_singleton(c) and not loses_float32_digits(c)]
)
def test_either_eps_of_the_original_is_a_parameter(case: Case) -> None:
    for key, eps in (("rewards", 1e-8), ("rewards_vl", 1e-9)):
        scores, tolerance = group_scores(case, eps)
        expected = case["expected"][key]["data"]
        assert scores == pytest.approx(expected, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("case", [c for c in [*GROUP_CASES, *NOTED_GROUP_CASES] if is_singleton(c)])
def test_a_group_of_one_gives_its_reward_instead_of_nan(case: Case) -> None:
    assert all(math.isnan(value) for value in case["expected"]["rewards"]["data"])
    scores, tolerance = group_scores(case, 1e-6)
    scale = 1.0 if case["params"]["estimator"] == "rloo" else 1 / (1 + 1e-6)
    rewards = case["inputs"]["rewards"]["data"]
    expected = [reward * scale for reward in rewards]
    assert scores == pytest.approx(expected, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in [*GROUP_CASES, *NOTED_GROUP_CASES]
        if loses_float32_digits(c) and not is_singleton(c)
    ],
)
def test_float64_statistics_where_the_original_loses_digits(case: Case) -> None:
    scores, tolerance = group_scores(case, 1e-6)
    size, rloo = case["params"]["n_samples_per_prompt"], case["params"]["estimator"] == "rloo"
    expected: list[float] = []
    for group in chunks(case["inputs"]["rewards"]["data"], size):
        expected += reference.rloo(group) if rloo else reference.grpo(group, 1e-6)
    assert scores == pytest.approx(expected, rel=tolerance, abs=tolerance)
    if len(set(case["inputs"]["rewards"]["data"])) == 1:
        assert scores == [0.0] * len(scores)


@pytest.mark.parametrize(
    "case",
    [
        *cases("light_reward_passthrough", "BaseREINFORCECalculator.preprocess_rewards"),
        *cases("light_reward_passthrough", "GAECalculator.preprocess_rewards"),
    ],
)
def test_item_estimators_leave_rewards_alone(case: Case) -> None:
    rewards = case["inputs"]["rewards"]["data"]
    groups = chunks(rewards, case["params"]["n_samples_per_prompt"])
    outcomes = compute(
        [[experience(reward, [True], values=[0.0]) for reward in group] for group in groups],
        estimator=case["params"]["estimator"],
        parameters={},
    )
    items = [item for outcome in outcomes for item in computed(outcome).items]
    expected = case["expected"]["rewards"]["data"]
    assert [advantages(item)[0] for item in items] == pytest.approx(expected, rel=3e-5)


@pytest.mark.parametrize(
    "case",
    cases("light_reward_passthrough", "AdvantageCalculator.preprocess_rewards", noted=True),
)
def test_rewards_stay_with_their_experience_whatever_the_sizes(case: Case) -> None:
    rewards = iter(case["inputs"]["rewards"]["data"])
    groups = [[next(rewards) for _ in range(size)] for size in case["inputs"]["sizes"]]
    outcomes = compute(
        [[experience(reward, [True]) for reward in group] for group in groups],
        estimator="reinforce",
        parameters={},
    )
    assert [[advantages(i)[0] for i in computed(o).items] for o in outcomes] == groups
