"""Which functions compute which estimator.

To add an estimator: its parameters and entry in `specs.py`, its functions in the module of its
family (or a new one), its line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .group_relative import ScoredBatch, grpo_scores, grpo_tokens, rloo_scores, rloo_tokens
from .packed import PackedBatch
from .token_returns import TokenAdvantages, gae, reinforce


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """An estimator's two stages; `Any` is the parameter class that its spec names."""

    scores: Callable[[PackedBatch, Any], ScoredBatch] | None = None
    """Turns rewards into scores by group statistics, on the host; None: rewards stay."""
    tokens: Callable[[PackedBatch, Any], TokenAdvantages]
    """Turns rewards, or scores, into advantages and returns per token, on the device."""


REGISTRY: Mapping[str, Estimator] = {
    "grpo": Estimator(scores=grpo_scores, tokens=grpo_tokens),
    "rloo": Estimator(scores=rloo_scores, tokens=rloo_tokens),
    "reinforce": Estimator(tokens=reinforce),
    "gae": Estimator(tokens=gae),
}
"""By the name in the estimator's spec."""
