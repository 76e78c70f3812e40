"""The estimators again, one token at a time in plain Python: what the packed ones must agree with.

Nothing here is shared with the code under test.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def returns(
    rewards: Sequence[float], mask: Sequence[bool], *, gamma: float, mode: str
) -> list[float]:
    """R_t, from the last token to the first; 0 where masked."""
    result = [0.0] * len(mask)
    later = 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            later = rewards[t] + gamma * later
            result[t] = later
        elif mode == "count":
            later = gamma * later
    return result


def gae(
    rewards: Sequence[float],
    values: Sequence[float],
    mask: Sequence[bool],
    *,
    gamma: float,
    lam: float,
    mode: str,
    bootstrap: float = 0.0,
) -> tuple[list[float], list[float]]:
    """A_t and R_t, from the last valid token to the first; 0 where masked."""
    advantages, result = [0.0] * len(mask), [0.0] * len(mask)
    later, next_value, seen = 0.0, bootstrap, False
    for t in reversed(range(len(mask))):
        if mask[t]:
            seen = True
            later = rewards[t] + gamma * next_value - values[t] + gamma * lam * later
            next_value = values[t]
            advantages[t], result[t] = later, later + values[t]
        elif mode == "count" and seen:
            later = gamma * next_value + gamma * lam * later
            next_value = 0.0
    return advantages, result


def place(reward: float, mask: Sequence[bool]) -> list[float]:
    """The reward on the last valid token."""
    placed = [0.0] * len(mask)
    for t in reversed(range(len(mask))):
        if mask[t]:
            placed[t] = reward
            break
    return placed


def grpo(rewards: Sequence[float], eps: float) -> list[float]:
    """Exact rationals inside `statistics`, so rounding differs from the code under test."""
    if len(rewards) == 1:
        return [rewards[0] / (1 + eps)]
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (std + eps) for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """Mean of the others, taken literally."""
    if len(rewards) == 1:
        return list(rewards)
    return [
        reward - statistics.mean([*rewards[:i], *rewards[i + 1 :]])
        for i, reward in enumerate(rewards)
    ]
