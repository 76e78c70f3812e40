"""Numbers by policy version, to find those of old versions without looking at all. Pure logic."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

_BITS = 6
_MASK = (1 << _BITS) - 1
_SPARE = 64
"""Versions in the heap, beside one for each that is there, that may be of none."""


class Versions:
    """A set of numbers for each version, kept exact. Not thread-safe.

    Neighbours share a bitmap. As numbers of one version mostly come together, a million of them
    take a few megabytes.
    """

    def __init__(self) -> None:
        self._maps: dict[int, dict[int, int]] = {}
        """By version and block, the numbers of the block that are there, one bit each."""
        self._heap: list[int] = []
        """Every version that is there, and some that aren't any more."""

    def __len__(self) -> int:
        """How many numbers there are; takes time in proportion to it."""
        return sum(bits.bit_count() for blocks in self._maps.values() for bits in blocks.values())

    def add(self, version: int, number: int) -> None:
        """Add a number of at least 0 to a version's, unless it is there."""
        blocks = self._maps.get(version)
        if blocks is None:
            blocks = self._maps[version] = {}
            self._push(version)
        block = number >> _BITS
        blocks[block] = blocks.get(block, 0) | 1 << (number & _MASK)

    def discard(self, version: int, number: int) -> None:
        """Take a number out of a version's, if it is there."""
        blocks = self._maps.get(version)
        block = number >> _BITS
        if blocks is None or block not in blocks:
            return
        blocks[block] &= ~(1 << (number & _MASK))
        if not blocks[block]:
            del blocks[block]
        if not blocks:
            del self._maps[version]

    def take_below(self, version: int) -> Iterator[int]:
        """Take the numbers of lower versions, the lowest version first, one at a time.

        Others may be added and taken out meanwhile.
        """
        while self._heap and (lowest := self._heap[0]) < version:
            blocks = self._maps.get(lowest)
            if not blocks:
                heapq.heappop(self._heap)
                self._maps.pop(lowest, None)
                continue
            block, bits = blocks.popitem()
            first = bits & -bits
            if bits != first:
                blocks[block] = bits ^ first
            yield (block << _BITS) + first.bit_length() - 1

    def _push(self, version: int) -> None:
        if len(self._heap) > 2 * len(self._maps) + _SPARE:
            self._heap = list(self._maps)
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, version)
