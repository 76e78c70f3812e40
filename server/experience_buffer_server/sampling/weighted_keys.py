"""Keys in gapless slots, and keys with weights: what the random selectors draw from."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

from experience_buffer_server.sampling.sorted_pairs import KeyTable
from experience_buffer_server.sampling.sum_tree import SumTree


class SlottedKeys:
    """Distinct keys in slots 0 to n - 1, without gaps. Not thread-safe."""

    def __init__(self) -> None:
        self._keys = array("q")
        self._slots = KeyTable(array("q"), array("q"))

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __getitem__(self, slot: int) -> int:
        return self._keys[slot]

    def slot_of(self, key: int) -> int:
        """The slot of a key; KeyError where it isn't there."""
        return self._slots[key]

    def add(self, key: int) -> None:
        """Put a key that isn't there into the slot after the last one."""
        self._slots.add(key, len(self._keys))
        self._keys.append(key)

    def remove(self, key: int) -> int:
        """Remove a key; the one in the last slot moves into its slot, which is returned.

        Raises:
            KeyError: The key isn't there.
        """
        slot = self._slots.pop(key)
        last = self._keys.pop()
        if last != key:
            self._keys[slot] = last
            self._slots[last] = slot
        return slot


class WeightedKeys:
    """Distinct keys with non-negative weights whose sum is finite. Not thread-safe."""

    def __init__(self) -> None:
        self._keys = SlottedKeys()
        self._weights = SumTree()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    @property
    def total(self) -> float:
        """The sum of the weights."""
        return self._weights.total

    def add(self, key: int, weight: float) -> None:
        """Add a key that isn't there."""
        self._keys.add(key)
        self._weights.append(weight)

    def update(self, key: int, weight: float) -> None:
        """Change the weight of a key; KeyError where it isn't there."""
        self._weights[self._keys.slot_of(key)] = weight

    def remove(self, key: int) -> None:
        """Remove a key; KeyError where it isn't there."""
        slot = self._keys.remove(key)
        last = self._weights.pop()
        if slot < len(self._weights):
            self._weights[slot] = last

    def draw(self, generator: random.Random) -> tuple[int, float]:
        """Draw a key in proportion to weight, or uniformly where all weights are 0.

        Returns:
            The key, and its probability among these keys.

        Raises:
            IndexError: There are no keys.
        """
        if not self._keys:
            raise IndexError("no keys to draw from")
        total = self._weights.total
        if total == 0.0:
            return self._keys[generator.randrange(len(self._keys))], 1.0 / len(self._keys)
        slot = self._weights.find(generator.random() * total)
        return self._keys[slot], self._weights[slot] / total
