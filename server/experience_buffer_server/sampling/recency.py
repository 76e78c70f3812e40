"""The selector that prefers fresh units (kind "staleness"); `staleness.py` is the freshness window."""

from __future__ import annotations

import math
import random
from array import array

from experience_buffer_server.sampling.choice import Choice, KeyedSelector
from experience_buffer_server.sampling.key_map import KeyMap
from experience_buffer_server.sampling.sorted_pairs import Ranking
from experience_buffer_server.sampling.weighted_keys import WeightedKeys

_ERA_BITS = 500
"""Within an era weights span at most this many powers of two: far from overflow, even summed."""
_MAX_BEHIND = 2**70
"""More versions behind weigh nothing, or as much as any if the decay is 1."""


class StalenessSelector(KeyedSelector):
    """Weight ~ decay ** (newest - version): the older a unit's policy version, the rarer.

    Versions are cut into eras, and a weight is relative to the start of its version's era, so it
    never changes, whatever versions come and go. A draw compares the newest era with the one
    before it; anything older weighs less than rounding does, until it is all that is left.

    A unit of unknown version (-inf) weighs as much as one of the oldest known version present.
    """

    def __init__(self, *, decay: float, seed: int | None) -> None:
        assert 0.0 < decay <= 1.0, f"decay {decay} is outside 0 < decay <= 1"
        # A smaller one could be drawn just as never.
        self._decay = max(decay, 2.0**-_ERA_BITS)
        bits_per_version = -math.log2(self._decay)
        # An era of 2**64 versions holds nearly all there are, where they hardly differ in weight.
        self._era_versions = int(_ERA_BITS / max(bits_per_version, _ERA_BITS * 2.0**-64))
        self._versions = KeyMap(array("d", [math.inf]))
        super().__init__(self._versions)
        self._num_keys: dict[float, int] = {}
        """Keys of each version present, -inf included."""
        self._known = Ranking()
        """The known versions present, each once."""
        self._eras: dict[int, WeightedKeys] = {}
        self._unknown = WeightedKeys()
        self._parts: list[tuple[WeightedKeys, float]] = []
        """What `_find_parts` found, until a version comes or goes; then empty."""
        self._random = random.Random(seed)

    def add(self, key: int, value: float = 0.0) -> None:
        """See `Selector`."""
        _check(key, value)
        self._versions.add(key, value)
        self._enter(key, value)

    def update(self, key: int, value: float) -> None:
        """See `Selector`."""
        _check(key, value)
        self._leave(key, self._versions[key])
        self._versions[key] = value
        self._enter(key, value)

    def remove(self, key: int) -> None:
        """See `Selector`."""
        self._leave(key, self._versions.pop(key))

    def choose(self) -> Choice:
        """See `Selector`."""
        parts = self._parts or self._find_parts()
        if len(parts) == 1:
            return parts[0][0].draw(self._random)
        weights = [keys.total * factor for keys, factor in parts]
        (rank,) = self._random.choices(range(len(parts)), weights)
        key, probability = parts[rank][0].draw(self._random)
        return Choice(key, probability * (weights[rank] / sum(weights)))

    def _find_parts(self) -> list[tuple[WeightedKeys, float]]:
        """The keys that can be drawn, and what their weights are to be multiplied by.

        Raises:
            IndexError: There are no keys.
        """
        if self._eras:
            newest, _ = self._place(self._known.last()[0])
            parts = [(self._eras[newest], 1.0)]
            if newest - 1 in self._eras:
                parts.append((self._eras[newest - 1], self._decay**self._era_versions))
            if self._unknown:
                era, since_start = self._place(self._known.first()[0])
                behind = min((newest - era) * self._era_versions, _MAX_BEHIND) - since_start
                parts.append((self._unknown, self._decay**behind))
        elif self._unknown:
            parts = [(self._unknown, 1.0)]
        else:
            raise IndexError("no keys to choose from")
        # Rounding may draw the last part without reason: then it has to be one with weight. No key
        # weighs less than 1 within its era.
        self._parts = [(keys, factor) for keys, factor in parts if factor > 0.0]
        return self._parts

    def _enter(self, key: int, version: float) -> None:
        num_keys = self._num_keys.get(version, 0)
        self._num_keys[version] = num_keys + 1
        if not num_keys:
            self._parts = []
        if version == -math.inf:
            self._unknown.add(key, 1.0)
            return
        if not num_keys:
            self._known.add(version, 0)
        era, since_start = self._place(version)
        if era not in self._eras:
            self._eras[era] = WeightedKeys()
        self._eras[era].add(key, self._decay**-since_start)

    def _leave(self, key: int, version: float) -> None:
        self._num_keys[version] -= 1
        is_last = not self._num_keys[version]
        if is_last:
            del self._num_keys[version]
            self._parts = []
        if version == -math.inf:
            self._unknown.remove(key)
            return
        if is_last:
            self._known.remove(version, 0)
        era, _ = self._place(version)
        self._eras[era].remove(key)
        if not self._eras[era]:
            del self._eras[era]

    def _place(self, version: float) -> tuple[int, float]:
        """The era of a known version, and how far it is from the era's start."""
        # In integers: the start of an era of large versions may lie between two floats.
        whole = math.floor(version)
        era, since_start = divmod(whole, self._era_versions)
        return era, since_start + (version - whole)


def _check(key: int, version: float) -> None:
    if math.isnan(version) or version == math.inf:
        raise ValueError(
            f"the policy version of unit {key} is {version}; it must be a number, or -inf if unknown"
        )
