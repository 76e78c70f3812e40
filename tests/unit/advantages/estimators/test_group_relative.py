"""Rewards compared within their group: formulas, votes of runs, exact zeros, invariances."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experience_buffer_server.advantages.estimators.group_relative import (
    Comparison,
    asymre_scores,
    compare_asymre,
    compare_dr_grpo,
    compare_grpo,
    compare_opmd,
    compare_rloo,
    dr_grpo_scores,
    grpo_scores,
    opmd_scores,
    rloo_scores,
)
from experience_buffer_server.advantages.stages.votes import Votes
from tests.unit.advantages import plain
from tests.unit.advantages.scalars import scored, step, steps

FAMILY: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "grpo": (grpo_scores, "grpo", {}),
    "dr_grpo": (dr_grpo_scores, "dr_grpo", {}),
    "rloo": (rloo_scores, "rloo", {}),
    "reinforce_baseline": (dr_grpo_scores, "reinforce_baseline", {}),
    "opmd": (opmd_scores, "opmd", {}),
    "opmd_logavgexp": (opmd_scores, "opmd", {"baseline": "logavgexp", "tau": 0.7}),
    "asymre": (asymre_scores, "asymre", {"shift": 0.0}),
}
"""Every estimator that gives 0 where all rewards are equal."""

each = pytest.mark.parametrize("family", FAMILY)


def scores_of(family: str, groups: list[Any], **parameters: Any) -> tuple[list[Any], Any]:
    score, estimator, own = FAMILY[family]
    return scored(score, groups, estimator, **{**own, **parameters})


def as_float32(value: float) -> float:
    return float(np.float32(value))


rewards_lists = st.lists(
    st.floats(-100, 100, width=32).map(lambda r: r + 0.0), min_size=1, max_size=17
)


@settings(max_examples=150, deadline=None)
@given(st.lists(rewards_lists, min_size=1, max_size=5))
def test_formulas(groups: list[list[float]]) -> None:
    votes = Votes.of(groups)

    def assert_agrees(
        comparison: Comparison, formula: Callable[[list[float]], list[float]]
    ) -> None:
        expected = [score for rewards in groups for score in formula(rewards)]
        assert_close(comparison.scores(votes).tolist(), expected)

    assert_agrees(compare_grpo(votes, eps=1e-3), lambda rewards: plain.grpo(rewards, 1e-3))
    assert_agrees(compare_dr_grpo(votes), plain.centred)
    assert_agrees(compare_rloo(votes), plain.rloo)
    assert_agrees(compare_opmd(votes, tau=3.0), lambda rewards: plain.opmd(rewards, 3.0))
    assert_agrees(compare_asymre(votes, shift=-0.1), lambda rewards: plain.asymre(rewards, -0.1))


def assert_close(actual: list[float], expected: list[float]) -> None:
    assert actual == pytest.approx(expected, rel=1e-11, abs=1e-11)


@each
def test_each_estimator_takes_its_own_formula(family: str) -> None:
    rewards = [1.0, 0.0, 0.25, -3.5, 0.25]
    expected = {
        "grpo": plain.grpo(rewards, 1e-6),
        "rloo": plain.rloo(rewards),
        "opmd_logavgexp": plain.opmd(rewards, 0.7),
    }.get(family, plain.centred(rewards))
    scores, _ = scores_of(family, [[step(reward) for reward in rewards]])
    assert_close(scores[0], expected)


def test_parameters_arrive() -> None:
    group = [[step(reward) for reward in (1.0, 0.0, 0.5)]]
    shifted, _ = scored(asymre_scores, group, "asymre", shift=-0.5)
    assert_close(shifted[0], [1.0, 0.0, 0.5])
    damped, _ = scored(grpo_scores, group, "grpo", eps=0.5)
    assert_close(damped[0], [0.5, -0.5, 0.0])


def test_equal_rewards_have_the_same_score_in_every_group() -> None:
    """Else running moments would divide by what is rounded: 0.1 became 7e15 here."""
    groups = [[step(reward)] * 3 for reward in (0.0, 0.1, 1 / 3, 0.7, 1.0, 1e6 / 7)]
    scores, _ = scored(asymre_scores, groups, "asymre", shift=-0.1)
    assert {score for of_group in scores for score in of_group} == {0.1}


@pytest.mark.parametrize(("tau", "baseline"), [(1e-9, 5.0), (1e-300, 5.0), (1e6, 2.0)])
def test_logavgexp_lies_between_the_mean_and_the_largest(tau: float, baseline: float) -> None:
    centres = compare_opmd(Votes.of([[-1.0, 5.0, 2.0]]), tau=tau).centres
    assert centres == pytest.approx([baseline] * 3, abs=1e-5)


def test_logavgexp_keeps_its_digits_at_high_temperatures() -> None:
    # To second order it is mean + var / (2 tau), which a logarithm of nearly 1 would lose.
    votes = Votes.of([[0.0, 0.25, 0.5, 1.0]])
    expected = 0.4375 + (0.328125 - 0.4375**2) / 2e6
    assert compare_opmd(votes, tau=1e6).centres[0] == pytest.approx(expected, abs=1e-13)


@each
@pytest.mark.parametrize("size", [2, 3, 7, 8, 61])
@pytest.mark.parametrize("reward", [0.1, 0.3, 1e-30, -7.7, 16777217.0, 3e38, 1e-45, 0.0])
def test_equal_rewards_give_exactly_zero(family: str, reward: float, size: int) -> None:
    scores, details = scores_of(family, [[step(reward) for _ in range(size)]])
    assert struct.pack(f"{size}d", *scores[0]) == bytes(8 * size)
    assert details[0]["zero_variance"] is True
    assert details[0]["mean"] == as_float32(reward)


@settings(max_examples=100, deadline=None)
@given(st.floats(-1e300, 1e300), st.integers(2, 40))
@example(0.1, 3)
@example(0.1, 7)
@example(0.7, 11)
def test_any_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    votes = Votes.of([[reward] * size])
    for comparison in (
        compare_grpo(votes, eps=1e-6),
        compare_dr_grpo(votes),
        compare_rloo(votes),
        compare_opmd(votes, tau=0.1),
    ):
        assert comparison.scores(votes).tolist() == [0.0] * size


@each
def test_a_group_of_one_gives_its_reward_and_says_so(family: str) -> None:
    scores, details = scores_of(family, [[step(0.75)], [step(1.0), step(0.0)]])
    assert scores[0] == [0.75 / (1 + 1e-6) if family == "grpo" else 0.75]
    assert details[0]["singleton"] is True
    assert details[1]["singleton"] is False
    assert details[0]["zero_variance"] is False
    assert details[0]["votes"] == 1
    assert details[0]["mean"] == 0.0


def test_a_shift_is_for_comparisons_only() -> None:
    scores, _ = scored(asymre_scores, [[step(0.75)]], "asymre", shift=-0.1)
    assert scores == [[0.75]]


def test_what_was_used_is_recorded() -> None:
    group = [step(reward) for reward in (1.0, 0.0, 0.5)]
    common = {"votes": 3, "mean": 0.5, "zero_variance": False, "singleton": False}
    assert scored(grpo_scores, [group], "grpo")[1] == [{**common, "std": 0.5}]
    assert scored(rloo_scores, [group], "rloo")[1] == [common]
    shifted = scored(asymre_scores, [group], "asymre", shift=-0.25)[1]
    assert shifted == [{**common, "baseline": 0.25}]


@each
def test_the_order_of_members_and_neighbours_changes_no_bit(family: str) -> None:
    shuffling = random.Random(7)
    rewards = [shuffling.uniform(-3, 3) * 10.0 ** shuffling.randint(-6, 6) for _ in range(13)]
    members = [step(reward, run=f"r{index}") for index, reward in enumerate(rewards)]
    neighbours = [[step(shuffling.random()) for _ in range(5)] for _ in range(3)]
    alone = scores_of(family, [members])[0][0]
    by_run = {member.run: score for member, score in zip(members, alone, strict=True)}
    for place in range(4):
        shuffled = shuffling.sample(members, len(members))
        groups = [*neighbours[:place], shuffled, *neighbours[place:]]
        together = scores_of(family, groups)[0][place]
        assert together == [by_run[member.run] for member in shuffled]


@each
def test_a_run_of_several_steps_votes_once_with_its_last(family: str) -> None:
    one_step = [step(1.0, "a"), step(0.25, "b"), step(-2.0, "c")]
    expected = scores_of(family, [one_step])[0][0]
    several = [*steps([9.0, 7.0, 1.0], "a"), step(0.25, "b"), *steps([5.0, -2.0], "c")]
    scores, details = scores_of(family, [several[::-1]])
    a, b, c = expected
    assert scores[0][::-1] == [a, a, a, b, c, c]
    assert details[0]["votes"] == 3


@each
def test_returns_of_steps_are_scored_against_whole_runs(family: str) -> None:
    # Returns: 3, 1, 1 and -1, -2. The whole runs' 3 and -1 are the votes.
    group = [*steps([2.0, 0.0, 1.0], "a"), *steps([1.0, -2.0], "b"), step(0.5, "c")]
    scores, details = scores_of(family, [group], turn_rewards="steps", turn_discount=1.0)
    whole, _ = scores_of(family, [[step(3.0), step(-1.0), step(0.5)]])
    assert details[0]["votes"] == 3
    a, b, c = whole[0]
    assert [scores[0][0], scores[0][3], scores[0][5]] == pytest.approx([a, b, c], abs=1e-12)
    scale = (a - b) / 4.0 if family == "grpo" else 1.0
    rest = [scores[0][1], scores[0][2], scores[0][4]]
    assert rest == pytest.approx([a - 2 * scale, a - 2 * scale, b - scale], abs=1e-12)


def test_steps_are_not_blown_up_where_no_run_stands_out() -> None:
    group = [*steps([0.0, 1.0], "a"), *steps([1.0, 0.0], "b")]
    scores, details = scored(grpo_scores, [group], "grpo", turn_rewards="steps")
    # Bits, because a negative zero is equal too.
    assert struct.pack("4d", *scores[0]) == bytes(32)
    assert details[0]["zero_variance"] is True
    # Without a standard deviation there is nothing to blow up.
    assert scored(dr_grpo_scores, [group], "dr_grpo", turn_rewards="steps")[0] == [
        [0.0, 0.0, 0.0, -1.0]
    ]


def test_a_group_that_only_lengths_tell_apart_has_no_variance() -> None:
    group = [step(1.0, mask=[True] * length) for length in (2, 5, 9)]
    scores, details = scored(
        dr_grpo_scores,
        [group],
        "dr_grpo",
        overlong_penalty=1.0,
        overlong_buffer=4,
        max_response_tokens=8,
    )
    assert details[0]["zero_variance"] is True
    assert_close(scores[0], [0.5, 0.25, -0.75])


def test_sparse_rewards_at_first_steps_do_not_hide_the_returns() -> None:
    group = [*steps([0.0, 1.0], "a"), *steps([0.0, 0.0], "b")]
    _, details = scored(grpo_scores, [group], "grpo", turn_rewards="steps")
    assert details[0]["zero_variance"] is False


@each
def test_empty_groups_and_launches(family: str) -> None:
    assert scores_of(family, [])[0] == []
    scores, details = scores_of(family, [[], [step(1.0), step(0.0)], []])
    assert [len(group) for group in scores] == [0, 2, 0]
    assert [detail["votes"] for detail in details] == [0, 2, 0]
