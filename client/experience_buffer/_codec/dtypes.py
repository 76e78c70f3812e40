"""Which dtype holds the values of two."""

from __future__ import annotations

import torch


def common_dtype(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The dtype that two promote to; int64 where torch has no rule for its unsigned integers.

    Raises:
        ValueError: They have none in common.
    """
    if one is other:
        return one
    try:
        return torch.promote_types(one, other)
    except RuntimeError:
        kinds = (one, other)
        has_floats = any(kind.is_floating_point or kind.is_complex for kind in kinds)
        if has_floats or torch.uint64 in kinds:
            raise ValueError(
                f"{one} in some experiences and {other} in others have no common dtype"
            ) from None
        return torch.int64
