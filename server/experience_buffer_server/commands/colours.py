"""The colours of values in a terminal: the scale of the page, so that a value looks the same in both.

Blue below zero, orange above, white at zero: people with any kind of colour-blindness can tell them apart.
"""

from __future__ import annotations

import math
from typing import Final

_FULL: Final = 3.0
"""From this size on a value has the whole colour."""
_FINE: Final = 0.05
"""About the size up to which the scale is linear; beyond it is logarithmic."""
_ZERO, _ABOVE, _BELOW = (247, 247, 247), (240, 138, 60), (84, 150, 226)
_LEAST: Final = 0.1
"""How much colour the smallest value has: its sign is always seen."""
_WORST_LOGPROB: Final = 10.0
MASKED: Final = "strike grey50"
PLAIN: Final = ""


def diverging(value: float | None) -> str:
    """The style of a value on the scale around zero; of none, and of NaN, no colour."""
    if value is None or math.isnan(value):
        return PLAIN
    size = min(1.0, math.log1p(abs(value) / _FINE) / math.log1p(_FULL / _FINE))
    part = max(_LEAST, size) if value else 0.0
    return _on(_mixed(_ABOVE if value > 0 else _BELOW, part))


def improbable(logprob: float | None) -> str:
    """The style of a log-probability: the less probable, the more orange."""
    if logprob is None or math.isnan(logprob):
        return PLAIN
    return _on(_mixed(_ABOVE, math.sqrt(min(1.0, max(0.0, -logprob) / _WORST_LOGPROB))))


def _mixed(colour: tuple[int, int, int], part: float) -> tuple[int, int, int]:
    first, second, third = (
        round(zero + (full - zero) * part) for zero, full in zip(_ZERO, colour, strict=True)
    )
    return first, second, third


def _on(colour: tuple[int, int, int]) -> str:
    red, green, blue = colour
    return f"#000000 on #{red:02x}{green:02x}{blue:02x}"
