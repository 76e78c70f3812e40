"""Keys with weights: what the random selectors draw from."""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from experience_buffer_server.sampling.choice import Choice
from experience_buffer_server.sampling.key_map import KeyMap

_NOWHERE = -(2**63)
_SLOT_BITS = 40
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_MANTISSA_BITS = 53
_WEIGHTLESS = -2000
"""Stands for the exponent of weight 0: below that of any other weight."""


@dataclass(slots=True, eq=False)
class _Tier:
    """The keys whose weights are above half of `top` and at most `top`, in slots without gaps."""

    exponent: int
    top: float
    """2 ** exponent; 0.0 where the weights are 0."""
    keys: array[int] = field(default_factory=lambda: array("q"))
    weights: array[float] = field(default_factory=lambda: array("d"))
    num_units: int = 0
    """Sum of the weights in units of `top * 2**-53`, of which each is a whole number: exact."""

    def count(self, weight: float) -> int:
        """A weight of this tier, in units."""
        return int(math.ldexp(weight, _MANTISSA_BITS - self.exponent))

    @property
    def share(self) -> float:
        """Sum of the weights."""
        return math.ldexp(self.num_units, self.exponent - _MANTISSA_BITS)


class WeightedKeys:
    """Distinct keys with weights, each 0 or from 2**-1000 to 2**900. Not thread-safe.

    Weights within a factor of 2 make a tier. A draw takes a tier in proportion to its sum, and in
    it any key, which it accepts with the probability weight / top, at least a half, and otherwise
    draws again. So a change costs no more than that of one number, however many keys there are. The
    sums of tiers are whole numbers: nothing is rounded, so nothing drifts.

    Source: Matias, Vitter, Ni 2003, Dynamic Generation of Discrete Random Variates (one level).
    """

    def __init__(self) -> None:
        self._places = KeyMap(array("q", [_NOWHERE]))
        """By key, exponent of its tier << 40, plus its slot there."""
        self._tiers: dict[int, _Tier] = {}
        """By exponent; none is empty."""
        self._order: list[int] = []
        """The exponents of the tiers, negated and ascending: the heaviest first."""
        self._shares: list[float] = []
        """The sums of the tiers, in the same order."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(tier.keys for tier in self._tiers.values())

    @property
    def total(self) -> float:
        """The sum of the weights."""
        return sum(self._shares, 0.0)

    def add(self, key: int, weight: float) -> None:
        """Add a key that isn't there."""
        exponent = _exponent_of(weight)
        tier = self._tiers.get(exponent)
        if tier is None:
            tier = self._open(exponent)
        self._places.add(key, (exponent << _SLOT_BITS) + len(tier.keys))
        tier.keys.append(key)
        tier.weights.append(weight)
        self._grow(tier, tier.count(weight))

    def update(self, key: int, weight: float) -> None:
        """Change the weight of a key; KeyError where it isn't there."""
        self.remove(key)
        self.add(key, weight)

    def remove(self, key: int) -> None:
        """Remove a key; KeyError where it isn't there."""
        place = self._places.pop(key)
        slot = place & _SLOT_MASK
        tier = self._tiers[place >> _SLOT_BITS]
        weight = tier.weights[slot]
        last, last_weight = tier.keys.pop(), tier.weights.pop()
        if last != key:
            tier.keys[slot], tier.weights[slot] = last, last_weight
            self._places[last] = place
        self._grow(tier, -tier.count(weight))

    def draw(self, generator: random.Random) -> Choice:
        """Draw a key in proportion to weight, or uniformly where all weights are 0.

        Raises:
            IndexError: There are no keys.
        """
        total = sum(self._shares)
        if not total:
            return self._draw_weightless(generator)
        point = generator.random() * total
        rank = 0
        for rank, share in enumerate(self._shares):  # noqa: B007
            if point < share:
                break
            point -= share
        else:
            rank = 0  # Rounding put the point past the end.
        tier = self._tiers[-self._order[rank]]
        keys, weights, top = tier.keys, tier.weights, tier.top
        num_bits = (len(keys) - 1).bit_length()
        while True:
            slot = generator.getrandbits(num_bits)
            if slot < len(keys) and generator.random() * top < (weight := weights[slot]):
                return Choice(keys[slot], weight / total)

    def _draw_weightless(self, generator: random.Random) -> Choice:
        if not self._tiers:
            raise IndexError("no keys to draw from")
        keys = self._tiers[_WEIGHTLESS].keys
        return Choice(keys[generator.randrange(len(keys))], 1.0 / len(keys))

    def _open(self, exponent: int) -> _Tier:
        top = 0.0 if exponent == _WEIGHTLESS else math.ldexp(1.0, exponent)
        tier = self._tiers[exponent] = _Tier(exponent, top)
        rank = bisect_left(self._order, -exponent)
        self._order.insert(rank, -exponent)
        self._shares.insert(rank, 0.0)
        return tier

    def _grow(self, tier: _Tier, num_units: int) -> None:
        """Note that the sum of a tier has changed; one without keys ends."""
        tier.num_units += num_units
        rank = bisect_left(self._order, -tier.exponent)
        if tier.keys:
            self._shares[rank] = tier.share
        else:
            del self._tiers[tier.exponent], self._order[rank], self._shares[rank]


def _exponent_of(weight: float) -> int:
    """The exponent of the least power of two that is not below a weight."""
    if not weight:
        return _WEIGHTLESS
    assert weight > 0.0, f"weight {weight} is below 0"
    mantissa, exponent = math.frexp(weight)
    # A power of two is the top of its tier, not just above the middle: then it is always accepted.
    return exponent - 1 if mantissa == 0.5 else exponent
