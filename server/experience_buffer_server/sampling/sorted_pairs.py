"""Sorted columns of numbers: a map by key, and a ranking by value.

Plain arrays, cut into chunks: some 17 bytes for a pair of 64-bit numbers, where a `dict` takes over
100, and a microsecond for an operation, at any length up to many millions.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from typing import Generic, TypeVar

MAX_CHUNK = 1024
"""Pairs in one chunk; moving half a chunk costs about as much as finding it."""
MIN_CHUNK = MAX_CHUNK // 8
"""A smaller chunk joins a neighbour where both fit into half a chunk."""

_First = TypeVar("_First", int, float)
_Second = TypeVar("_Second", int, float)

_last_of = itemgetter(-1)


class _SortedPairs(Generic[_First, _Second]):
    """Two parallel columns in chunks; a subclass finds the places. No chunk is empty."""

    def __init__(self, firsts: array[_First], seconds: array[_Second]) -> None:
        """Start without pairs; the two empty arrays give the columns their types."""
        self._no_firsts: array[_First] = firsts
        self._no_seconds: array[_Second] = seconds
        self._firsts: list[array[_First]] = []
        self._seconds: list[array[_Second]] = []
        self._ends: array[_First] = firsts[:]
        """The last first of each chunk."""
        self._num_pairs = 0

    def __len__(self) -> int:
        return self._num_pairs

    def _insert(self, chunk: int, index: int, first: _First, second: _Second) -> None:
        """Put a pair before that place; the chunk after the last one means the end."""
        if chunk == len(self._ends):
            # A new chunk instead of a split: keys that come in order leave full chunks behind.
            if not chunk or len(self._firsts[-1]) >= MAX_CHUNK:
                self._firsts.append(self._no_firsts[:])
                self._seconds.append(self._no_seconds[:])
                self._ends.append(first)
            chunk = len(self._ends) - 1
            index = len(self._firsts[chunk])
        firsts = self._firsts[chunk]
        firsts.insert(index, first)
        self._seconds[chunk].insert(index, second)
        self._ends[chunk] = firsts[-1]
        self._num_pairs += 1
        if len(firsts) > MAX_CHUNK:
            self._split(chunk)

    def _delete(self, chunk: int, index: int) -> _Second:
        firsts = self._firsts[chunk]
        del firsts[index]
        second = self._seconds[chunk].pop(index)
        self._num_pairs -= 1
        if not firsts:
            del self._firsts[chunk], self._seconds[chunk], self._ends[chunk]
            return second
        self._ends[chunk] = firsts[-1]
        if len(firsts) < MIN_CHUNK:
            self._join(chunk)
            self._join(chunk - 1)
        return second

    def _split(self, chunk: int) -> None:
        half = MAX_CHUNK // 2
        firsts, seconds = self._firsts[chunk], self._seconds[chunk]
        self._firsts[chunk : chunk + 1] = [firsts[:half], firsts[half:]]
        self._seconds[chunk : chunk + 1] = [seconds[:half], seconds[half:]]
        self._ends.insert(chunk, firsts[half - 1])

    def _join(self, chunk: int) -> None:
        """Append the next chunk if both are small, so that holes don't leave crumbs for ever."""
        after = chunk + 1
        if chunk < 0 or after >= len(self._ends):
            return
        if len(self._firsts[chunk]) + len(self._firsts[after]) > MAX_CHUNK // 2:
            return
        self._firsts[chunk].extend(self._firsts.pop(after))
        self._seconds[chunk].extend(self._seconds.pop(after))
        del self._ends[chunk]


class KeyTable(_SortedPairs[int, _Second]):
    """A map from distinct integer keys to numbers, ascending by key. Not thread-safe."""

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, int):
            return False
        chunk, index = self._find(key)
        return self._holds(chunk, index, key)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._firsts)

    def __getitem__(self, key: int) -> _Second:
        """The value of a key; KeyError where it isn't there."""
        chunk, index = self._place_of(key)
        return self._seconds[chunk][index]

    def __setitem__(self, key: int, value: _Second) -> None:
        """Change the value of a key; KeyError where it isn't there."""
        chunk, index = self._place_of(key)
        self._seconds[chunk][index] = value

    def add(self, key: int, value: _Second) -> None:
        """Add a key that isn't there."""
        chunk, index = self._find(key)
        assert not self._holds(chunk, index, key), f"key {key} is there already"
        self._insert(chunk, index, key, value)

    def pop(self, key: int) -> _Second:
        """Remove a key and return its value; KeyError where it isn't there."""
        return self._delete(*self._place_of(key))

    def first(self) -> int:
        """The smallest key; IndexError when empty."""
        return self._firsts[0][0]

    def last(self) -> int:
        """The largest key; IndexError when empty."""
        return self._firsts[-1][-1]

    def _find(self, key: int) -> tuple[int, int]:
        """The place of the first key that is not smaller."""
        chunk = bisect_left(self._ends, key)
        if chunk == len(self._ends):
            return chunk, 0
        return chunk, bisect_left(self._firsts[chunk], key)

    def _holds(self, chunk: int, index: int, key: int) -> bool:
        # Up to the last end there is always a key that is not smaller: no check of the index.
        return chunk < len(self._ends) and self._firsts[chunk][index] == key

    def _place_of(self, key: int) -> tuple[int, int]:
        chunk, index = self._find(key)
        if not self._holds(chunk, index, key):
            raise KeyError(key)
        return chunk, index


class Ranking(_SortedPairs[float, int]):
    """Pairs of a value (no NaN) and a key, ascending by value, then by key. Not thread-safe."""

    def __init__(self) -> None:
        super().__init__(array("d"), array("q"))

    def add(self, value: float, key: int) -> None:
        """Add a pair that isn't there."""
        self._insert(*self._find(value, key), value, key)

    def remove(self, value: float, key: int) -> None:
        """Remove a pair that is there."""
        chunk, index = self._find(value, key)
        removed = self._delete(chunk, index)
        assert removed == key, f"pair ({value}, {key}) is not there"

    def first(self) -> tuple[float, int]:
        """The smallest pair; IndexError when empty."""
        return self._firsts[0][0], self._seconds[0][0]

    def last(self) -> tuple[float, int]:
        """The largest pair; IndexError when empty."""
        return self._firsts[-1][-1], self._seconds[-1][-1]

    def _find(self, value: float, key: int) -> tuple[int, int]:
        """The place of the first pair that is not smaller."""
        ends = self._ends
        chunk = bisect_left(ends, value)
        # Many chunks may end in the same value: their last keys tell them apart.
        same = bisect_right(ends, value, chunk)
        if same > chunk:
            chunk = bisect_left(self._seconds, key, chunk, same, key=_last_of)
        if chunk == len(ends):
            return chunk, 0
        firsts = self._firsts[chunk]
        low = bisect_left(firsts, value)
        high = bisect_right(firsts, value, low)
        return chunk, bisect_left(self._seconds[chunk], key, low, high)
