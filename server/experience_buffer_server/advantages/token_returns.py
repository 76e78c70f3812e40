"""Estimators that run over an experience's tokens: returns and generalised advantages.

Legend: B experiences, N packed tokens. All arithmetic is float64.

Packed tokens are the valid ones. Between two of them lie `distance - 1` masked tokens. In mode
`skip` these aren't steps. In mode `count` each is a step with reward and value 0, and the
recursions below have gone through them in closed form. Masked tokens after the last valid one are
padding in both modes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .packed import PackedBatch
from .scan import reverse_scan
from .specs import GaeParameters, ReinforceParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAdvantages:
    """What an estimator computed for the packed tokens of a batch."""

    advantages: Tensor
    """Shape [N], float64."""
    returns: Tensor
    """Shape [N], float64; the same object where they are the advantages."""


def reinforce(batch: PackedBatch, parameters: ReinforceParameters) -> TokenAdvantages:
    """Discounted sum of the rewards from each token on: `R_t = r_t + gamma R_{t+1}`.

    In mode `count`, `R_i = r_i + gamma^d R_j` for the next valid token j at distance d.

    Args:
        batch: Packed experiences; `rewards` goes on the last valid token of each.
        parameters: Discount and mask mode.

    Returns:
        Returns, which are the advantages.

    Source: Williams 1992; LightRFT `get_cumulative_returns` for mode `count`.
    """
    factors_N = _powers(parameters.gamma, batch, parameters.mask_mode)
    returns_N = reverse_scan(place_rewards(batch), factors_N=factors_N, offsets=batch.offsets)
    return TokenAdvantages(advantages=returns_N, returns=returns_N)


def gae(batch: PackedBatch, parameters: GaeParameters) -> TokenAdvantages:
    """Generalised advantage estimation.

    `delta_t = r_t + gamma v_{t+1} - v_t`, `A_t = delta_t + gamma lam A_{t+1}`, `R = A + v`. After
    the last valid token v is the bootstrap value and A is 0. In mode `count`, for the next valid
    token j at distance d: `A_i = r_i - v_i + gamma (gamma lam)^(d-1) v_j + (gamma lam)^d A_j`.

    Args:
        batch: Packed experiences with values.
        parameters: Discount, lambda and mask mode.

    Returns:
        Advantages and returns.

    Source: Schulman et al. 2016, eq. 16; LightRFT (mode `count`), AReaL (mode `skip`).
    """
    values_N = batch.values
    assert values_N is not None
    gamma, decay = parameters.gamma, parameters.gamma * parameters.lam
    is_last_N = batch.distances == 0
    next_values_N = torch.where(is_last_N, batch.per_token(batch.bootstraps), values_N.roll(-1))
    if parameters.mask_mode == "count":
        # (gamma lam)^(d-1), where the last token counts as being next to the bootstrap value.
        reach_N = _power_table(decay, batch)[(batch.distances - 1).clamp_min(0)]
        next_values_N = next_values_N * reach_N
    deltas_N = place_rewards(batch) + gamma * next_values_N - values_N
    factors_N = _powers(decay, batch, parameters.mask_mode)
    advantages_N = reverse_scan(deltas_N, factors_N=factors_N, offsets=batch.offsets)
    return TokenAdvantages(advantages=advantages_N, returns=advantages_N + values_N + 0.0)


def place_rewards(batch: PackedBatch) -> Tensor:
    """Rewards per token, shape [N]: the token-level ones, or the scalar on the last valid token."""
    is_last_N = batch.distances == 0
    placed_N = torch.where(is_last_N, batch.per_token(batch.rewards), 0.0)
    return placed_N if batch.token_rewards is None else placed_N + batch.token_rewards


def _powers(base: float, batch: PackedBatch, mask_mode: str) -> Tensor:
    """Factor to the next valid token, shape [N]; 0 at each experience's last."""
    if mask_mode == "skip":
        return (batch.distances != 0).double() * base
    powers = _power_table(base, batch)
    powers[0] = 0.0
    return powers[batch.distances]


def _power_table(base: float, batch: PackedBatch) -> Tensor:
    """Powers 0 to the batch's largest distance.

    A table, because a vectorised power may differ in its last bit from the one that computes a
    tensor's tail, and results would depend on positions.
    """
    powers = [base**exponent for exponent in range(batch.max_distance + 1)]
    return torch.tensor(powers, dtype=torch.float64, device=batch.distances.device)
