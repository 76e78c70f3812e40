"""Groups that can't be computed fail alone and say why; nonsense from the caller raises."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from experience_buffer_server.advantages import ESTIMATORS, Column, compute

from .builders import column, computed, experience, failed, scores
from .cases import full

GROUP_ESTIMATORS = [name for name, spec in ESTIMATORS.items() if spec.compares == "group"]
ITEM_ESTIMATORS = ["reinforce", "reinforce_plus_plus", "remax", "gae", "cpgd"]
SCORED = [name for name in ESTIMATORS if name != "on_policy_distill"]


GOOD = full(experience(1.0, [True, False, True], values=[0.5, 0.25, 0.125]))
BAD_MASK = Column("C64", bytes(24))


@pytest.mark.parametrize(
    ("estimators", "change", "message"),
    [
        (GROUP_ESTIMATORS, {"reward": None}, "reward of experience 1 of the group is missing"),
        (ITEM_ESTIMATORS, {"reward": None}, "reward of experience 1 of the group is missing"),
        (SCORED, {"reward": math.nan}, "reward of experience 1 of the group is nan"),
        (SCORED, {"reward": math.inf}, "is inf, not finite in float32"),
        (SCORED, {"reward": 1e39}, r"is 1e\+39, not finite in float32"),
        (list(ESTIMATORS), {"mask": BAD_MASK}, "mask of experience 1 of the group has dtype C64"),
        (
            list(ESTIMATORS),
            {"mask": Column("I32", bytes(7))},
            "has 7 bytes, not a multiple of the 4 of I32",
        ),
        (["gae"], {"values": None}, "values of experience 1 of the group is missing"),
        (["remax"], {"baseline_reward": None}, "baseline_reward of experience 1 .* is missing"),
        (["remax"], {"baseline_reward": math.nan}, "baseline_reward of experience 1 .* is nan"),
        (["gigpo"], {"env_state_hash": None}, "env_state_hash of experience 1 .* is missing"),
        (["on_policy_distill"], {"logprobs": None}, "logprobs of experience 1 .* is missing"),
        (
            ["on_policy_distill"],
            {"teacher_logprobs": column([0.0, 0.0, -math.inf], "F32")},
            "experience 1 of the group: teacher_logprobs at a valid token is NaN",
        ),
        (
            ["gae"],
            {"values": column([1.0, 2.0], "F32")},
            "has 2 elements where its mask has 3; send 3 or 4",
        ),
        (["gae"], {"values": Column("C64", bytes(24))}, "values .* has dtype C64; send one of F16"),
        (
            ["gae"],
            {"values": column([1.0, math.nan, math.nan], "BF16")},
            "experience 1 of the group: values at a valid token is NaN",
        ),
        (["gae"], {"values": column([1.0, 0.0, 1e300], "F64")}, "beyond float32"),
        (
            ["gae"],
            {"values": column([1.0, 0.0, 1.0, math.inf], "F32"), "truncated": True},
            "bootstrap value",
        ),
        (
            ITEM_ESTIMATORS,
            {"token_level_reward": column([1.0, 2.0], "F32")},
            "token_level_reward .* has 2 elements where its mask has 3; send 3",
        ),
        (
            ITEM_ESTIMATORS,
            {"token_level_reward": column([1.0, 2.0, math.inf], "F32")},
            "token_level_reward at a valid token is NaN, infinite",
        ),
        (["reinforce"], {"token_level_reward": column([3e38, 0, 3e38], "F64")}, "beyond"),
    ],
)
def test_a_bad_group_fails_alone(
    estimators: list[str], change: dict[str, object], message: str
) -> None:
    bad = dataclasses.replace(GOOD, **change)  # type: ignore[arg-type]
    for estimator in estimators:
        how: dict[str, Any] = {"estimator": estimator, "parameters": {}}
        good = compute([[GOOD, GOOD], [GOOD]], **how)
        outcomes = compute([[GOOD, GOOD], [GOOD, bad], [GOOD]], **how)
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(failed(outcomes[1]))
        assert [outcomes[0], outcomes[2]] == good


def test_kl_needs_finite_logprobs_only_where_it_is_asked_for() -> None:
    odd = dataclasses.replace(GOOD, ref_logprobs=None, logprobs=column([math.nan] * 3, "F32"))
    assert scores([odd], "reinforce") == [1.0]
    outcome = compute([[odd]], estimator="reinforce", parameters={"kl_coef": 0.1})[0]
    assert "logprobs" in failed(outcome)


def test_what_an_estimator_does_not_read_cannot_fail_it() -> None:
    odd = experience(1.0, [True], values=[math.nan, 1.0, 2.0], token_level_reward=[math.inf, 0.0])
    assert scores([odd, experience(3.0, [True])], "rloo") == [-2.0, 2.0]
    unread = experience(math.nan, [True], token_level_reward=[4.0])
    assert scores([unread], "reinforce") == [4.0]
    # A bootstrap value counts only where the experience was truncated.
    assert scores([experience(1.0, [True], values=[0.5, math.nan])], "gae") == [0.5]
    silent = dataclasses.replace(GOOD, reward=None)
    assert computed(compute([[silent]], estimator="on_policy_distill", parameters={})[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batches": [0]}, "batches has 1 elements for 2 groups"),
        ({"counted": [True] * 3}, "counted has 3 elements for 2 groups"),
        ({"batches": [1, 0]}, "batches descend"),
    ],
)
def test_batches_and_counted_must_fit_the_groups(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute([[GOOD], [GOOD]], estimator="grpo", parameters={}, **given)
