"""`masked_votes = false`: who isn't trained on is computed with as little as if it weren't there."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from experience_buffer_server.advantages import ESTIMATORS, ExperienceInput, GroupResult, compute
from experience_buffer_server.advantages.stages.running_moments import RunningMoments
from tests.unit.advantages.builders import advantages, column, experience, failed
from tests.unit.advantages.cases import full

OFF = {"masked_votes": False}
STAGES: list[Mapping[str, Any]] = [
    {},
    {"reward_norm_mean": "group", "reward_norm_std": "batch"},
    {"advantage_norm_mean": "batch", "advantage_norm_std": "group"},
    {"running_norm": "mean_std"},
    {"cross_batch": "mean_std"},
    {"reward_clip": 0.5, "turn_rewards": "concatenated", "turn_discount": 0.5},
]


def run_of(
    groups: Sequence[Sequence[ExperienceInput]], estimator: str, parameters: Mapping[str, Any]
) -> tuple[list[GroupResult], RunningMoments]:
    moments = RunningMoments()
    found = compute(groups, estimator=estimator, parameters=parameters, moments=moments)
    assert all(isinstance(one, GroupResult) for one in found), found
    return [one for one in found if isinstance(one, GroupResult)], moments


def firsts(result: GroupResult) -> list[float]:
    """The advantage of each member's first token."""
    return [advantages(item)[0] for item in result.items]


def is_trained(member: ExperienceInput) -> bool:
    return any(bytes(member.mask.data))


def group(rng: random.Random, size: int) -> list[ExperienceInput]:
    """Members of which some have no valid token."""
    members = []
    for _ in range(size):
        length = rng.randint(1, 5)
        mask = (
            [rng.random() < 0.7 for _ in range(length)] if rng.random() < 0.6 else [False] * length
        )
        members.append(full(experience(rng.choice((0.0, 1.0, 0.25, -2.0)), mask)))
    return members


@pytest.mark.parametrize(
    ("estimator", "stage"),
    [
        pytest.param(name, stage, id=f"{name}-{'+'.join(stage) or 'plain'}")
        for name, estimator in ESTIMATORS.items()
        for stage in STAGES
        if stage.keys() <= estimator.parameters.__dataclass_fields__.keys()
    ],
)
def test_it_is_as_if_they_were_not_there(estimator: str, stage: Mapping[str, Any]) -> None:
    rng = random.Random(f"{estimator} {stage}")
    groups = [group(rng, size) for size in (4, 1, 5, 3, 2, 6)]
    kept = [[one for one in members if is_trained(one)] for members in groups]
    found, moments = run_of(groups, estimator, {**stage, **OFF})
    expected, other_moments = run_of(kept, estimator, stage)
    assert moments.to_json() == other_moments.to_json()
    for members, own, without in zip(groups, found, expected, strict=True):
        assert len(own.items) == len(members)
        rest = iter(without.items)
        for member, item in zip(members, own.items, strict=True):
            if is_trained(member):
                one = next(rest)
                assert bytes(item.advantages) == bytes(one.advantages)
                assert bytes(item.returns) == bytes(one.returns)
                assert item.singleton == one.singleton
            else:
                zeros = bytes(4 * member.mask.num_bytes)
                assert bytes(item.advantages) == bytes(item.returns) == zeros
                assert item.zero_mask
                assert item.magnitude == 0.0
        assert own.details["members"] == len(members)
        assert own.details["parameters.masked_votes"] is False
        for name in without.details.keys() - {"members", "zero_variance"}:
            assert own.details[name] == without.details[name]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_by_default_nothing_changes(estimator: str) -> None:
    rng = random.Random(estimator)
    groups = [group(rng, 4) for _ in range(3)]
    one, _ = run_of(groups, estimator, {})
    other, _ = run_of(groups, estimator, {"masked_votes": True})
    for own, same in zip(one, other, strict=True):
        assert own.details == same.details
        assert [bytes(a.advantages) for a in own.items] == [bytes(b.advantages) for b in same.items]


def members_of(
    rewards: Sequence[float], masked: Sequence[int], **fields: Any
) -> list[ExperienceInput]:
    return [experience(r, [i not in masked], **fields) for i, r in enumerate(rewards)]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("dr_grpo", [0.667, 0.0, -0.333, -0.333]),
        ("grpo", [1.155, 0.0, -0.577, -0.577]),
        ("rloo", [1.0, 0.0, -0.5, -0.5]),
    ],
)
def test_the_baseline_is_of_those_that_are_trained_on(
    estimator: str, expected: list[float]
) -> None:
    (found,), _ = run_of([members_of([1, 1, 0, 0], [1])], estimator, OFF)
    assert [round(score, 3) for score in firsts(found)] == expected


@pytest.mark.parametrize(
    ("rewards", "masked", "is_withheld"),
    [
        ([1, 0, 0, 0], [0], True),
        ([1, 1, 0, 0], [0], False),
        ([1, 0, 0, 0], [0, 1, 2, 3], True),
        ([1, 0, 0, 0], [1, 2, 3], False),
        ([1, 1, 1], [], True),
    ],
)
@pytest.mark.parametrize("policy", ["keep", "mask", "withhold"])
def test_policies_look_at_those_that_are_trained_on(
    rewards: list[float], masked: list[int], is_withheld: bool, policy: str
) -> None:
    """One member alone isn't of zero variance, and nobody at all is."""
    parameters = {**OFF, "zero_variance": policy}
    (found,), _ = run_of([members_of(rewards, masked)], "grpo", parameters)
    assert bool(found.details["zero_variance"]) is is_withheld
    assert bool(found.details.get("withheld")) is (is_withheld and policy == "withhold")


def test_a_run_that_is_trained_on_votes_with_its_last_step() -> None:
    """Whatever the mask of that step is: the score of the run is that of its other steps."""
    steps = [
        experience(0.0, [True], run="a", step=0),
        experience(1.0, [False], run="a", step=1),
        experience(0.0, [True], run="b", step=0),
        experience(5.0, [False], run="c", step=0),
        experience(7.0, [False], run="c", step=1),
    ]
    (found,), _ = run_of([steps], "dr_grpo", OFF)
    assert firsts(found) == [0.5, 0.0, -0.5, 0.0, 0.0]
    assert found.details["votes"] == 2


def test_a_member_is_named_by_its_place_among_all() -> None:
    members = members_of([0.0, 1.0, 2.0, 3.0], [0, 2], values=[0.0])
    bad = dataclasses.replace(members[3], values=column([float("nan")], "F32"))
    (outcome,) = compute([[*members[:3], bad]], estimator="gae", parameters=OFF)
    assert failed(outcome).startswith("experience 3 of the group: values at a valid token")
    vast = dataclasses.replace(
        members[3], token_level_reward=column([3e38, 3e38], "F32"), mask=column([1, 1], "U8")
    )
    (outcome,) = compute([[*members[:3], vast]], estimator="reinforce", parameters=OFF)
    assert failed(outcome).startswith("experience 3 of the group: the result is beyond float32")


def test_masks_of_any_dtype_say_who_is_trained_on() -> None:
    for dtype in ("F32", "BF16", "F64", "I64", "U8", "BOOL"):
        members = members_of([1.0, 1.0, 0.0], [])
        members[0] = dataclasses.replace(members[0], mask=column([0], dtype))
        (found,), _ = run_of([members], "dr_grpo", OFF)
        assert firsts(found) == [0.0, 0.5, -0.5]
