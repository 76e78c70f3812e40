"""Stages over scalar rewards before and after they are compared: turns, length, clip.

Pure functions from rewards of shape [B] to new ones; float64 on the host. Legend: B experiences.
"""

from __future__ import annotations

import numpy as np

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Floats, Ints
from experience_buffer_server.advantages.arrays.values import GroupDetails
from experience_buffer_server.advantages.plan.parameters import RewardParameters


def turn_rewards(rewards_B: Floats, batch: Batch, parameters: RewardParameters) -> Floats:
    """Shift and scale rewards, and discount them over turns.

    `r = (r - bias) * scale`, or `(r + bias) * scale`; then, as configured, nothing,
    `R_k = r_k + d R_{k+1}` over the steps of a run, or `r d^(turns - 1)` for a run that is one
    concatenated sequence.

    An experience whose token-level reward is used has no scalar to shift or scale. Over the steps
    of its run, the sum of its token-level rewards counts in the returns of the steps before it, and
    the scalar that comes out is what is to be added to its own: `d R_{k+1}`.

    Source: AReaL, `MathMultiTurnAgent` (bias subtracted), `InteractionCache` and
    `MultiTurnWorkflow`.
    """
    sign = -1.0 if parameters.reward_bias_sign == "subtract" else 1.0
    scaled_B = (rewards_B + sign * parameters.reward_bias) * parameters.reward_scale
    scaled_B = np.where(batch.has_token_rewards, rewards_B, scaled_B)
    if parameters.turn_rewards == "concatenated":
        return np.where(
            batch.has_token_rewards,
            scaled_B,
            scaled_B * _powers(parameters.turn_discount, batch.num_turns - 1),
        )
    if parameters.turn_rewards == "none":
        return scaled_B
    token_sums_B = token_reward_sums(batch)
    returns_B = discounted_returns(
        scaled_B + token_sums_B, batch.next_steps, discount=parameters.turn_discount
    )
    following_B = np.where(batch.next_steps >= 0, returns_B[batch.next_steps], 0.0)
    return scaled_B + parameters.turn_discount * following_B


def voting_rewards(batch: Batch, parameters: RewardParameters) -> Floats:
    """What votes before it is shaped, shape [B]: whether it is all the same says `zero_variance`.

    Where returns over steps vote, no single raw reward stands for one: they are taken as they are.
    """
    if parameters.turn_rewards == "steps":
        return turn_rewards(batch.rewards, batch, parameters)
    return batch.rewards


def _powers(base: float, exponents_B: Ints) -> Floats:
    # One power per exponent: a vectorised one may differ in its last bit from the one that
    # computes an array's tail, and results would depend on positions.
    exponents, inverse_B = np.unique(exponents_B, return_inverse=True)
    powers = [base**exponent for exponent in exponents.tolist()]
    return np.array(powers, dtype=np.float64)[inverse_B]


def discounted_returns(rewards_B: Floats, next_steps_B: Ints, *, discount: float) -> Floats:
    """Discounted sum of the rewards from each step of a run on: `R_k = r_k + d R_{k+1}`.

    `next_steps_B` has the index of the next step of the run, -1 at its last.
    """
    if not np.any(next_steps_B >= 0):
        return rewards_B.copy()
    rewards, following = rewards_B.tolist(), next_steps_B.tolist()
    returns: list[float | None] = [None] * len(rewards)
    for start in range(len(rewards)):
        path, at = [], start
        # Steps come in any order: walk on to a step that is known already, or past the last.
        while at >= 0 and returns[at] is None:
            path.append(at)
            at = following[at]
        later = (returns[at] or 0.0) if at >= 0 else 0.0
        for step in reversed(path):
            later = rewards[step] + discount * later
            returns[step] = later
    return np.array(returns, dtype=np.float64)


def token_reward_sums(batch: Batch) -> Floats:
    """Sum of each experience's token-level rewards over its valid tokens, first to last, shape [B].

    0 where the scalar reward is used; the column is needed only where any experience has one.
    """
    sums_B = np.zeros(len(batch.has_token_rewards))
    for index in np.flatnonzero(batch.has_token_rewards).tolist():
        tokens = slice(batch.offsets[index], batch.offsets[index + 1])
        # Masked slots may hold anything: they are left out, not multiplied by zero.
        valid = batch.columns["token_level_reward"][tokens][batch.mask[tokens] != 0]
        if valid.size:
            sums_B[index] = np.cumsum(valid, dtype=np.float64)[-1]
    return sums_B


def overlong_penalty(rewards_B: Floats, batch: Batch, parameters: RewardParameters) -> Floats:
    """Take off up to f for each `overlong_buffer` tokens that a response is too long.

    `r + min(-(L - (Lmax - Lbuf)) / Lbuf * f, 0)` for a response of L valid tokens. There is no
    lower bound: a response beyond the limit loses more than f. An experience whose token-level
    reward is used has no scalar to take it off, and stays. f is `overlong_penalty` (0: none), Lbuf
    `overlong_buffer` and Lmax `max_response_tokens`.

    Source: Yu et al. 2025 (DAPO), section 3.4, as in LightRFT and AReaL.
    """
    if parameters.overlong_penalty == 0:
        return rewards_B
    allowed = parameters.max_response_tokens - parameters.overlong_buffer
    excess_B = (batch.num_valid - allowed) / parameters.overlong_buffer
    penalised_B = rewards_B - np.maximum(excess_B * parameters.overlong_penalty, 0.0)
    return np.where(batch.has_token_rewards, rewards_B, penalised_B)


def clip_rewards(
    rewards_B: Floats, batch: Batch, parameters: RewardParameters, details: GroupDetails
) -> Floats:
    """Clamp rewards to [-c, c], where c is `reward_clip` (0: not).

    A scalar that isn't used because there are token-level rewards stays, and doesn't count. Details
    get each group's `reward_clip_fraction`.
    """
    bound = parameters.reward_clip
    if bound == 0:
        return rewards_B
    used_B = ~batch.has_token_rewards
    offsets = batch.group_offsets.tolist()
    for recorded, start, stop in zip(details, offsets[:-1], offsets[1:], strict=True):
        recorded["reward_clip_fraction"] = clip_fraction(
            rewards_B[start:stop][used_B[start:stop]], minimum=-bound, maximum=bound
        )
    return np.where(used_B, np.clip(rewards_B, -bound, bound), rewards_B)


def clip_fraction(values: Floats, *, minimum: float, maximum: float) -> float:
    """Share of the values that lie outside [minimum, maximum]; 0 of none, and NaN lies nowhere."""
    if values.size == 0:
        return 0.0
    return int(np.count_nonzero((values < minimum) | (values > maximum))) / values.size
