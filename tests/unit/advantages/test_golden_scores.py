"""Group statistics agree with the original implementations, where those are right."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experience_buffer_server.advantages.estimators.group_relative import (
    compare_dr_grpo,
    compare_grpo,
    compare_rloo,
    dr_grpo_scores,
    grpo_scores,
    rloo_scores,
)
from experience_buffer_server.advantages.stages.reward_shaping import (
    clip_rewards,
    overlong_penalty,
    turn_rewards,
)
from experience_buffer_server.advantages.stages.running_moments import (
    RunningMoments,
    normalise_by_moments,
)

from .goldens import TOLERANCE, Case, cases, chunks
from .reference_rewards import AGAINST_VOTES
from .scalars import packed, scored, step, votes_of

COMPARED: dict[str, tuple[Any, Any]] = {
    "rloo": (compare_rloo, rloo_scores),
    "reinforce_baseline": (compare_dr_grpo, dr_grpo_scores),
}
NAIVE = "NaiveExperienceMaker(.VL).process_experiences"
ORIGINALS = [
    ("light_group_norm", "GroupNormCalculator.preprocess_rewards", False),
    ("light_group_norm", NAIVE, True),
    ("light_rloo", "RLOOCalculator.preprocess_rewards", False),
    ("light_rloo", NAIVE, True),
    ("light_reinforce_baseline", "REINFORCEBaselineCalculator.preprocess_rewards", False),
    ("light_reinforce_baseline", NAIVE, True),
]
CASES = [case for file, fn, noted in ORIGINALS for case in cases(file, fn, noted=noted)]
PASSED_THROUGH = [
    *cases("light_reward_passthrough", "BaseREINFORCECalculator.preprocess_rewards"),
    *cases("light_reward_passthrough", "GAECalculator.preprocess_rewards"),
    *cases("light_reward_passthrough", "CPGDCalculator.preprocess_rewards"),
    *cases("light_reward_passthrough", NAIVE, noted=True),
]


def is_singleton(case: Any) -> bool:
    return bool(case.values[0]["params"]["n_samples_per_prompt"] == 1)


def loses_float32_digits(case: Any) -> bool:
    """Rewards around 10000, or equal ones that the original's float32 mean misses."""
    values = case.values[0]
    constant = len(set(values["inputs"]["rewards"]["data"])) == 1
    return bool(
        values["inputs"]["rewards"]["dtype"] == "float32"
        and (
            "offset" in values["name"] or (constant and any(values["expected"]["rewards"]["data"]))
        )
    )


def our_scores(case: Case, eps: float) -> list[float]:
    """Float64 rewards through the formulas, float32 ones through a launch."""
    rewards, estimator = case["inputs"]["rewards"], case["params"]["estimator"]
    groups = chunks(rewards["data"], case["params"]["n_samples_per_prompt"])
    compare, score = COMPARED.get(estimator, (compare_grpo, grpo_scores))
    more: dict[str, Any] = {} if estimator in COMPARED else {"eps": eps}
    if rewards["dtype"] == "float64":
        votes = votes_of(groups)
        flat: list[float] = compare(votes, **more).scores(votes).tolist()
        return flat
    members = [[step(reward) for reward in group] for group in groups]
    scores, _ = scored(score, members, estimator, **more)
    return [score for group in scores for score in group]


def exact_scores(case: Case, eps: float) -> list[float]:
    formula, parameters = AGAINST_VOTES[case["params"]["estimator"]], SimpleNamespace(eps=eps)
    groups = chunks(case["inputs"]["rewards"]["data"], case["params"]["n_samples_per_prompt"])
    return [
        formula(reward, own, rewards, parameters)
        for rewards in groups
        for own, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    "case", [c for c in CASES if not is_singleton(c) and not loses_float32_digits(c)]
)
def test_group_scores(case: Case) -> None:
    # The note of a case says which of two eps its originals add; both are a parameter here.
    naive = case["fn"] == NAIVE
    for key, eps in (("rewards", 1e-8 if naive else 1e-9), ("rewards_vl", 1e-9)):
        if key in case["expected"]:
            expected = case["expected"][key]
            tolerance = TOLERANCE[expected["dtype"]]
            close = pytest.approx(expected["data"], rel=tolerance, abs=tolerance)
            assert our_scores(case, eps) == close


