"""Estimators that score whole sequences against those of their batch.

Legend: B experiences, G groups, S statistics batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Floats, Ints
from experience_buffer_server.advantages.arrays.values import GroupDetails
from experience_buffer_server.advantages.plan.parameters import CpgdParameters
from experience_buffer_server.advantages.stages.reward_shaping import (
    token_reward_sums,
    voting_rewards,
)
from experience_buffer_server.advantages.stages.votes import (
    Votes,
    votes_of_runs,
    zero_variance,
)

from .group_relative import record


def cpgd_scores(
    rewards_B: Floats, batch: Batch, parameters: CpgdParameters, details: GroupDetails
) -> Floats:
    """Centre each sequence's reward on the mean of its batch: `s - mean`, weighted as configured.

    s is the sum of what a sequence's tokens get: its scalar reward, and its token-level rewards
    where these are used. `weight` is `none`, `std`: `(s - mean) / (std + eps)` with ddof 0, or
    `clip_filter`: times `filter_weights`. In the statistics a run votes once; each sequence's own s
    is scored against them, also that of a step that isn't its run's vote. Where no vote differs,
    `std` gives 0. As `group_relative.Scores`; details get each group's `batch_mean`, `batch_std`
    where it is used, and with `clip_filter` its `zero_variance` and `weight`.

    Source: LightRFT, `get_cpgd_advantages_returns` (Liu et al. 2025, CPGD) and
    `clip_filter_like_weight_func`; there the KL penalty of each token is part of s, here it isn't.
    """
    token_sums_B = token_reward_sums(batch)
    sums_B = rewards_B + token_sums_B
    ballot = votes_of_runs(batch, parameters)
    groups = ballot.votes(voting_rewards(batch, parameters) + token_sums_B)
    factors_G = np.ones(len(details))
    edges = _first_groups(batch)
    votes = Votes(sums_B[ballot.voters], ballot.offsets[edges])
    means_S = votes.means()
    means_G = np.repeat(means_S, np.diff(edges))
    record(details, batch_mean=means_G)
    if parameters.weight == "std":
        stds_G = np.repeat(votes.stds(means_S, ddof=0), np.diff(edges))
        record(details, batch_std=stds_G)
        # Without variance only a step that isn't a vote can differ from it: it isn't blown up.
        factors_G = np.where(stds_G > 0, 1.0 / (stds_G + parameters.eps), 0.0)
    elif parameters.weight == "clip_filter":
        constant_G = zero_variance(groups)
        for start, stop in itertools.pairwise(edges.tolist()):
            # An empty group counts on neither side.
            filled = np.flatnonzero(groups.sizes[start:stop]) + start
            factors_G[filled] = filter_weights(
                constant_G[filled].tolist(), max_weight=parameters.max_weight
            )
        record(details, zero_variance=constant_G, weight=factors_G)
    sizes_G = np.diff(batch.group_offsets)
    return (sums_B - np.repeat(means_G, sizes_G)) * np.repeat(factors_G, sizes_G) + 0.0


def filter_weights(constant: Sequence[bool], *, max_weight: float) -> list[float]:
    """Weigh groups up for those that say nothing: `min(G / (G - Z), max_weight)`.

    Args:
        constant: For each of G groups, whether all its rewards are the same; Z are.
        max_weight: Largest weight.

    Returns:
        One weight per group: 1 for those without variance.

    Source: LightRFT, `clip_filter_like_weight_func`.
    """
    varied = len(constant) - sum(constant)
    weight = min(len(constant) / max(varied, 1), max_weight)
    return [1.0 if flag else weight for flag in constant]


def _first_groups(batch: Batch) -> Ints:
    """First group of each of S statistics batches, and the one after the last, shape [S + 1]."""
    starts = np.flatnonzero(np.diff(batch.batches, prepend=-1))
    return np.append(starts, len(batch.batches))
