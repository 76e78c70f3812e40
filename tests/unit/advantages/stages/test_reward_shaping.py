"""Turns, length and clip of scalar rewards."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.values import Column, ExperienceInput
from experience_buffer_server.advantages.stages.reward_shaping import (
    clip_fraction,
    clip_rewards,
    overlong_penalty,
    token_reward_sums,
    turn_rewards,
)
from tests.unit.advantages.goldens import Case, cases, rows
from tests.unit.advantages.scalars import Group, packed, step, steps

PENALTIES = [
    *cases("light_overlong", "FastExperienceMaker._process_experiences"),
    *cases("areal_overlong", "reward_overlong_penalty"),
]


def turned(group: Group, estimator: str = "grpo", **parameters: Any) -> list[float]:
    batch, checked, _ = packed([group], estimator, **parameters)
    values: list[float] = turn_rewards(batch.rewards, batch, checked).tolist()
    return values


@pytest.mark.parametrize(
    "case",
    cases(
        "areal_turn_discount",
        "MathMultiTurnAgent.collect_trajectory (seed 004 == AReaL 7f03b4b56^)",
    ),
)
def test_turn_rewards_of_the_agent(case: Case) -> None:
    params = case["params"]
    # Its success is 1 or 0, and it takes them for 1 and -1.
    rewards = [2.0 * success - 1.0 for success in case["inputs"]["success"]]
    result = turned(
        steps(rewards, "a"),
        reward_bias=params["reward_bias"],
        reward_scale=params["reward_scaling"],
        turn_rewards="steps",
        turn_discount=params["turn_level_discount"],
    )
    assert result == pytest.approx(case["expected"]["rewards"]["data"], rel=3e-5, abs=3e-5)


@pytest.mark.parametrize(
    "case",
    cases("areal_turn_discount", "InteractionCache.apply_reward_discount", noted=True),
)
def test_missing_rewards_of_the_interaction_cache(case: Case) -> None:
    # A missing reward is refused where it is pushed; a pusher that means 0 says 0.
    rewards = [reward or 0.0 for reward in case["inputs"]["rewards"]]
    discount = case["params"]["turn_discount"]
    result = turned(steps(rewards, "a"), turn_rewards="steps", turn_discount=discount)
    assert result == pytest.approx(case["expected"]["rewards"], rel=1e-11)


@pytest.mark.parametrize("case", cases("areal_turn_discount", "MultiTurnWorkflow.arun_episode"))
def test_concatenated_turns_of_the_workflow(case: Case) -> None:
    mask = [bool(flag) for flag in case["expected"]["loss_mask"]["data"]]
    experience = step(case["inputs"]["success"][-1], mask=mask)
    discount = case["params"]["turn_discount"]
    result = turned([experience], turn_rewards="concatenated", turn_discount=discount)
    assert result == pytest.approx(case["expected"]["rewards"]["data"], rel=3e-5)


def test_discounts_do_not_depend_on_positions() -> None:
    group = [step(1.0, num_turns=turns) for turns in (2, 7, 31, 5, 11) for _ in range(5)]
    result = turned(group, turn_rewards="concatenated", turn_discount=0.9)
    assert result == [0.9 ** (turns - 1) for turns in (2, 7, 31, 5, 11) for _ in range(5)]


def test_long_runs_take_no_stack() -> None:
    result = turned(steps([1.0] * 5000, "a"), turn_rewards="steps", turn_discount=1.0)
    assert result == [float(5000 - number) for number in range(5000)]


def test_token_reward_sums_leave_out_masked_slots() -> None:
    group = [
        step(5.0),
        step(None, mask=[True, False, True], token_rewards=[0.1, math.nan, 0.2]),
        step(None, mask=[False, False], token_rewards=[math.inf, 7.0]),
        step(None, mask=[], token_rewards=[]),
    ]
    batch, _, _ = packed([group], "reinforce")
    assert token_reward_sums(batch).tolist() == [0.0, 0.1 + 0.2, 0.0, 0.0]


def test_token_reward_sums_of_single_precision_are_taken_in_double() -> None:
    rewards = np.full(4001, 0.1, dtype=np.float32)
    experience = ExperienceInput(
        reward=None,
        mask=Column("BOOL", bytes([1]) * 4001),
        token_level_reward=Column("F32", rewards.tobytes()),
    )
    batch, _, _ = packed([[experience]], "reinforce")
    total = 0.0
    for reward in rewards.tolist():
        total += reward
    assert token_reward_sums(batch).tolist() == [total]


@pytest.mark.parametrize("case", PENALTIES)
def test_overlong_penalty(case: Case) -> None:
    params, inputs = case["params"], case["inputs"]
    light = "max_new_tokens" in params
    factor = params["overlong_buffer_penalty_factor" if light else "overlong_penalty_factor"]
    masks = rows(inputs["action_mask" if light else "loss_mask"])
    group = [
        step(reward, mask=[bool(flag) for flag in mask])
        for reward, mask in zip(inputs["rewards"]["data"], masks, strict=True)
    ]
    batch, parameters, _ = packed(
        [group],
        "grpo",
        overlong_penalty=factor,
        overlong_buffer=params["overlong_buffer_len" if light else "overlong_tokens"],
        max_response_tokens=params["max_new_tokens" if light else "max_response_length"],
    )
    result = overlong_penalty(batch.rewards, batch, parameters)
    assert result.tolist() == pytest.approx(case["expected"]["rewards"]["data"], rel=3e-5, abs=3e-5)
    # What was pushed stays.
    assert batch.rewards.tolist() == inputs["rewards"]["data"]


@pytest.mark.parametrize("case", cases("light_clip_fraction", "compute_clip_fraction"))
def test_clip_fraction(case: Case) -> None:
    params = case["params"]
    values = np.array(case["inputs"]["values"]["data"])
    fraction = clip_fraction(values, minimum=params["clip_min"], maximum=params["clip_max"])
    # It says the same of every row.
    assert set(case["expected"]["out"]["data"]) == {fraction}


def test_token_level_rewards_are_neither_penalised_nor_clipped() -> None:
    group = [step(5.0, mask=[True] * 7), step(None, mask=[True] * 7, token_rewards=[9.0] * 7)]
    batch, parameters, details = packed(
        [group],
        "reinforce",
        overlong_penalty=1.0,
        overlong_buffer=4,
        max_response_tokens=6,
        reward_clip=2.0,
    )
    penalised = overlong_penalty(batch.rewards, batch, parameters)
    assert penalised.tolist() == [3.75, 0.0]
    # A number where the scalar isn't used.
    clipped_B = clip_rewards(np.array([1.75, 7.0]), batch, parameters, details)
    assert clipped_B.tolist() == [1.75, 7.0]
    assert details[0]["reward_clip_fraction"] == 0.0


def clipped(groups: Sequence[Group], bound: float) -> tuple[list[float], list[Any], Batch]:
    batch, parameters, details = packed(groups, "grpo", reward_clip=bound)
    result = clip_rewards(batch.rewards, batch, parameters, details)
    return result.tolist(), details, batch


def test_clip_counts_what_lies_strictly_outside_per_group() -> None:
    groups = [[step(r) for r in (-3.0, -2.0, 2.0, 2.5, 0.5)], [], [step(7.0)]]
    result, details, batch = clipped(groups, 2.0)
    assert result == [-2.0, -2.0, 2.0, 2.0, 0.5, 2.0]
    assert [detail["reward_clip_fraction"] for detail in details] == [0.4, 0.0, 1.0]
    assert batch.rewards.tolist()[0] == -3.0


def test_stages_that_are_off_change_and_record_nothing() -> None:
    result, details, batch = clipped([[step(1e30), step(-0.1)]], 0.0)
    bits = struct.pack("2d", *batch.rewards.tolist())
    assert struct.pack("2d", *result) == bits
    assert details == [{}]
    assert struct.pack("2d", *turned([step(1e30), step(-0.1)])) == bits
