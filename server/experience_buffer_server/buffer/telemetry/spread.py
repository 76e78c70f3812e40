"""How numbers are distributed whose range nobody knows beforehand: a histogram that widens its bins. Pure."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from experience_buffer.history import Distribution

MAX_BINS: Final = 40
_EXACT_BITS: Final = 52
"""Numbers of bins up to 2^52 are exact, as floats and as integers."""
_ALL_BITS: Final = 62
"""Shifted by so many, any number of a bin is 0, or -1 below it."""
_LARGEST: Final = 1e300
FINE: Final = -20
"""Exponent of the narrowest bins, 2^-20."""
WHOLE: Final = 0
"""The same for whole numbers."""


class Spread:
    """Counts finite numbers in bins of equal width, which doubles when they don't fit into 40 bins.

    Bins begin at multiples of their width, a power of two: so two that widen meet exactly, and what
    is counted at once or in parts, in any order, comes to the same. Not thread-safe.
    """

    __slots__ = ("_counts", "_exponent", "_first", "count", "least", "most", "squares", "total")

    def __init__(self, exponent: int = FINE) -> None:
        """`exponent`: no bin is narrower than 2 to the power of it."""
        self.count = 0
        self.total = self.squares = 0.0
        self.least, self.most = math.inf, -math.inf
        self._exponent = exponent
        self._first = 0
        """Number of the first bin: where it begins, in widths."""
        self._counts: NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def mean(self) -> float | None:
        """Of the numbers; None where there are none."""
        return self.total / self.count if self.count else None

    def add(self, numbers: NDArray[np.float64]) -> None:
        """Count numbers, shape [N]; those that aren't finite are left out, and none is above 1e300."""
        finite = np.isfinite(numbers)
        if not finite.all():
            numbers = numbers[finite]
        if not len(numbers):
            return
        numbers = np.clip(numbers, -_LARGEST, _LARGEST)
        self.count += len(numbers)
        self.total += float(numbers.sum())
        with np.errstate(over="ignore"):
            self.squares += float(np.square(numbers).sum())
        self.least = min(self.least, float(numbers.min()))
        self.most = max(self.most, float(numbers.max()))
        self._widen(_exponent_for(self.least, self.most, self._exponent))
        places = np.floor(np.ldexp(numbers, -self._exponent)).astype(np.int64)
        first = int(places.min())
        self._put(first, np.bincount(places - first))

    def merge(self, other: Spread) -> None:
        """Count what another one has counted, too."""
        if not other.count:
            return
        self.count += other.count
        self.total += other.total
        self.squares += other.squares
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        exponent = max(self._exponent, other._exponent)
        self._widen(_exponent_for(self.least, self.most, exponent))
        self._put(*_coarser(other._first, other._counts, self._exponent - other._exponent))

    def distribution(self) -> Distribution:
        """As a value."""
        if not self.count:
            return Distribution()
        mean = self.total / self.count
        variance = self.squares / self.count - mean * mean
        limits = range(self._first, self._first + len(self._counts) + 1)
        return Distribution(
            limits=tuple(math.ldexp(limit, self._exponent) for limit in limits),
            counts=tuple(self._counts.tolist()),
            mean=mean,
            std=math.sqrt(max(variance, 0.0)) if math.isfinite(variance) else None,
            min=self.least,
            max=self.most,
        )

    def _widen(self, exponent: int) -> None:
        if exponent > self._exponent:
            shift, self._exponent = exponent - self._exponent, exponent
            self._first, self._counts = _coarser(self._first, self._counts, shift)

    def _put(self, first: int, counts: NDArray[np.int64]) -> None:
        """Add counts of bins as wide as these."""
        if not len(self._counts):
            self._first, self._counts = first, counts
            return
        start = min(first, self._first)
        stop = max(first + len(counts), self._first + len(self._counts))
        if start < self._first or stop > self._first + len(self._counts):
            grown = np.zeros(stop - start, np.int64)
            grown[self._first - start :][: len(self._counts)] = self._counts
            self._first, self._counts = start, grown
        self._counts[first - start :][: len(counts)] += counts


def _exponent_for(least: float, most: float, exponent: int) -> int:
    """The least exponent, at least the given one, by which all fits into the bins."""
    largest = max(abs(least), abs(most))
    exponent = max(exponent, math.frexp(largest)[1] - _EXACT_BITS)
    while (
        math.floor(math.ldexp(most, -exponent)) - math.floor(math.ldexp(least, -exponent))
        >= MAX_BINS
    ):
        exponent += 1
    return exponent


def _coarser(first: int, counts: NDArray[np.int64], shift: int) -> tuple[int, NDArray[np.int64]]:
    """The same numbers in bins that are 2^shift times as wide."""
    if not shift or not len(counts):
        return first, counts
    shift = min(shift, _ALL_BITS)
    places = (np.arange(first, first + len(counts)) >> shift) - (first >> shift)
    return first >> shift, np.bincount(places, weights=counts).astype(np.int64)
