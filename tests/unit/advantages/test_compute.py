"""What a launch does with single groups: votes, flags, masks, records."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from experience_buffer_server.advantages import ESTIMATORS, compute
from experience_buffer_server.advantages.stages.running_moments import RunningMoments

from .builders import advantages, computed, experience, failed, floats, scores
from .cases import full

GROUP_ESTIMATORS = [name for name, spec in ESTIMATORS.items() if spec.compares == "group"]
SCORED = [name for name in ESTIMATORS if name != "on_policy_distill"]
UNNORMED = {"advantage_norm_mean": "none", "advantage_norm_std": "none", "cross_batch": "none"}


def plain(estimator: str) -> dict[str, Any]:
    """Without the normalisations over a batch that some estimators have by default."""
    return UNNORMED if estimator.startswith("reinforce") else {}


@pytest.mark.parametrize("estimator", [*GROUP_ESTIMATORS, "cpgd"])
@pytest.mark.parametrize("reward", [0.1, 0.3, 1e-30, -7.7, 16777217.0, 3e38])
@pytest.mark.parametrize("size", [2, 3, 8, 61])
def test_equal_rewards_give_exactly_zero(estimator: str, reward: float, size: int) -> None:
    members = [full(experience(reward)) for _ in range(size)]
    parameters: dict[str, Any] = {"shift": 0.0} if estimator == "asymre" else {}
    if estimator == "opmd":
        parameters = {"baseline": "logavgexp"}
    result = computed(compute([members], estimator=estimator, parameters=parameters)[0])
    assert all(advantages(item) == [0.0, 0.0] for item in result.items)
    if estimator != "cpgd":
        assert result.details["zero_variance"] is True
        assert result.details["mean"] == pytest.approx(reward, rel=1e-7)


def test_rewards_that_are_equal_in_float32_are_equal() -> None:
    assert scores([experience(0.1), experience(0.1 + 1e-12)]) == [0.0, 0.0]


def test_details_of_grpo() -> None:
    members = [experience(reward) for reward in (1.0, 0.0, 0.0, 1.0, 0.5)]
    result = computed(compute([members], estimator="group_norm", parameters={"eps": 0.25})[0])
    assert result.details == {
        "estimator": "grpo",
        "parameters.eps": 0.25,
        "members": 5,
        "votes": 5,
        "mean": 0.5,
        "std": 0.5,
        "zero_variance": False,
        "singleton": False,
    }
    assert [advantages(item)[0] for item in result.items] == pytest.approx(
        [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0.0]
    )


def test_details_hold_the_parameters_that_differ_from_their_defaults() -> None:
    given: dict[str, Any] = {"gamma": 0.5, "lam": 1.0, "mask_mode": "skip"}
    members = [full(experience())]
    result = computed(compute([members], estimator="gae", parameters=given)[0])
    assert result.details == {"estimator": "gae", "parameters.gamma": 0.5, "members": 1}
    assert not result.items[0].singleton


def test_details_of_a_batch_count_what_was_computed() -> None:
    groups = [[experience(1.0)] * 3, [experience(math.nan)], [experience(2.0)] * 2, []]
    how: dict[str, Any] = {"estimator": "reinforce", "parameters": {"cross_batch": "mean_std"}}
    first, _, third, fourth = compute(groups, **how)
    for outcome in (first, third, fourth):
        details = computed(outcome).details
        assert (details["batch_groups"], details["batch_members"]) == (2, 5)
    apart = compute(groups, **how, batches=[0, 0, 1, 1])
    found = [computed(apart[g]).details for g in (0, 2, 3)]
    assert [details["batch_members"] for details in found] == [3, 2, 2]
    assert [details["batch_groups"] for details in found] == [1, 1, 1]
    nobody = computed(compute([[]], **how)[0]).details
    assert (nobody["batch_groups"], nobody["batch_members"]) == (0, 0)


SINGLE = {"grpo": 3 / (1 + 1e-6), "step_wise_grpo": 3 / (1 + 1e-6), "gigpo": 3 / (1 + 1e-6)}


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_single_vote_is_flagged_and_gets_its_reward(estimator: str) -> None:
    members = [full(experience(3.0))]
    outcome = compute([members], estimator=estimator, parameters=plain(estimator))[0]
    result = computed(outcome)
    wanted = SINGLE.get("grpo" if estimator == "group_norm" else estimator, 3.0)
    assert advantages(result.items[0]) == pytest.approx([wanted] * 2, rel=1e-7)
    assert result.items[0].singleton
    assert result.details["singleton"] is True
    assert result.details["zero_variance"] is False
    assert (result.details["votes"], result.details["mean"]) == (1, 0.0)


def test_a_run_votes_once_with_the_reward_of_its_highest_step() -> None:
    members = [
        experience(0.0, run="a", step=2),
        experience(9.0, run="a", step=0),
        experience(5.0, run="a", step=1),
        experience(2.0, run="b", step=0),
        experience(4.0),
    ]
    result = computed(compute([members], estimator="rloo", parameters={})[0])
    assert [advantages(i)[0] for i in result.items] == [-3.0, -3.0, -3.0, 0.0, 3.0]
    assert (result.details["votes"], result.details["members"]) == (3, 5)
    for order in itertools.permutations(range(5)):
        shuffled = compute([[members[m] for m in order]], estimator="rloo", parameters={})
        assert computed(shuffled[0]).items == tuple(result.items[m] for m in order)


def test_only_run_of_a_group_is_a_singleton_however_many_steps() -> None:
    members = [experience(float(step), run="a", step=step) for step in range(3)]
    result = computed(compute([members], estimator="grpo", parameters={})[0])
    assert [item.singleton for item in result.items] == [True] * 3
    assert [advantages(i)[0] for i in result.items] == pytest.approx([2 / (1 + 1e-6)] * 3)


def test_equal_steps_of_a_run_are_one_vote_if_they_agree_and_an_error_if_not() -> None:
    agreeing = [experience(1.0, run="a"), experience(1.0, run="a"), experience(3.0, run="b")]
    assert scores(agreeing, "rloo") == [-2.0, -2.0, 2.0]
    differing = [experience(1.0, run="a"), experience(3.0, run="a")]
    error = failed(compute([differing], estimator="grpo", parameters={})[0])
    assert "experiences 0 and 1 of the group share run 'a' and step 0" in error
    # Estimators without group statistics need no votes.
    computed(compute([differing], estimator="reinforce", parameters={})[0])


def test_zero_variance_looks_at_the_rewards_that_were_pushed() -> None:
    # The penalty tells them apart, but the task was equally hard for both.
    limits: dict[str, Any] = {
        "overlong_penalty": 1.0,
        "overlong_buffer": 4,
        "max_response_tokens": 4,
    }
    members = [experience(1.0, [True]), experience(1.0, [True] * 3)]
    result = computed(compute([members], estimator="dr_grpo", parameters=limits)[0])
    assert [advantages(item)[0] for item in result.items] == pytest.approx([0.25, -0.25])
    assert result.details["zero_variance"] is True


def test_bootstrap_is_used_if_truncated_and_given() -> None:
    members = [
        experience(1.0, [True, False], values=[0.5, 9.0, 2.0], truncated=True),
        experience(1.0, [True, False], values=[0.5, 9.0, 2.0], truncated=False),
        experience(1.0, [True, False], values=[0.5, 9.0], truncated=True),
    ]
    for mode in ("count", "skip"):
        parameters: dict[str, float | bool | str] = {"gamma": 0.5, "mask_mode": mode}
        result = computed(compute([members], estimator="gae", parameters=parameters)[0])
        assert [advantages(i) for i in result.items] == [[1.5, 0.0], [0.5, 0.0], [0.5, 0.0]]
        assert [floats(i.returns) for i in result.items] == [[2.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
        assert [i.bootstrapped for i in result.items] == [True, False, False]
    unread = computed(compute([members], estimator="reinforce", parameters={})[0])
    assert not any(i.bootstrapped for i in unread.items)


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_a_mask_without_valid_tokens_gives_zeros_and_a_flag(estimator: str) -> None:
    nothing = [math.nan] * 3
    members = [
        full(experience(1.0, [False] * 3, values=nothing, token_level_reward=nothing)),
        full(experience(2.0, [], values=[])),
        full(experience(4.0, [True], values=[0.0])),
    ]
    result = computed(compute([members], estimator=estimator, parameters={})[0])
    assert [item.zero_mask for item in result.items] == [True, True, False]
    assert floats(result.items[0].advantages) == floats(result.items[0].returns) == [0.0] * 3
    assert bytes(result.items[1].advantages) == b""
    # It still votes: the rollout happened, only nothing of it is trained on.
    assert result.details["members"] == 3


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_a_launch_of_nothing_but_empty_masks(estimator: str) -> None:
    members = [full(experience(r, [False] * 2)) for r in (1.0, 2.0)]
    parameters: dict[str, Any] = {
        "advantage_norm_mean": "batch",
        "advantage_norm_std": "group",
        "cross_batch": "mean_std",
        "advantage_clip": 1.0,
    }
    for outcome in compute([members, members[:1]], estimator=estimator, parameters=parameters):
        for item in computed(outcome).items:
            assert bytes(item.advantages) == bytes(item.returns) == bytes(8)


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_empty_launches_and_groups(estimator: str, kl_coef: float) -> None:
    how: dict[str, Any] = {"estimator": estimator, "parameters": {}}
    if estimator != "on_policy_distill":
        how["parameters"] = {"running_norm": "std", "reward_norm_std": "batch"}
        if estimator != "cpgd":
            how["parameters"]["kl_coef"] = kl_coef
    moments = RunningMoments()
    assert compute([], **how, moments=moments) == []
    assert [computed(o).items for o in compute([[], []], **how, moments=moments)] == [(), ()]
    assert moments.count == 0
    outcomes = compute([[], [full(experience())], []], **how, moments=moments)
    assert [len(computed(outcome).items) for outcome in outcomes] == [0, 1, 0]
    assert [computed(outcome).details["members"] for outcome in outcomes] == [0, 1, 0]


@pytest.mark.parametrize("estimator", SCORED)
@pytest.mark.parametrize("rewards", [[-0.0], [0.0, -0.0], [-0.0, 0.0]])
def test_negative_zero_never_comes_back(estimator: str, rewards: list[float]) -> None:
    members = [full(experience(reward, [True], values=[-0.0])) for reward in rewards]
    parameters: dict[str, Any] = {"shift": -0.0} if estimator == "asymre" else {}
    result = computed(compute([members], estimator=estimator, parameters=parameters)[0])
    assert {bytes(i.advantages) + bytes(i.returns) for i in result.items} == {bytes(8)}


@pytest.mark.parametrize(
    ("votes", "mean"),
    [([1e20, 1.0, -1e20, 0.125], 1.125 / 4), ([0.1, 0.7, 1.3, 2.2, 0.001], 0.8602)],
)
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opmd", "gigpo"])
def test_statistics_do_not_depend_on_the_order_of_votes(
    estimator: str, votes: list[float], mean: float
) -> None:
    members = [full(experience(vote, [True])) for vote in votes]
    expected = computed(compute([members], estimator=estimator, parameters={})[0])
    assert expected.details["mean"] == pytest.approx(mean, rel=3e-8)
    orders = list(itertools.permutations(range(len(votes))))
    outcomes = compute(
        [[members[m] for m in order] for order in orders], estimator=estimator, parameters={}
    )
    for order, outcome in zip(orders, outcomes, strict=True):
        result = computed(outcome)
        assert result.items == tuple(expected.items[m] for m in order)
        assert result.details == expected.details


@pytest.mark.parametrize("estimator", ["grpo", "step_wise_grpo", "gigpo", "cpgd", "reinforce"])
def test_the_least_eps_divides_nothing_into_something(estimator: str) -> None:
    parameters: dict[str, Any] = {
        f"{stage}_norm_{name}": value
        for stage in ("reward", "advantage")
        for name, value in (("mean", "group"), ("std", "group"), ("eps", 1e-30))
    }
    if estimator != "reinforce":
        parameters["eps"] = 1e-30
    group = [full(experience(0.1)) for _ in range(3)]
    result = computed(compute([group], estimator=estimator, parameters=parameters)[0])
    assert [advantages(item) for item in result.items] == [[0.0, 0.0]] * 3
