"""What a selector answers, and what all selectors have."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple


class Choice(NamedTuple):
    """A key and the probability that it had in this draw, 1.0 where nothing is random."""

    key: int
    probability: float


class KeyedSelector:
    """The part of a `Selector` that asks which keys are there: it looks at a live collection."""

    def __init__(self, present: Collection[int]) -> None:
        self._present = present

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, key: object) -> bool:
        return key in self._present

    def __iter__(self) -> Iterator[int]:
        return iter(self._present)
