"""Which unit is delivered, or removed, next: one selector for each kind of order or chance.

A selector knows keys and one number for each; what a key stands for, leases, limits and clocks
are its owner's. A batch is several turns of choose and remove; a unit that comes back is added
under its old key and thereby takes its old place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

from experience_buffer_server.sampling.choice import Choice
from experience_buffer_server.sampling.ordered import ArrivalSelector, ExtremeSelector
from experience_buffer_server.sampling.random_draws import (
    WeightedSelector,
    advantage_weigher,
    priority_weigher,
    weigh_alike,
)
from experience_buffer_server.sampling.recency import StalenessSelector

SelectorKind = Literal[
    "fifo", "lifo", "uniform", "prioritized", "min", "max", "freshest", "advantage", "staleness"
]


class Selector(Protocol):
    """Keys to choose from, each with a value. Not thread-safe.

    Keys are 64-bit integers in order of arrival: a smaller key came earlier. The same seed and the
    same calls give the same choices.
    """

    def __len__(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...

    def __iter__(self) -> Iterator[int]:
        """The keys, in any order; no changes meanwhile."""
        ...

    def add(self, key: int, value: float = 0.0) -> None:
        """Add a key that isn't there; ValueError for a value that the kind can't use, as NaN."""
        ...

    def update(self, key: int, value: float) -> None:
        """Change a value; KeyError where the key isn't there, ValueError as for `add`."""
        ...

    def remove(self, key: int) -> None:
        """Remove a key; KeyError where it isn't there."""
        ...

    def choose(self) -> Choice:
        """The next key, which stays; IndexError when empty."""
        ...


def make_selector(
    kind: SelectorKind, *, exponent: float = 1.0, decay: float = 0.5, seed: int | None = None
) -> Selector:
    """Make an empty selector.

    Args:
        kind: In which order it chooses.
        exponent: Of prioritized and advantage: probability ~ value ** exponent; at least 0, which
            means uniform.
        decay: Of staleness: weight ~ decay ** (versions behind the newest), 0 < decay <= 1.
        seed: Of the random kinds; None: from the operating system.
    """
    match kind:
        case "fifo" | "lifo":
            return ArrivalSelector(latest=kind == "lifo")
        case "min" | "max" | "freshest":
            return ExtremeSelector(largest=kind != "min")
        case "uniform":
            return WeightedSelector(weigh=weigh_alike, seed=seed)
        case "prioritized":
            return WeightedSelector(weigh=priority_weigher(exponent), seed=seed)
        case "advantage":
            return WeightedSelector(weigh=advantage_weigher(exponent), seed=seed)
        case "staleness":
            return StalenessSelector(decay=decay, seed=seed)
