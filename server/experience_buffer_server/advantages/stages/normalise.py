"""Stages that centre and scale: rewards within groups or a batch, advantages over their tokens.

A statistic is taken over a unit: the votes, or the valid tokens, of one group or of one statistics
batch. What is subtracted and divided by is one number per experience, so that rewards and tokens
share the arithmetic; sums over tokens come from the device, everything else happens on the host.
Sums of an experience are combined with `math.fsum`, so the order of the members changes no bit, and
a mean is taken twice, the second time around the first, so that equal numbers give exactly 0.

Each returns what it was given if nothing is configured, and records in the details of each group what
it used. Legend: B experiences, G groups, U units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Floats, Tokens, TokenStages
from experience_buffer_server.advantages.arrays.values import GroupDetails
from experience_buffer_server.advantages.plan.parameters import (
    AdvantageParameters,
    RewardParameters,
)

from .unit_statistics import (
    Numbers,
    bounds_of,
    fsums,
    lone_runs,
    means,
    per_group,
    per_unit,
    spread,
    valid_tokens,
    votes,
)
from .votes import votes_of_runs

_LEAST_VARIANCE = 1e-8


class _Levels(NamedTuple):
    """What is subtracted and what divided by: `none`, or statistics of `group` or `batch`."""

    mean: str
    std: str
    leave_one_out: bool
    ddof: int
    eps: float

    @classmethod
    def of(cls, parameters: AdvantageParameters, stage: str) -> _Levels | None:
        """Those of a stage, `reward` or `advantage`; None: nothing is done."""
        found = cls(*(getattr(parameters, f"{stage}_norm_{name}") for name in cls._fields))
        return None if found.mean == found.std == "none" else found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Affine:
    """`(x - shift) * factor * inverse` per experience, and the moments behind it per group."""

    shifts_B: Floats
    factors_B: Floats
    """What leaving a number out of its own mean multiplies its distance to the mean by, or 1."""
    inverses_B: Floats
    """One over what is divided by."""
    means_G: Floats | None
    stds_G: Floats | None


def normalise_rewards(
    rewards_B: Floats, batch: Batch, parameters: RewardParameters, details: GroupDetails
) -> Floats:
    """Centre and scale rewards by the moments of their group or of the batch.

    Each run votes once; where token-level rewards are used instead of the scalar, there is no vote
    and nothing changes. The standard deviation is taken around what is subtracted. A run alone in
    its group counts as having a standard deviation of 1 (unless ddof is 0) and, left out of its own
    mean, a mean of 0. Rewards are of shape [B], parameters are `reward_norm_*`, and details get
    `reward_norm_mean` and `reward_norm_std`.

    Source: AReaL `Normalization`; Shao et al. 2024 (levels group, group), Liu et al. 2025
    (Dr. GRPO: levels group, none).
    """
    levels = _Levels.of(parameters, "reward")
    if levels is None:
        return rewards_B
    # One that overflowed fails its own group later; it must not reach its neighbours'.
    used_B = np.isfinite(rewards_B) & ~batch.has_token_rewards
    ballot = votes_of_runs(batch, parameters)
    counts_B = np.zeros(len(rewards_B), dtype=np.int64)
    counts_B[ballot.voters] = 1
    kept_B = np.where(used_B, rewards_B, 0.0)
    affine = _affine(votes(kept_B, counts_B * used_B), batch, levels)
    _record(details, "reward_norm", means_G=affine.means_G, stds_G=affine.stds_G)
    # A step with a reward of its own is compared with what its run's vote is compared with.
    votes_B = kept_B[ballot.voters][ballot.slots]
    gaps_B = (kept_B - votes_B) + (votes_B - affine.shifts_B) * affine.factors_B
    return np.where(used_B, gaps_B * affine.inverses_B, rewards_B)


def normalise_advantages(
    stages: TokenStages,
    tokens: Tokens,
    batch: Batch,
    parameters: AdvantageParameters,
    details: GroupDetails,
) -> Tokens:
    """Whiten advantages by the moments of the valid tokens of their group or of the batch.

    `(A - mean) / (std + eps)`. A token left out of its own mean is compared with
    `(S - A) / (n - 1)`, which is affine in A too. Units of one token, and groups of one run, are
    treated as by `normalise_rewards`. Parameters are `advantage_norm_*`, and details get
    `advantage_mean` and `advantage_std`.

    Source: AReaL `Normalization`; LightRFT `AdvantageCalculator` (`advantages_norm`).
    """
    levels = _Levels.of(parameters, "advantage")
    if levels is None:
        return tokens
    affine = _affine(valid_tokens(stages, tokens, batch.num_valid), batch, levels)
    _record(details, "advantage", means_G=affine.means_G, stds_G=affine.stds_G)
    scales_B = affine.factors_B * affine.inverses_B
    return stages.affine(tokens, shifts_B=affine.shifts_B, scales_B=scales_B)


def clip_advantages(
    stages: TokenStages,
    tokens: Tokens,
    batch: Batch,
    parameters: AdvantageParameters,
    details: GroupDetails,
) -> Tokens:
    """Clamp advantages to [-c, c], where c is `advantage_clip`; 0: nothing is clamped.

    Details get `advantage_clip_fraction`: of a group's valid tokens, those that lay strictly outside
    before; 0 where there are none.
    """
    if not parameters.advantage_clip:
        return tokens
    clipped, outside_B = stages.clip(tokens, parameters.advantage_clip)
    outside_G = per_unit(outside_B, batch.group_offsets)
    valid_G = per_unit(batch.num_valid, batch.group_offsets)
    for detail, outside, valid in zip(details, outside_G.tolist(), valid_G.tolist(), strict=True):
        detail["advantage_clip_fraction"] = outside / valid if valid else 0.0
    return clipped


def normalise_across_batch(
    stages: TokenStages,
    tokens: Tokens,
    batch: Batch,
    parameters: AdvantageParameters,
    details: GroupDetails,
) -> Tokens:
    """Centre advantages over the tokens of their statistics batch, and scale them if configured.

    ddof is 0 and the variance at least 1e-8. `cross_batch` is `none`, `mean` (only centre) or
    `mean_std`, and details get `cross_batch_mean` and `cross_batch_std`.

    Source: LightRFT `normalize_advantages_cross_batch`.
    """
    if parameters.cross_batch == "none":
        return tokens
    numbers = valid_tokens(stages, tokens, batch.num_valid)
    bounds = bounds_of(batch, "batch")
    means_U = means(numbers, bounds)
    shifts_B = spread(means_U, bounds)
    inverses_B, stds_G = np.ones_like(shifts_B), None
    if parameters.cross_batch == "mean_std":
        squares_U = fsums(numbers.square_sums(shifts_B), bounds)
        variances_U = squares_U / np.maximum(per_unit(batch.num_valid, bounds), 1)
        stds_U = np.sqrt(np.maximum(variances_U, _LEAST_VARIANCE))
        inverses_B, stds_G = spread(1.0 / stds_U, bounds), per_group(stds_U, batch, "batch")
    _record(details, "cross_batch", means_G=per_group(means_U, batch, "batch"), stds_G=stds_G)
    return stages.affine(tokens, shifts_B=shifts_B, scales_B=inverses_B)


def _affine(numbers: Numbers, batch: Batch, levels: _Levels) -> _Affine:
    shifts_B = np.zeros(len(numbers.counts_B))
    factors_B, means_G, stds_G = np.ones_like(shifts_B), None, None
    if levels.mean != "none":
        bounds = bounds_of(batch, levels.mean)
        means_U = means(numbers, bounds)
        means_G = per_group(means_U, batch, levels.mean)
        counts_U = per_unit(numbers.counts_B, bounds)
        if levels.leave_one_out:
            # x - (S - x) / (n - 1) = (x - S / n) * n / (n - 1); alone, the mean of the others is 0.
            alone_U = (counts_U < 2) | lone_runs(batch, levels.mean)
            means_U = np.where(alone_U, 0.0, means_U)
            factors_U = np.where(alone_U, 1.0, counts_U / np.maximum(counts_U - 1, 1))
            factors_B = spread(factors_U, bounds)
        shifts_B = spread(means_U, bounds)
    inverses_B = np.ones_like(shifts_B)
    if levels.std != "none":
        bounds = bounds_of(batch, levels.std)
        # Around what is subtracted, so that deviations are the numbers that get scaled.
        squares_U = fsums(factors_B**2 * numbers.square_sums(shifts_B), bounds)
        divisors_U = per_unit(numbers.counts_B, bounds) - levels.ddof
        alone_U = (divisors_U < 1) | ((levels.ddof > 0) & lone_runs(batch, levels.std))
        stds_U = np.where(alone_U, 1.0, np.sqrt(squares_U / np.maximum(divisors_U, 1)))
        stds_G = per_group(stds_U, batch, levels.std)
        inverses_B = spread(1.0 / (stds_U + levels.eps), bounds)
    return _Affine(
        shifts_B=shifts_B,
        factors_B=factors_B,
        inverses_B=inverses_B,
        means_G=means_G,
        stds_G=stds_G,
    )


def _record(
    details: GroupDetails, prefix: str, *, means_G: Floats | None, stds_G: Floats | None
) -> None:
    """Add the moments to each group's details, as `PREFIX_mean` and `PREFIX_std`."""
    for name, moments_G in (("mean", means_G), ("std", stds_G)):
        if moments_G is not None:
            for detail, moment in zip(details, moments_G.tolist(), strict=True):
                detail[f"{prefix}_{name}"] = moment