@pytest.mark.parametrize("case", [c for c in CASES if is_singleton(c)])
def test_a_group_of_one_gives_its_reward(case: Case) -> None:
    # The originals give NaN, or 0 where they only subtract the mean.
    upstream = case["expected"]["rewards"]["data"]
    assert all(math.isnan(value) or value == 0 for value in upstream)
    scale = 1 / (1 + 1e-6) if "rloo" not in case["name"] else 1.0
    scale = 1.0 if case["params"]["estimator"] == "reinforce_baseline" else scale
    expected = [reward * scale for reward in case["inputs"]["rewards"]["data"]]
    assert our_scores(case, 1e-6) == pytest.approx(expected, rel=1e-11, abs=1e-11)


@pytest.mark.parametrize(
    "case", [c for c in CASES if loses_float32_digits(c) and not is_singleton(c)]
)
def test_float64_statistics_where_the_original_loses_digits(case: Case) -> None:
    scores = our_scores(case, 1e-6)
    assert scores == pytest.approx(exact_scores(case, 1e-6), rel=1e-9, abs=1e-9)
    if len(set(case["inputs"]["rewards"]["data"])) == 1:
        assert scores == [0.0] * len(scores)


@pytest.mark.parametrize("case", PASSED_THROUGH)
def test_stages_that_are_off_leave_rewards_alone(case: Case) -> None:
    estimator = case["params"]["estimator"]
    rewards = case["inputs"]["rewards"]
    groups = chunks(rewards["data"], case["params"]["n_samples_per_prompt"])
    members = [[step(reward) for reward in group] for group in groups]
    batch, parameters, details = packed(members, estimator)
    rewards_B = np.array(rewards["data"])
    shaped_B = turn_rewards(rewards_B, batch, parameters)
    shaped_B = overlong_penalty(shaped_B, batch, parameters)
    shaped_B = normalise_by_moments(
        shaped_B, batch, parameters, RunningMoments(), details, counted=None
    )
    shaped_B = clip_rewards(shaped_B, batch, parameters, details)
    assert shaped_B.tolist() == case["expected"]["rewards"]["data"]
    assert details == [{} for _ in members]


@pytest.mark.parametrize(
    "case",
    cases("light_reward_passthrough", "AdvantageCalculator.preprocess_rewards", noted=True),
)
def test_rewards_stay_with_their_group_whatever_the_sizes(case: Case) -> None:
    # The original deals them out in chunks of one size, whatever the groups are.
    rewards = iter(case["inputs"]["rewards"]["data"])
    groups = [[next(rewards) for _ in range(size)] for size in case["inputs"]["sizes"]]
    batch, parameters, _ = packed([[step(r) for r in group] for group in groups], "reinforce")
    shaped = turn_rewards(batch.rewards, batch, parameters).tolist()
    bounds = batch.group_offsets.tolist()
    assert [shaped[bounds[g] : bounds[g + 1]] for g in range(len(groups))] == groups


@pytest.mark.parametrize(
    "case",
    cases(
        "light_dynamic_sampling",
        "GroupNormCalculator.preprocess_rewards(dynamic_sampling=True)",
        noted=True,
    ),
)
def test_every_constant_group_is_found(case: Case) -> None:
    # The original finds those of zeros and of ones; the others it may even blow up.
    size = case["params"]["n_samples_per_prompt"]
    groups = chunks(case["inputs"]["rewards"]["data"], size)
    scores, details = scored(
        grpo_scores, [[step(r) for r in group] for group in groups], "grpo", eps=1e-9
    )
    expected = chunks(case["expected"]["rewards"]["data"], size)
    masks = chunks(
        case["expected"]["action_mask"]["data"], case["expected"]["action_mask"]["shape"][1]
    )
    for index, group in enumerate(groups):
        constant = len(set(group)) == 1
        assert details[index]["zero_variance"] is constant
        if constant:
            assert scores[index] == [0.0] * size
        else:
            assert scores[index] == pytest.approx(expected[index], rel=3e-5, abs=3e-5)
        masked = not any(map(any, masks[index * size : (index + 1) * size]))
        assert masked == (constant and group[0] in (0.0, 1.0))
