"""Learning from a teacher's log-probabilities instead of rewards."""

from __future__ import annotations

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Floats, TokenStages
from experience_buffer_server.advantages.plan.parameters import DistillationParameters

from .token_returns import TokenAdvantages


def on_policy_distill(
    stages: TokenStages, rewards_B: Floats, batch: Batch, parameters: DistillationParameters
) -> TokenAdvantages:
    """How much likelier the teacher finds each token: `c (teacher_logp - logp)`.

    Args:
        stages: The batch on its device, with both log-probabilities.
        rewards_B: Not read.
        batch: Not read.
        parameters: The coefficient c.

    Returns:
        Advantages, which are the returns.

    Source: Trinity-RFT `OnPolicyDistillAdvantage`.
    """
    del rewards_B, batch
    gaps = stages.teacher_gap(parameters.coefficient)
    return TokenAdvantages(advantages=gaps, returns=gaps)
