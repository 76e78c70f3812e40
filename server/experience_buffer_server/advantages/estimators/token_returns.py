"""Estimators' last step: from one reward per experience to advantages and returns per token.

Each takes the batch on its device; what goes on the last valid token of each experience, shape [B];
the batch; and the estimator's parameters, of which those that return rewards read discount, mask
mode and KL. The recursions themselves are each device's (`token_types.py`). Legend: B experiences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import (
    Floats,
    KlTerm,
    Tokens,
    TokenStages,
)
from experience_buffer_server.advantages.plan.parameters import (
    CpgdParameters,
    DistillationParameters,
    GaeParameters,
    ReinforceParameters,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAdvantages:
    """What an estimator computed for the tokens of a batch."""

    advantages: Tokens
    returns: Tokens
    """The same object where they are the advantages."""


def reinforce(
    stages: TokenStages, rewards_B: Floats, batch: Batch, parameters: ReinforceParameters
) -> TokenAdvantages:
    """Discounted sum of the rewards from each token on: `R_t = r_t + gamma R_{t+1}`.

    The returns are the advantages.

    Source: Williams 1992; LightRFT `get_cumulative_returns` for mask mode `count`.
    """
    returns = _returns(stages, rewards_B, parameters)
    return TokenAdvantages(advantages=returns, returns=returns)


def remax(
    stages: TokenStages, rewards_B: Floats, batch: Batch, parameters: ReinforceParameters
) -> TokenAdvantages:
    """Returns minus the reward of the greedy response to the same prompt.

    What is subtracted are the batch's baseline rewards as they were pushed; returns come without.

    Source: Li et al. 2024, algorithm 1; Trinity-RFT `REMAXAdvantageFn`.
    """
    returns = _returns(stages, rewards_B, parameters)
    advantages = stages.affine(
        returns, shifts_B=batch.baselines, scales_B=np.ones_like(batch.baselines)
    )
    return TokenAdvantages(advantages=advantages, returns=returns)


def gae(
    stages: TokenStages, rewards_B: Floats, batch: Batch, parameters: GaeParameters
) -> TokenAdvantages:
    """Generalised advantage estimation, by the batch's values.

    `delta_t = r_t + gamma v_{t+1} - v_t`, `A_t = delta_t + gamma lam A_{t+1}`, `R = A + v`. After
    the last valid token v is the bootstrap value and A is 0.

    Source: Schulman et al. 2016, eq. 16; LightRFT (mask mode `count`), AReaL (`skip`).
    """
    rewards = stages.rewards(rewards_B, _kl_term(parameters))
    advantages, returns = stages.gae(
        rewards, gamma=parameters.gamma, lam=parameters.lam, mask_mode=parameters.mask_mode
    )
    return TokenAdvantages(advantages=advantages, returns=returns)


def cpgd(
    stages: TokenStages, rewards_B: Floats, batch: Batch, parameters: CpgdParameters
) -> TokenAdvantages:
    """Every token its sequence's score, which is its return, too.

    Token-level rewards are in the scores already (`sequence_scores.py`). A KL term is not: the
    estimator has none.

    Source: Liu et al. 2025 (CPGD); LightRFT `CPGDCalculator`.
    """
    spread = stages.spread(rewards_B)
    return TokenAdvantages(advantages=spread, returns=spread)


def on_policy_distill(
    stages: TokenStages, rewards_B: Floats, batch: Batch, parameters: DistillationParameters
) -> TokenAdvantages:
    """How much likelier a teacher finds each token: `c (teacher_logp - logp)`, instead of rewards.

    The advantages are the returns.

    Source: Trinity-RFT `OnPolicyDistillAdvantage`.
    """
    gaps = stages.teacher_gap(parameters.coefficient)
    return TokenAdvantages(advantages=gaps, returns=gaps)


def _returns(stages: TokenStages, rewards_B: Floats, parameters: ReinforceParameters) -> Tokens:
    rewards = stages.rewards(rewards_B, _kl_term(parameters))
    return stages.returns(rewards, gamma=parameters.gamma, mask_mode=parameters.mask_mode)


def _kl_term(parameters: ReinforceParameters) -> KlTerm | None:
    if not parameters.kl_coef:
        return None
    return KlTerm(
        coefficient=parameters.kl_coef,
        estimator=parameters.kl_estimator,
        clip=parameters.kl_clip,
    )
