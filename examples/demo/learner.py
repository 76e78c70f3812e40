"""One policy update from a batch of experiences: a clipped policy gradient. No I/O.

Shapes: B experiences, P prompt tokens (padded), R response tokens (padded), S = P + R, V digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from examples.demo import task
from examples.demo.model import Policy
from experience_buffer.packed import PackedBatch

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


def collate(batch: PackedBatch) -> TrainingBatch:
    """Pad experiences to one batch.

    Raises:
        ValueError: An experience lacks its log-probabilities or its advantages.
    """
    padded = batch.padded(
        pad_token_id=task.PADDING,
        max_prompt_length=task.PROMPT_LENGTH,
        max_response_length=task.MAX_LENGTH,
        fields=("logprobs", "advantages", "action_mask"),
    )
    return TrainingBatch(
        tokens_BS=padded["input_ids"].long(),
        behaviour_logprobs_BR=padded["logprobs"],
        advantages_BR=padded["advantages"],
        mask_BR=padded["action_mask"].float(),
    )


class Learner:
    """Holds the policy that is trained and its optimizer. Not to be shared between threads.

    The learners of all ranks begin alike and take the same steps, so they stay alike.
    """

    def __init__(self, *, num_updates: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.policy = Policy()
        self._optimizer = torch.optim.Adam(self.policy.parameters(), betas=(0.9, 0.95))
        self._num_updates = num_updates
        self._num_done = 0

    def update(self, batch: TrainingBatch, *, add_up: Callable[[Tensor], None]) -> None:
        """Take one step towards what had a positive advantage in the batches of all ranks.

        Args:
            batch: This rank's part.
            add_up: Replaces a tensor by the sum of all ranks'.
        """
        self._optimizer.zero_grad()
        _summed_loss(self.policy, batch).backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        # One message: the sums over this rank's tokens, and at the end how many these are.
        sums = torch.cat([*(g.flatten() for g in gradients), batch.mask_BR.sum().reshape(1)])
        add_up(sums)
        mean, sizes = sums[:-1] / sums[-1], [gradient.numel() for gradient in gradients]
        for gradient, part in zip(gradients, torch.split(mean, sizes), strict=True):
            gradient.copy_(part.view_as(gradient))
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRADIENT_NORM)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self._learning_rate()
        self._optimizer.step()
        self._num_done += 1

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold for `load_state_dict`."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "num_done": self._num_done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.policy.load_state_dict(state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._num_done = state["num_done"]

    def _learning_rate(self) -> float:
        """Rise over the first updates, then fall in a straight line."""
        rise = min(1.0, (self._num_done + 1) / NUM_WARMUP_UPDATES)
        fall = 1.0 - (1.0 - FINAL_LEARNING_RATE_RATIO) * self._num_done / self._num_updates
        return LEARNING_RATE * rise * fall


def _summed_loss(policy: Policy, batch: TrainingBatch) -> Tensor:
    """The loss, summed over the response tokens: ranks have different numbers of them.

    Source: Schulman et al. 2017, eq. 7, per token, with the bounds of DAPO (Yu et al. 2025).
    """
    response_BR = batch.tokens_BS[:, task.PROMPT_LENGTH :]
    # The last token has nothing to predict; the one before the response predicts its first.
    logits_BSV, _ = policy(batch.tokens_BS[:, :-1])
    logprobs_BRV = functional.log_softmax(logits_BSV[:, task.PROMPT_LENGTH - 1 :], dim=-1)
    chosen_BR1 = response_BR.clamp(max=task.NUM_DIGITS - 1).unsqueeze(-1)
    ratio_BR = (logprobs_BRV.gather(2, chosen_BR1)[..., 0] - batch.behaviour_logprobs_BR).exp()
    clipped_BR = ratio_BR.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    gain_BR = torch.minimum(ratio_BR * batch.advantages_BR, clipped_BR * batch.advantages_BR)
    entropy_BR = -(logprobs_BRV.exp() * logprobs_BRV).sum(-1)
    return -((gain_BR + ENTROPY_WEIGHT * entropy_BR) * batch.mask_BR).sum()
