"""One policy update from a batch of experiences: a clipped policy gradient. No I/O.

Shapes: B experiences, P prompt tokens (padded), R response tokens (padded), V digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from examples.demo import task
from examples.demo.model import Policy
from experience_buffer.collate import (
    gather_action_masks,
    gather_response_attrs,
    gather_token_ids,
)
from experience_buffer.experience import Experience

LEARNING_RATE = 2e-3
FINAL_LEARNING_RATE_RATIO = 0.1
NUM_WARMUP_UPDATES = 10
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""A wider upper bound leaves room for digits that the policy still finds unlikely."""
ENTROPY_WEIGHT = 0.01
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Experiences as tensors."""

    tokens_BS: Tensor
    """Prompt and response, int64."""
    behaviour_logprobs_BR: Tensor
    """Under the policy that sampled."""
    advantages_BR: Tensor
    """As the server computed them."""
    mask_BR: Tensor
    """1 where there is a response token, float32."""


def collate(experiences: list[Experience]) -> TrainingBatch:
    """Pad experiences to one batch.

    Raises:
        ValueError: An experience lacks its log-probabilities or its advantages.
    """
    tokens_BS = gather_token_ids(experiences, task.PROMPT_LENGTH, task.MAX_LENGTH, task.PADDING)
    return TrainingBatch(
        tokens_BS=tokens_BS.long(),
        behaviour_logprobs_BR=gather_response_attrs(experiences, "logprobs", task.MAX_LENGTH),
        advantages_BR=gather_response_attrs(experiences, "advantages", task.MAX_LENGTH),
        mask_BR=gather_action_masks(experiences, task.MAX_LENGTH).float(),
    )


class Learner:
    """Holds the policy that is trained and its optimizer. Not to be shared between threads."""

    def __init__(self, *, num_updates: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.policy = Policy()
        self._optimizer = torch.optim.Adam(self.policy.parameters(), betas=(0.9, 0.95))
        self._num_updates = num_updates
        self._num_done = 0

    def update(self, batch: TrainingBatch) -> float:
        """Take one step towards what had a positive advantage.

        Returns:
            The policy's mean entropy over the response tokens, in nats.

        Source: Schulman et al. 2017, eq. 7, per token, with the bounds of DAPO (Yu et al. 2025).
        """
        response_BR = batch.tokens_BS[:, task.PROMPT_LENGTH :]
        # The last token has nothing to predict; the one before the response predicts its first.
        logits_BSV, _ = self.policy(batch.tokens_BS[:, :-1])
        logprobs_BRV = functional.log_softmax(logits_BSV[:, task.PROMPT_LENGTH - 1 :], dim=-1)
        chosen_BR1 = response_BR.clamp(max=task.NUM_DIGITS - 1).unsqueeze(-1)
        ratio_BR = (logprobs_BRV.gather(2, chosen_BR1)[..., 0] - batch.behaviour_logprobs_BR).exp()
        clipped_BR = ratio_BR.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        gain_BR = torch.minimum(ratio_BR * batch.advantages_BR, clipped_BR * batch.advantages_BR)
        entropy_BR = -(logprobs_BRV.exp() * logprobs_BRV).sum(-1)
        num_tokens = batch.mask_BR.sum()
        entropy = (entropy_BR * batch.mask_BR).sum() / num_tokens
        loss = -(gain_BR * batch.mask_BR).sum() / num_tokens - ENTROPY_WEIGHT * entropy

        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self._learning_rate()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        self._num_done += 1
        return float(entropy.detach())

    def _learning_rate(self) -> float:
        """Rise over the first updates, then fall in a straight line."""
        rise = min(1.0, (self._num_done + 1) / NUM_WARMUP_UPDATES)
        fall = 1.0 - (1.0 - FINAL_LEARNING_RATE_RATIO) * self._num_done / self._num_updates
        return LEARNING_RATE * rise * fall
