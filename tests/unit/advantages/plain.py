"""The formulas over rewards again, in plain Python over exact means: nothing here is shared with
the code under test."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def grpo(rewards: Sequence[float], eps: float) -> list[float]:
    if len(rewards) == 1:
        return [rewards[0] / (1 + eps)]
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (std + eps) for reward in rewards]


def centred(rewards: Sequence[float]) -> list[float]:
    if len(rewards) == 1:
        return list(rewards)
    return [reward - statistics.mean(rewards) for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    if len(rewards) == 1:
        return list(rewards)
    return [
        reward - statistics.mean([*rewards[:i], *rewards[i + 1 :]])
        for i, reward in enumerate(rewards)
    ]


def opmd(rewards: Sequence[float], tau: float) -> list[float]:
    if len(rewards) == 1:
        return list(rewards)
    top = max(rewards)
    total = sum(math.exp((reward - top) / tau) for reward in rewards)
    baseline = top + tau * (math.log(total) - math.log(len(rewards)))
    return [reward - baseline for reward in rewards]


def asymre(rewards: Sequence[float], shift: float) -> list[float]:
    if len(rewards) == 1:
        return list(rewards)
    return [reward - (statistics.mean(rewards) + shift) for reward in rewards]


def returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Each step's discounted return, every one summed anew."""
    return [
        sum(discount**k * reward for k, reward in enumerate(rewards[start:]))
        for start in range(len(rewards))
    ]
