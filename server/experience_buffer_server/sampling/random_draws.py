"""Selectors by chance: all alike, or in proportion to a weight."""

from __future__ import annotations

import random
from collections.abc import Callable

from experience_buffer_server.sampling.choice import Choice, KeyedSelector
from experience_buffer_server.sampling.weighted_keys import WeightedKeys


class WeightedSelector(KeyedSelector):
    """Keys in proportion to a weight that is computed from the value; uniform: all weigh alike.

    A key of weight 0 is chosen only where all weights are 0, and then uniformly.
    """

    def __init__(self, *, weigh: Callable[[int, float], float], seed: int | None) -> None:
        self._keys = WeightedKeys()
        super().__init__(self._keys)
        self._weigh = weigh
        self._random = random.Random(seed)

    def add(self, key: int, value: float = 0.0) -> None:
        """See `Selector`."""
        self._keys.add(key, self._weigh(key, value))

    def update(self, key: int, value: float) -> None:
        """See `Selector`."""
        self._keys.update(key, self._weigh(key, value))

    def remove(self, key: int) -> None:
        """See `Selector`."""
        self._keys.remove(key)

    def choose(self) -> Choice:
        """See `Selector`."""
        return self._keys.draw(self._random)


MIN_WEIGHT, MAX_WEIGHT = 2.0**-1000, 2.0**900
"""Limits of a weight above 0: sums and draws stay exact below, finite above, for any number."""


def weigh_alike(key: int, value: float) -> float:
    """Weigh all units alike, whatever their values."""
    return 1.0


def priority_weigher(exponent: float) -> Callable[[int, float], float]:
    """Weigh units by value ** exponent, for values of at least 0 and an exponent of at least 0.

    A value above 0 keeps a weight above 0 however small it is, and one that overflows counts as
    the largest.
    """
    assert exponent >= 0.0, f"exponent {exponent} is below 0"

    def weigh(key: int, value: float) -> float:
        if not value >= 0.0:
            raise ValueError(f"the priority of unit {key} is {value}; it must be 0 or more")
        if value == 0.0:
            return 1.0 if exponent == 0.0 else 0.0
        try:
            weight: float = value**exponent
        except OverflowError:
            return MAX_WEIGHT
        return min(max(weight, MIN_WEIGHT), MAX_WEIGHT)

    return weigh


def advantage_weigher(exponent: float) -> Callable[[int, float], float]:
    """Weigh units by |value| ** exponent; see `priority_weigher`."""
    weigh_priority = priority_weigher(exponent)

    def weigh(key: int, value: float) -> float:
        if value != value:
            raise ValueError(f"the advantage of unit {key} is NaN; it must be a number")
        return weigh_priority(key, abs(value))

    return weigh
