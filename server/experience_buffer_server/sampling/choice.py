"""What a selector answers."""

from __future__ import annotations

from typing import NamedTuple


class Choice(NamedTuple):
    """A key and the probability that it had in this draw, 1.0 where nothing is random."""

    key: int
    probability: float
