"""What may be believed of the key of a damaged row: the key may be what is damaged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

NUMBER_MARGIN: Final = 1 << 32
"""Of seqs and ids within a buffer."""
ID_MARGIN: Final = 1 << 16
"""Of buffers: their ids have 4 bytes."""


def plausible(numbers: Iterable[int], *sound: int, margin: int = NUMBER_MARGIN) -> list[int]:
    """Numbers as damaged rows say them, held down to what may follow the highest sound one.

    A number too high costs as many numbers; far too high, it would leave none.
    """
    most = max(sound, default=0) + margin
    return [min(number, most) for number in numbers]
