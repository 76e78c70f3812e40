"""Estimators that compare a reward with those of the other members of its group.

Statistics are taken over B scalars on the host: float32 rewards, summed in float64 with
`math.fsum`, whose sum is correctly rounded. So equal rewards give exactly 0, and neither the order
of the members nor the neighbours in the launch change a bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from .packed import PackedBatch
from .specs import GrpoParameters, RlooParameters
from .token_returns import TokenAdvantages, reinforce


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a group's votes became."""

    scores: tuple[float, ...]
    """One per vote, in the order of the votes."""
    moments: dict[str, float] = field(default_factory=dict)
    """`mean`, and `std` where it was used: what was subtracted and divided by."""


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """A batch whose rewards were replaced by scores."""

    batch: PackedBatch
    """The batch; `rewards` holds the score of each experience's run."""
    details: list[dict[str, float | int | str | bool]]
    """Per group: `votes`, `mean`, `std`, `zero_variance`, `singleton`."""


def score_grpo(votes: Sequence[float], *, eps: float) -> Scores:
    """Standardise each vote within its group: `(r - mean) / (std + eps)`, ddof 1.

    Args:
        votes: Rewards, one per run, finite.
        eps: Added to the standard deviation, above 0.

    Returns:
        Scores; a single vote r gives `r / (1 + eps)`, as if mean were 0 and std 1.

    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.1; eps as in Trinity-RFT.
    """
    if len(votes) == 1:
        mean, std = 0.0, 1.0
    elif min(votes, default=0.0) == max(votes, default=0.0):
        mean, std = (votes[0] if votes else 0.0), 0.0
    else:
        mean = math.fsum(votes) / len(votes)
        variance = math.fsum((vote - mean) ** 2 for vote in votes) / (len(votes) - 1)
        std = math.sqrt(variance)
    return Scores(
        scores=tuple((vote - mean) / (std + eps) for vote in votes),
        moments={"mean": mean, "std": std},
    )


def score_rloo(votes: Sequence[float]) -> Scores:
    """Subtract from each vote the mean of the others: `r_i - (sum(r) - r_i) / (n - 1)`.

    Args:
        votes: Rewards, one per run, finite.

    Returns:
        Scores; a single vote r gives r. The recorded mean is that of all votes, 0 for a single one.

    Source: Ahmadian et al. 2024, section 3.2; Kool et al. 2019.
    """
    if len(votes) < 2:
        return Scores(scores=tuple(votes), moments={"mean": 0.0})
    if min(votes) == max(votes):
        return Scores(scores=(0.0,) * len(votes), moments={"mean": votes[0]})
    total = math.fsum(votes)
    return Scores(
        scores=tuple(vote - (total - vote) / (len(votes) - 1) for vote in votes),
        moments={"mean": total / len(votes)},
    )


def grpo_scores(batch: PackedBatch, parameters: GrpoParameters) -> ScoredBatch:
    """Score the groups of a batch by `score_grpo`."""
    return _score(batch, lambda votes: score_grpo(votes, eps=parameters.eps))


def rloo_scores(batch: PackedBatch, parameters: RlooParameters) -> ScoredBatch:
    """Score the groups of a batch by `score_rloo`."""
    del parameters  # They are the token stage's.
    return _score(batch, score_rloo)


def grpo_tokens(batch: PackedBatch, parameters: GrpoParameters) -> TokenAdvantages:
    """Give each valid token its experience's score, as advantage and as return."""
    del parameters  # They are the scores'.
    advantages_N = batch.per_token(batch.rewards)
    return TokenAdvantages(advantages=advantages_N, returns=advantages_N)


def rloo_tokens(batch: PackedBatch, parameters: RlooParameters) -> TokenAdvantages:
    """Place each score on its experience's last valid token and take returns."""
    return reinforce(batch, parameters)


def _score(batch: PackedBatch, score: Callable[[Sequence[float]], Scores]) -> ScoredBatch:
    rewards = batch.rewards.tolist()
    scored = [0.0] * len(rewards)
    details: list[dict[str, float | int | str | bool]] = []
    for start, stop in itertools.pairwise(batch.group_offsets):
        voters = sorted(set(batch.voters[start:stop]))
        votes = [rewards[voter] for voter in voters]
        result = score(votes)
        by_voter = dict(zip(voters, result.scores, strict=True))
        for row in range(start, stop):
            scored[row] = by_voter[batch.voters[row]]
        details.append(
            {
                "votes": len(votes),
                **result.moments,
                "zero_variance": len(votes) > 1 and min(votes) == max(votes),
                "singleton": len(votes) == 1,
            }
        )
    shaped = replace(batch, rewards=torch.tensor(scored, dtype=torch.float64))
    return ScoredBatch(shaped, details)
