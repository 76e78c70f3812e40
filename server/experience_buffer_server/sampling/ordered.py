"""Selectors without chance: by arrival, or by value."""

from __future__ import annotations

import math
from array import array

from experience_buffer_server.sampling.choice import Choice, KeyedSelector
from experience_buffer_server.sampling.sorted_pairs import KeyTable, Ranking


class ArrivalSelector(KeyedSelector):
    """The earliest key (fifo) or the latest one (lifo); values are ignored."""

    def __init__(self, *, latest: bool) -> None:
        # The table's column isn't used; a byte is the least that a value takes.
        self._keys = KeyTable(array("q"), array("b"))
        self._latest = latest
        super().__init__(self._keys)

    def add(self, key: int, value: float = 0.0) -> None:
        """See `Selector`."""
        self._keys.add(key, 0)

    def update(self, key: int, value: float) -> None:
        """See `Selector`."""
        if key not in self._keys:
            raise KeyError(key)

    def remove(self, key: int) -> None:
        """See `Selector`."""
        self._keys.pop(key)

    def choose(self) -> Choice:
        """See `Selector`."""
        return Choice(self._keys.last() if self._latest else self._keys.first(), 1.0)


class ExtremeSelector(KeyedSelector):
    """The smallest value (min) or the largest (max, freshest); of equal ones the earliest key."""

    def __init__(self, *, largest: bool) -> None:
        self._values = KeyTable(array("q"), array("d"))
        super().__init__(self._values)
        self._ranking = Ranking()
        # Negated values turn "the largest value, then the smallest key" into the first pair.
        self._sign = -1.0 if largest else 1.0

    def add(self, key: int, value: float = 0.0) -> None:
        """See `Selector`."""
        rank = self._sign * _known(key, value)
        self._values.add(key, rank)
        self._ranking.add(rank, key)

    def update(self, key: int, value: float) -> None:
        """See `Selector`."""
        rank = self._sign * _known(key, value)
        self._ranking.remove(self._values[key], key)
        self._values[key] = rank
        self._ranking.add(rank, key)

    def remove(self, key: int) -> None:
        """See `Selector`."""
        self._ranking.remove(self._values.pop(key), key)

    def choose(self) -> Choice:
        """See `Selector`."""
        return Choice(self._ranking.first()[1], 1.0)


def _known(key: int, value: float) -> float:
    if math.isnan(value):
        raise ValueError(f"the value of unit {key} is NaN, which has no place in an order")
    return value
