"""Which functions compute which estimator.

To add an estimator: its parameters in `parameters.py`, its entry in `specs.py`, its functions in
the module of its family (or a new one), its line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Floats, TokenStages

from . import episodes, group_relative, sequence_scores, token_returns
from .group_relative import Scores
from .token_returns import TokenAdvantages

TokenStep = Callable[[TokenStages, Floats, Batch, Any], TokenAdvantages]
"""From what is placed on the tokens, shape [B], to advantages and returns per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """The functions of one estimator; the last argument but the details is its parameters."""

    scores: Scores | None = None
    """Group shaping; None where rewards aren't compared before they are placed on tokens."""
    tokens: TokenStep = token_returns.reinforce
    """The step over tokens."""


_GRPO = Estimator(scores=group_relative.grpo_scores)
_REINFORCE = Estimator()

REGISTRY: Mapping[str, Estimator] = {
    "grpo": _GRPO,
    "group_norm": _GRPO,
    "dr_grpo": Estimator(scores=group_relative.dr_grpo_scores),
    "rloo": Estimator(scores=group_relative.rloo_scores),
    "reinforce_baseline": Estimator(scores=group_relative.dr_grpo_scores),
    "opmd": Estimator(scores=group_relative.opmd_scores),
    "asymre": Estimator(scores=group_relative.asymre_scores),
    "step_wise_grpo": Estimator(scores=episodes.step_wise_grpo_scores),
    "gigpo": Estimator(scores=episodes.gigpo_scores),
    "cpgd": Estimator(scores=sequence_scores.cpgd_scores, tokens=token_returns.cpgd),
    "reinforce": _REINFORCE,
    "reinforce_plus_plus": _REINFORCE,
    "remax": Estimator(tokens=token_returns.remax),
    "gae": Estimator(tokens=token_returns.gae),
    "on_policy_distill": Estimator(tokens=token_returns.on_policy_distill),
}
"""The functions of every estimator in `specs.ESTIMATORS`, by the same names."""
