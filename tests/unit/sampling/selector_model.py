"""What each kind of selector may choose, and how probably: a dict, searched from end to end."""

from __future__ import annotations

import math

from experience_buffer_server.settings.consumer import SelectorSettings


def probabilities(plan: SelectorSettings, values: dict[int, float]) -> dict[int, float]:
    """The probability of each key in the next draw."""
    certain = _certain(plan.kind, values)
    if certain is not None:
        return {key: float(key == certain) for key in values}
    weights = {key: _weight(plan, value, values) for key, value in values.items()}
    if not any(weights.values()):
        weights = dict.fromkeys(values, 1.0)
    total = math.fsum(weights.values())
    return {key: weight / total for key, weight in weights.items()}


def _certain(kind: str, values: dict[int, float]) -> int | None:
    match kind:
        case "fifo":
            return min(values)
        case "lifo":
            return max(values)
        case "min":
            return min(values, key=lambda key: (values[key], key))
        case "max" | "freshest":
            return min(values, key=lambda key: (-values[key], key))
    return None


def _weight(plan: SelectorSettings, value: float, values: dict[int, float]) -> float:
    match plan.kind:
        case "prioritized" | "advantage":
            return float(abs(value) ** plan.exponent)
        case "staleness":
            known = [value for value in values.values() if value > -math.inf]
            if not known:
                return 1.0
            return float(plan.decay ** (max(known) - max(value, min(known))))
    return 1.0
