"""Estimators that compare a reward with those of the other members of its group.

Statistics are taken over the votes of a group, one per run, in float64 with correctly rounded sums.
So equal rewards give exactly 0, and neither the order of the members nor the neighbours in the
launch change a bit. Legend: B experiences, G groups, V votes of all groups, n votes of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Floats
from experience_buffer_server.advantages.arrays.values import GroupDetails
from experience_buffer_server.advantages.plan.parameters import (
    OpmdParameters,
    RewardParameters,
)
from experience_buffer_server.advantages.stages.reward_shaping import voting_rewards
from experience_buffer_server.advantages.stages.votes import (
    Ballot,
    Votes,
    steps_differ,
    votes_of_runs,
    zero_variance,
)


class Comparison(NamedTuple):
    """What votes are measured against: r becomes `(r - centre) / divisor + lift`."""

    centres: Floats
    """One per vote, shape [V]."""
    divisors: Floats
    """One per group, shape [G]; infinite where nothing tells the votes apart, so that scores are
    0."""
    moments: dict[str, Floats]
    """What is recorded of each group, of shape [G] each: `mean`, `std` where it is used, `baseline`
    where it isn't the mean."""
    lifts: Floats | float = 0.0
    """Added to scores, one per vote, shape [V], or the same for all. It isn't part of the centre:
    `r - (mean + shift)` of equal votes would differ from group to group by what is rounded, and
    running moments would take that for a deviation."""

    def scores(self, votes: Votes) -> Floats:
        """Score each vote, shape [V]."""
        return (votes.values - self.centres) / votes.spread(self.divisors) + self.lifts


Compare = Callable[[Votes], Comparison]
"""What rewards are compared with, one of them per run. Unless it says otherwise, a single vote r
gives r."""
Scores = Callable[[Floats, Batch, Any, GroupDetails], Floats]
"""From rewards, shape [B], by the launch's batch and the estimator's parameters, to what takes their
place, shape [B]; what was used is recorded in each group's details."""


def compare_grpo(votes: Votes, *, eps: float) -> Comparison:
    """Standardise each vote within its group: `(r - mean) / (std + eps)`, ddof 1.

    eps is above 0. A single vote r gives `r / (1 + eps)`, as if mean were 0 and std 1. Where all
    votes are equal every score is 0, also that of a step whose own return differs.

    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.1; eps as in Trinity-RFT.
    """
    means_G = _means_of_several(votes)
    stds_G = np.where(votes.sizes < 2, 1.0, votes.stds(means_G, ddof=1))
    divisors_G = np.where(stds_G > 0, stds_G + eps, np.inf)
    return Comparison(votes.spread(means_G), divisors_G, {"mean": means_G, "std": stds_G})


def compare_dr_grpo(votes: Votes) -> Comparison:
    """Subtract the mean of the group: `r - mean`; also the first stage of `reinforce_baseline`.

    Source: Liu et al. 2025 (Dr. GRPO), section 3.2; Hu et al. 2025 (REINFORCE++), its variant with
    a baseline.
    """
    means_G = _means_of_several(votes)
    return Comparison(votes.spread(means_G), np.ones_like(means_G), {"mean": means_G})


def compare_rloo(votes: Votes) -> Comparison:
    """Subtract from each vote the mean of the others: `r_i - (sum(r) - r_i) / (n - 1)`.

    The recorded mean is that of all votes, 0 for a single one.

    Source: Ahmadian et al. 2024, section 3.2; Kool et al. 2019.
    """
    means_G, others_G = _means_of_several(votes), np.maximum(votes.sizes - 1.0, 1.0)
    centres_V = (votes.spread(votes.sums()) - votes.values) / votes.spread(others_G)
    # Exactly the vote where all are equal, and 0 for a single one.
    equal_V = votes.spread(votes.constant().astype(np.float64)) != 0
    centres_V = np.where(equal_V, votes.spread(means_G), centres_V)
    return Comparison(centres_V, np.ones_like(means_G), {"mean": means_G})


def compare_opmd(votes: Votes, *, tau: float) -> Comparison:
    """Subtract the log of the mean exponential: `r - tau (logsumexp(r / tau) - log n)`.

    tau is a temperature above 0: near 0 the baseline is the largest vote, for a large one the mean.

    Source: Kimi k1.5 2025, section 2.3.2, as in Trinity-RFT.
    """
    tops_G = votes.maxima()
    with np.errstate(over="ignore"):  # To -inf, whose exponential is the 0 that it should be.
        exponents_V = (votes.values - votes.spread(tops_G)) / tau
    # Means of exp(x) - 1 for exponents of at most 0, one of them 0: they lie in [1/n - 1, 0], and
    # keep their digits where tau is large and every exponential is close to 1. One at a time: a
    # vectorised exponential may differ in its last bit from the one that computes an array's tail.
    excess_V = [math.expm1(exponent) for exponent in exponents_V.tolist()]
    excess_G = votes.sums(excess_V) / np.maximum(votes.sizes, 1)
    logs_G = np.array([math.log1p(excess) for excess in excess_G.tolist()])
    baselines_G = np.where(votes.sizes < 2, 0.0, tops_G + tau * logs_G)
    moments = {"mean": _means_of_several(votes), "baseline": baselines_G}
    return Comparison(votes.spread(baselines_G), np.ones_like(baselines_G), moments)


