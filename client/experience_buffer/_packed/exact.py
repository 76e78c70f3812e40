"""Conversions between dtypes that lose nothing, or name what they would lose. Imports torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def exactly(
    values: Tensor, dtype: torch.dtype, *, where: Callable[[list[int]], str], cure: str
) -> Tensor:
    """Convert values to a dtype that holds them.

    Fractions may be rounded to a narrower floating point, as is usual. Everything else counts as
    lost: what becomes infinite or 0, whole numbers that come out as others, fractions of integers,
    and in a bool whatever is neither 0 nor 1.

    Args:
        values: Of any shape.
        dtype: What they are to be.
        where: Names the element at an index, for the error.
        cure: What to do, for the error.

    Raises:
        ValueError: The dtype doesn't hold one of them.
    """
    converted = values.to(dtype)
    lost = _lost(values, converted)
    if lost is not None and lost.any():
        place = lost.nonzero()[0].tolist()
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{where(place)} is {values[tuple(place)].item()}, which {kind} can't hold; {cure}"
        )
    return converted


def holds(dtype: torch.dtype, value: float) -> bool:
    """Whether a dtype has a value, such as what a tensor is padded with; floats round theirs."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype == torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max and value == int(value)


def _lost(values: Tensor, converted: Tensor) -> Tensor | None:
    """Where a conversion has lost something, bool, of their shape; None where nothing can be lost."""
    before, after = values.dtype, converted.dtype
    if before in (after, torch.bool):
        return None
    if after == torch.bool:
        return (values != 0) & (values != 1)
    if not before.is_floating_point:
        return _lost_of_integers(values, converted)
    wide, back = values.double(), converted.double()
    changed = (wide != back) & ~(wide.isnan() & back.isnan())
    if not after.is_floating_point:
        # Beyond 64 bits it depends on the processor what comes out.
        return changed | (wide.abs() >= 2.0**63)
    return changed & ((wide == wide.trunc()) | back.isinf() | (back == 0))


def _lost_of_integers(values: Tensor, converted: Tensor) -> Tensor:
    wide = values.long()
    lost = wide != converted.long()
    if converted.dtype.is_floating_point:
        # The one that a float rounds up to 2**63 comes back as something else, or as itself.
        lost |= converted.double().abs() >= 2.0**63
    if torch.uint64 in (values.dtype, converted.dtype):
        # Their 64 bits are those of negative numbers in the other.
        lost |= wide < 0
    return lost
