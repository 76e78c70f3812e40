"""Which experiences have computed advantages, and how large those are: two plain columns."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping

from experience_buffer_server.store.interning import Numbers


class Magnitudes(Mapping[int, float]):
    """Magnitudes by seq, ascending, 16 bytes each: a `dict` of a million takes over 100.

    A magnitude is the mean of |advantage| over an experience's response tokens.
    """

    def __init__(self) -> None:
        self._seqs = array("Q")
        self._values = array("d")
        self._numbers = Numbers()

    def append(self, seq: int, magnitude: float) -> None:
        """Add an experience; its seq is above all before."""
        assert not self._seqs or seq > self._seqs[-1], f"seq {seq} comes after {self._seqs[-1]}"
        self._seqs.append(seq)
        self._values.append(magnitude)

    def __getitem__(self, seq: int) -> float:
        index = bisect_left(self._seqs, seq)
        if index < len(self._seqs) and self._seqs[index] == seq:
            # Groups of equal rewards have equal ones, and whoever asks keeps them.
            return self._numbers.intern(self._values[index])
        raise KeyError(seq)

    def __iter__(self) -> Iterator[int]:
        return iter(self._seqs)

    def __len__(self) -> int:
        return len(self._seqs)
