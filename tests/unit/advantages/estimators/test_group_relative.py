"""Rewards compared within their group: exact zeros, digits that stay, what is recorded."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experience_buffer_server.advantages.estimators.group_relative import (
    asymre_scores,
    compare_dr_grpo,
    compare_grpo,
    compare_opmd,
    compare_rloo,
    dr_grpo_scores,
    grpo_scores,
    rloo_scores,
)
from tests.unit.advantages.scalars import scored, step, steps, votes_of


def test_equal_rewards_have_the_same_score_in_every_group() -> None:
    """Else running moments would divide by what is rounded: 0.1 became 7e15 here."""
    groups = [[step(reward)] * 3 for reward in (0.0, 0.1, 1 / 3, 0.7, 1.0, 1e6 / 7)]
    scores, _ = scored(asymre_scores, groups, "asymre", shift=-0.1)
    assert {score for of_group in scores for score in of_group} == {0.1}


@pytest.mark.parametrize(("tau", "baseline"), [(1e-9, 5.0), (1e-300, 5.0), (1e6, 2.0)])
def test_logavgexp_lies_between_the_mean_and_the_largest(tau: float, baseline: float) -> None:
    centres = compare_opmd(votes_of([[-1.0, 5.0, 2.0]]), tau=tau).centres
    assert centres == pytest.approx([baseline] * 3, abs=1e-5)


def test_logavgexp_keeps_its_digits_at_high_temperatures() -> None:
    # To second order it is mean + var / (2 tau), which a logarithm of nearly 1 would lose.
    votes = votes_of([[0.0, 0.25, 0.5, 1.0]])
    expected = 0.4375 + (0.328125 - 0.4375**2) / 2e6
    assert compare_opmd(votes, tau=1e6).centres[0] == pytest.approx(expected, abs=1e-13)


@settings(max_examples=100)
@given(st.floats(-1e300, 1e300), st.integers(2, 40))
@example(0.1, 3)
@example(0.1, 7)
@example(0.7, 11)
def test_any_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    votes = votes_of([[reward] * size])
    for comparison in (
        compare_grpo(votes, eps=1e-6),
        compare_dr_grpo(votes),
        compare_rloo(votes),
        compare_opmd(votes, tau=0.1),
    ):
        assert comparison.scores(votes).tolist() == [0.0] * size


def test_what_was_used_is_recorded() -> None:
    group = [step(reward) for reward in (1.0, 0.0, 0.5)]
    common = {"votes": 3, "mean": 0.5, "zero_variance": False, "singleton": False}
    assert scored(grpo_scores, [group], "grpo")[1] == [{**common, "std": 0.5}]
    assert scored(rloo_scores, [group], "rloo")[1] == [common]
    shifted = scored(asymre_scores, [group], "asymre", shift=-0.25)[1]
    assert shifted == [{**common, "baseline": 0.25}]


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


def test_sparse_rewards_at_first_steps_do_not_hide_the_returns() -> None:
    group = [*steps([0.0, 1.0], "a"), *steps([0.0, 0.0], "b")]
    _, details = scored(grpo_scores, [group], "grpo", turn_rewards="steps")
    assert details[0]["zero_variance"] is False
