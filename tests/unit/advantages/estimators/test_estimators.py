"""Each estimator's formula on numbers that can be checked by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

from experience_buffer_server.advantages import ExperienceInput, compute
from tests.unit.advantages.builders import advantages, column, computed, experience, floats, scores


def rows(
    members: Sequence[ExperienceInput], estimator: str, **parameters: Any
) -> list[list[float]]:
    outcome = compute([list(members)], estimator=estimator, parameters=parameters)[0]
    return [advantages(item) for item in computed(outcome).items]


def rollout(reward: float = 0.0, mask: Sequence[float] = (1,), **fields: Any) -> ExperienceInput:
    """Lists become float32 columns."""
    given: dict[str, Any] = {"reward": reward, "mask": column(list(mask), "BOOL")}
    for name, value in fields.items():
        given[name] = column(value, "F32") if isinstance(value, list) else value
    return ExperienceInput(**given)


def near(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-6, abs=1e-9)


FOUR = [rollout(r) for r in (5.0, 1.0, 1.0, 1.0)]
"""Mean 2, deviations 3, -1, -1, -1: standard deviation sqrt(12 / 3) = 2."""


@pytest.mark.parametrize("name", ["grpo", "group_norm"])
def test_grpo(name: str) -> None:
    assert scores(FOUR, name) == near([1.5, -0.5, -0.5, -0.5])
    assert scores(FOUR, name, eps=1.0) == near([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert scores([rollout(3.0)], name, eps=0.5) == near([2.0])


def test_grpo_discounts_its_score_if_told_to() -> None:
    members = [rollout(5.0, [1, 0, 1, 1]), *FOUR[1:]]
    assert rows(members, "grpo")[0] == near([1.5, 0.0, 1.5, 1.5])
    assert rows(members, "grpo", gamma=0.5)[0] == near([0.375, 0.0, 0.75, 1.5])
    assert rows(members, "grpo", gamma=0.5, mask_mode="count")[0] == near([0.1875, 0.0, 0.75, 1.5])


def test_dr_grpo() -> None:
    assert scores(FOUR, "dr_grpo") == [3.0, -1.0, -1.0, -1.0]
    assert scores([rollout(3.0)], "dr_grpo") == [3.0]


def test_rloo() -> None:
    # The mean of the others is 1 for the first, 7 / 3 for the rest.
    assert scores(FOUR, "rloo") == near([4.0, -4 / 3, -4 / 3, -4 / 3])
    assert scores([rollout(3.0)], "rloo") == [3.0]


def test_reinforce_baseline_without_its_norms() -> None:
    off = {"advantage_norm_mean": "none", "advantage_norm_std": "none", "cross_batch": "none"}
    assert scores(FOUR, "reinforce_baseline", **off) == [3.0, -1.0, -1.0, -1.0]
    assert scores([rollout(3.0)], "reinforce_baseline", **off) == [3.0]


def test_reinforce_baseline_whitens_and_normalises_across_the_batch() -> None:
    # Deviations are whitened to 1.5, -.5, -.5, -.5; then ddof 0 divides by sqrt(3 / 4).
    wanted = [1.5 / math.sqrt(0.75), *[-0.5 / math.sqrt(0.75)] * 3]
    assert scores(FOUR, "reinforce_baseline") == near(wanted)
    assert scores(FOUR, "reinforce_baseline", cross_batch="mean") == near([1.5, -0.5, -0.5, -0.5])


def test_opmd() -> None:
    assert scores(FOUR, "opmd") == [3.0, -1.0, -1.0, -1.0]
    members = [rollout(0.0), rollout(2 * math.log(3.0))]
    # tau (log((1 + 3) / 2)) with tau 2.
    baseline = 2 * math.log(2.0)
    wanted = [-baseline, 2 * math.log(3.0) - baseline]
    assert scores(members, "opmd", baseline="logavgexp", tau=2.0) == near(wanted)
    assert scores([rollout(3.0)], "opmd", baseline="logavgexp") == [3.0]
    big = [rollout(5000.0), rollout(5000.0 + math.log(3.0))]
    assert scores(big, "opmd", baseline="logavgexp")[0] == pytest.approx(-math.log(2.0), abs=1e-3)


def test_asymre() -> None:
    assert scores(FOUR, "asymre") == near([3.1, -0.9, -0.9, -0.9])
    assert scores(FOUR, "asymre", shift=1.0) == near([2.0, -2.0, -2.0, -2.0])
    assert scores([rollout(3.0)], "asymre") == [3.0]


RUNS = [
    rollout(9.0, run="a", step=0),
    rollout(3.0, run="a", step=1),
    rollout(1.0, run="b", step=4),
    rollout(2.0, run="c", step=0),
]
"""Votes 3, 1 and 2: mean 2, standard deviation 1."""


def test_step_wise_grpo() -> None:
    assert scores(RUNS, "step_wise_grpo", eps=1e-9) == near([1.0, 1.0, -1.0, 0.0])
    divided = scores(RUNS, "step_wise_grpo", eps=1e-9, divide_by_steps=True)
    assert divided == near([0.5, 0.5, -1.0, 0.0])


def test_gigpo_compares_states_within_the_group_only() -> None:
    group = [rollout(1.0, env_state_hash="s"), rollout(3.0, env_state_hash="t")]
    outcomes = compute([group, group], estimator="gigpo", parameters={"use_std": False})
    for outcome in outcomes:
        assert [advantages(i)[0] for i in computed(outcome).items] == [-1.0, 1.0]


def test_reinforce() -> None:
    member = rollout(8.0, [1, 0, 1, 1, 0])
    assert rows([member], "reinforce", gamma=0.5) == [[2.0, 0.0, 4.0, 8.0, 0.0]]
    assert rows([member], "reinforce", gamma=0.5, mask_mode="count") == [[1.0, 0.0, 4.0, 8.0, 0.0]]
    member = rollout(8.0, [1, 1, 1], token_level_reward=[1.0, 2.0, 4.0])
    assert rows([member], "reinforce", gamma=0.5) == [[3.0, 4.0, 4.0]]


def test_reinforce_plus_plus() -> None:
    # Returns 1, 1, 4: mean 2, standard deviation sqrt(3).
    members = [rollout(1.0, [1, 1]), rollout(4.0)]
    outcome = computed(compute([members], estimator="reinforce_plus_plus", parameters={})[0])
    third = math.sqrt(3)
    assert advantages(outcome.items[0]) == near([-1 / third, -1 / third])
    assert advantages(outcome.items[1]) == near([2 / third])
    assert floats(outcome.items[0].returns) == [1.0, 1.0]


def test_remax() -> None:
    members = [rollout(3.0, [1, 0, 1], baseline_reward=1.0), rollout(3.0, baseline_reward=4.0)]
    assert rows(members, "remax", gamma=0.5) == [[0.5, 0.0, 2.0], [-1.0]]


def test_gae() -> None:
    member = rollout(3.0, [1, 1, 1], values=[0.5, 1.0, 2.0])
    assert rows([member], "gae", lam=0.5) == [[1.25, 1.5, 1.0]]
    cut = rollout(3.0, [1, 1, 1], values=[0.5, 1.0, 2.0, 4.0], truncated=True)
    assert rows([cut], "gae", lam=0.5) == [[2.25, 3.5, 5.0]]
    # A masked token is a step with value 0, or none.
    gap = rollout(3.0, [1, 0, 1], values=[0.5, 9.0, 2.0])
    assert rows([gap], "gae", gamma=0.5, lam=0.5) == [[0.75, 0.0, 1.0]]
    counted = rows([gap], "gae", gamma=0.5, lam=0.5, mask_mode="count")
    # Last: 1. Masked: 0.5 * 2 - 0 + 0.25 * 1. First: 0 - 0.5 + 0.25 * 1.25.
    assert counted == [[-0.1875, 0.0, 1.0]]


def test_cpgd() -> None:
    # Sums 1, 3, 1 and 3: mean 2, standard deviation with ddof 0 is 1.
    members = [
        rollout(1.0, [1, 1]),
        rollout(0.0, [1, 0, 1], token_level_reward=[1.0, 50.0, 2.0]),
        rollout(1.0),
        rollout(3.0),
    ]
    assert rows(members, "cpgd", eps=1.0) == [[-0.5, -0.5], [0.5, 0.0, 0.5], [-0.5], [0.5]]
    assert scores(members, "cpgd", weight="none") == [-1.0, 1.0, -1.0, 1.0]


def test_on_policy_distill() -> None:
    member = rollout(
        mask=[1, 0, 1], teacher_logprobs=[-1.0, math.nan, -3.0], logprobs=[-2.0, 0, -1]
    )
    member = dataclasses.replace(member, reward=None)
    assert rows([member], "on_policy_distill", coefficient=0.5) == [[0.5, 0.0, -1.0]]


def test_bias_and_scale() -> None:
    member = rollout(3.0)
    assert scores([member], "reinforce", reward_bias=1.0, reward_scale=2.0) == [4.0]
    added = scores([member], "reinforce", reward_bias=1.0, reward_scale=2.0, reward_bias_sign="add")
    assert added == [8.0]


def test_turn_rewards_over_the_steps_of_a_run() -> None:
    members = [
        rollout(4.0, run="a", step=7),
        rollout(1.0, run="a", step=2),
        rollout(2.0, run="a", step=5),
        rollout(8.0),
    ]
    got = scores(members, "reinforce", turn_rewards="steps", turn_discount=0.5)
    assert got == [4.0, 3.0, 4.0, 8.0]
    # The votes are 3 and 8, the others are compared with the vote of the other run.
    assert scores(members, "rloo", turn_rewards="steps", turn_discount=0.5) == [
        -4.0,
        -5.0,
        -4.0,
        5.0,
    ]


def test_turn_rewards_of_concatenated_turns() -> None:
    members = [
        rollout(8.0, [0, 1, 1, 0, 1, 0, 0, 1]),
        rollout(8.0, [1, 1, 1], num_turns=2),
        rollout(8.0, [1]),
    ]
    got = rows(members, "reinforce", turn_rewards="concatenated", turn_discount=0.5)
    assert [row[-1] for row in got] == [2.0, 4.0, 8.0]


def test_advantage_clip_counts_valid_tokens() -> None:
    members = [rollout(3.0, [1, 0, 1, 1]), rollout(1.0, [1, 0])]
    outcome = computed(
        compute([members], estimator="reinforce", parameters={"advantage_clip": 2.0})[0]
    )
    assert advantages(outcome.items[0]) == [2.0, 0.0, 2.0, 2.0]
    assert floats(outcome.items[0].returns) == [3.0, 0.0, 3.0, 3.0]
    assert outcome.details["advantage_clip_fraction"] == 0.75


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_is_subtracted_from_every_token(estimator: str) -> None:
    # x is 1 and then -2.
    logs = {"logprobs": [-1.0, math.nan, -3.0], "ref_logprobs": [-2.0, -1.0, -1.0]}
    member = rollout(0.0, [1, 0, 1], **logs)
    kl = {"k1": (1.0, -2.0), "k2": (0.5, 2.0), "k3": (math.exp(-1.0), math.exp(2.0) - 3)}[estimator]
    got = rows([member], "reinforce", kl_coef=0.5, kl_estimator=estimator)[0]
    assert got == near([-0.5 * (kl[0] + kl[1]), 0.0, -0.5 * kl[1]])
    clipped = rows([member], "reinforce", kl_coef=0.5, kl_estimator=estimator, kl_clip=0.25)[0]
    held = [max(-0.25, min(0.25, k)) for k in kl]
    assert clipped == near([-0.5 * sum(held), 0.0, -0.5 * held[1]])


def test_cross_batch_has_a_least_variance() -> None:
    members = [experience(1.0, [True]), experience(1.0 + 2**-20, [True])]
    got = scores(members, "reinforce", cross_batch="mean_std")
    assert got == near([-(2**-21) * 1e4, 2**-21 * 1e4])


def test_stages_over_scalars_leave_token_level_rewards_alone() -> None:
    dense = rollout(9.0, [1, 1], token_level_reward=[1.0, 2.0])
    stages = {
        "reward_bias": 5.0, "reward_scale": 3.0, "turn_rewards": "concatenated",
        "turn_discount": 0.5, "overlong_penalty": 1.0, "overlong_buffer": 1,
        "max_response_tokens": 1, "reward_clip": 0.125, "reward_norm_mean": "batch",
    }  # fmt: skip
    assert rows([dense, rollout(7.0)], "reinforce", **stages)[0] == [3.0, 2.0]


def test_later_steps_count_for_a_step_with_token_level_rewards() -> None:
    dense = rollout(9.0, [1, 1], token_level_reward=[1.0, 2.0], run="a", step=1)
    members = [rollout(4.0, run="a", step=0), dense, rollout(8.0, run="a", step=2)]
    got = rows(members, "reinforce", turn_rewards="steps", turn_discount=0.5)
    # 8; 0.5 * 8 on top of the step's own 1 and 2; 4 + 0.5 * (3 + 4).
    assert got == [[7.5], [7.0, 6.0], [8.0]]
