"""Free runs of blocks, in a file or in memory: none of them next to another. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import chain


class Runs:
    """Belongs to one thread."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._most: int = 0
        """No run is longer."""
        self.num_bytes = 0

    def add(self, start: int, end: int) -> None:
        """Add a run that is not free, and joins its neighbours."""
        self.num_bytes += end - start
        place = bisect_left(self._starts, start)
        if place and self._ends[place - 1] == start:
            place -= 1
            start = self._starts.pop(place)
            self._ends.pop(place)
        if place < len(self._starts) and self._starts[place] == end:
            self._starts.pop(place)
            end = self._ends.pop(place)
        self._starts.insert(place, start)
        self._ends.insert(place, end)
        self._most = max(self._most, end - start)

    def take(self, size: int, *, near: int) -> int | None:
        """The start of a run of this size, the first from `near` on that there is; it is taken."""
        if size > self._most:
            return None
        first = max(bisect_right(self._starts, near) - 1, 0)
        longest = 0
        for place in chain(range(first, len(self._starts)), range(first)):
            start: int = self._starts[place]
            length = self._ends[place] - start
            if length >= size:
                self.remove(start, start + size)
                return start
            longest = max(longest, length)
        self._most = longest
        return None

    def take_last(self, end: int) -> int:
        """The start of the run that ends with the file, which is taken; the end if there is none."""
        if self._ends and self._ends[-1] == end:
            start = self._starts[-1]
            self.remove(start, end)
            return start
        return end

    def remove(self, start: int, end: int) -> None:
        """Take a part of one run."""
        self.num_bytes -= end - start
        place = bisect_right(self._starts, start) - 1
        first, last = self._starts.pop(place), self._ends.pop(place)
        assert first <= start < end <= last
        if end < last:
            self._starts.insert(place, end)
            self._ends.insert(place, last)
        if first < start:
            self._starts.insert(place, first)
            self._ends.insert(place, start)

    def cut(self, end: int) -> None:
        """Forget what lies behind the end."""
        while self._ends and self._ends[-1] > end:
            start, last = self._starts.pop(), self._ends.pop()
            self.num_bytes -= last - max(start, end)
            if start < end:
                self._starts.append(start)
                self._ends.append(end)
