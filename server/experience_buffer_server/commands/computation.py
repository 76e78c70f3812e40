"""How advantages were computed, in one line with the numbers in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from experience_buffer import _show

_EPSILON: Final = 1e-6
_NOT_SAID: Final = ("estimator", "votes", "members", "mean_magnitude", "mean_advantage")
_MOST_OTHERS: Final = 8


def computed(
    computation: Mapping[str, Any],
    *,
    reward: float | None = None,
    advantage: float | None = None,
    num_masked: int | None = None,
) -> str:
    """Say how an advantage came about: "grpo: (1 - mean 0.50) / (std 0.58 + 1e-06) = 0.87; 4 votes".

    The formula is said only where its numbers give the advantage; else what was used, by name.

    Args:
        computation: What the server recorded.
        reward: The experience's.
        advantage: The mean of its advantages over the tokens that train.
        num_masked: Members of the group that don't train; None: not said.
    """
    estimator = str(computation.get("estimator", "unknown"))
    said = _formula(computation, estimator, reward, advantage) or _values(computation, advantage)
    counts = [
        _show.counted(int(count), what)
        for name, what in (("votes", "vote"), ("members", "member"))
        if isinstance(count := computation.get(name), int | float)
    ][:1]
    if num_masked is not None:
        counts.append(f"{num_masked:,} masked")
    parts = [f"{estimator}: {said}" if said else estimator]
    parts += [", ".join(counts)] if counts else []
    flags = ("zero_variance", "singleton", "withheld", "masked")
    parts += [flag.replace("_", " ") for flag in flags if computation.get(flag) is True]
    return "; ".join(parts)


def _formula(
    computation: Mapping[str, Any], estimator: str, reward: float | None, advantage: float | None
) -> str:
    mean, std = computation.get("mean"), computation.get("std")
    if reward is None or advantage is None or not isinstance(mean, int | float):
        return ""
    epsilon = computation.get("parameters.eps", computation.get("eps", _EPSILON))
    difference = f"{reward:g} - mean {mean:.2f}"
    if isinstance(std, int | float):
        value = (reward - mean) / (std + epsilon)
        said = f"({difference}) / (std {std:.2f} + {epsilon:g})"
    elif estimator == "rloo" and (votes := computation.get("votes", 0)) > 1:
        others = (mean * votes - reward) / (votes - 1)
        value = reward - others
        said = f"{reward:g} - mean of the others {others:.2f}"
    else:
        value, said = reward - mean, difference
    if not math.isclose(value, advantage, rel_tol=1e-3, abs_tol=1e-3):
        return ""
    return f"{said} = {advantage:.2f}"


def _values(computation: Mapping[str, Any], advantage: float | None) -> str:
    used = [
        f"{name} {value:.4g}"
        for name, value in computation.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in _NOT_SAID
    ][:_MOST_OTHERS]
    if advantage is not None:
        used.append(f"advantage {advantage:.4g}")
    return ", ".join(used)