def compare_asymre(votes: Votes, *, shift: float) -> Comparison:
    """Subtract the shifted mean of the group: `r - (mean + shift)`.

    A shift below 0 makes the average score positive.

    Source: Arnal et al. 2025 (AsymRE), as in Trinity-RFT.
    """
    means_G = _means_of_several(votes)
    shifts_G = np.where(votes.sizes < 2, 0.0, shift)
    moments = {"mean": means_G, "baseline": means_G + shifts_G}
    lifts_V = -votes.spread(shifts_G)
    return Comparison(votes.spread(means_G), np.ones_like(means_G), moments, lifts_V)


def _means_of_several(votes: Votes) -> Floats:
    """Mean of each group, shape [G]; 0 where there is nothing to compare a vote with."""
    return np.where(votes.sizes < 2, 0.0, votes.means())


def _scored_by(compare: Callable[..., Comparison], *names: str) -> Scores:
    """Score the groups of a launch by a comparison; `names` are the parameters that it takes."""

    def scores(rewards_B: Floats, batch: Batch, parameters: Any, details: GroupDetails) -> Floats:
        chosen = {name: getattr(parameters, name) for name in names}
        return _scores(rewards_B, batch, parameters, details, partial(compare, **chosen))

    return scores


def opmd_scores(
    rewards_B: Floats, batch: Batch, parameters: OpmdParameters, details: GroupDetails
) -> Floats:
    """Score the groups of a launch by `compare_opmd`, or against their mean; shape [B]."""
    by_mean = parameters.baseline == "mean"
    scores = dr_grpo_scores if by_mean else _scored_by(compare_opmd, "tau")
    return scores(rewards_B, batch, parameters, details)


def _scores(
    rewards_B: Floats,
    batch: Batch,
    parameters: RewardParameters,
    details: GroupDetails,
    compare: Compare,
) -> Floats:
    ballot, raw_B = votes_of_runs(batch, parameters), voting_rewards(batch, parameters)
    compared_B = rewards_B
    if not steps_differ(parameters):
        compared_B = rewards_B[ballot.voters][ballot.slots]
    return compare_votes(compared_B, rewards_B, ballot, details, compare=compare, raw_B=raw_B)


def compare_votes(
    compared_B: Floats,
    voting_B: Floats,
    ballot: Ballot,
    details: GroupDetails,
    *,
    compare: Compare,
    raw_B: Floats,
) -> Floats:
    """Measure each experience against the votes of its group, and record what was used.

    Args:
        compared_B: What is scored, shape [B]: the reward of the experience's run, or its own.
        voting_B: What votes, where the ballot points at it, shape [B].
        ballot: Who votes.
        details: Gets each group's `votes`, moments, `zero_variance` and `singleton`.
        compare: What the votes of a group are measured against.
        raw_B: What votes, before it was shaped: `zero_variance` is whether it is all the same.

    Returns:
        Scores, shape [B].
    """
    votes = ballot.votes(voting_B)
    comparison = compare(votes)
    record(
        details,
        votes=votes.sizes,
        **comparison.moments,
        zero_variance=zero_variance(ballot.votes(raw_B)),
        singleton=votes.sizes == 1,
    )
    divisors_V = votes.spread(comparison.divisors)
    lifts_V = np.broadcast_to(comparison.lifts, comparison.centres.shape)
    scores_B = (compared_B - comparison.centres[ballot.slots]) / divisors_V[ballot.slots]
    scores_B += lifts_V[ballot.slots]
    # Adding 0 turns -0 into 0, so that no sign tells equal scores apart.
    scores_B += 0.0
    return scores_B


def record(details: GroupDetails, **columns: NDArray[Any]) -> None:
    """Add one value per group under each name, from arrays of shape [G]."""
    for name, column in columns.items():
        for recorded, value in zip(details, column.tolist(), strict=True):
            recorded[name] = value


grpo_scores = _scored_by(compare_grpo, "eps")
dr_grpo_scores = _scored_by(compare_dr_grpo)
"""Also of `reinforce_baseline`, where what follows differs."""
rloo_scores = _scored_by(compare_rloo)
asymre_scores = _scored_by(compare_asymre, "shift")
