"""Whether one group can be computed, decided before it shares a launch with others.

Looks at fields, dtypes, lengths and scalar rewards. Numbers inside tensors are looked at when they
are packed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from .specs import EstimatorSpec
from .values import FLOAT_DTYPES, MASK_DTYPES, Column, ExperienceInput, GroupError


def check_group(members: Sequence[ExperienceInput], *, spec: EstimatorSpec) -> None:
    """Raise unless every member carries what the estimator reads.

    Raises:
        GroupError: Names the member by its index, the field, and what to send instead.
    """
    reads_tokens = any("token_level_reward" in need for need in spec.needs)
    for index, member in enumerate(members):
        where = f"experience {index} of the group"
        num_tokens = _length(member.mask, MASK_DTYPES, f"mask of {where}")
        if "values" in spec.needs:
            _check_lengths(
                member.values, (num_tokens, num_tokens + 1), f"values of {where}", num_tokens
            )
        if reads_tokens and member.token_level_reward is not None:
            _check_lengths(
                member.token_level_reward,
                (num_tokens,),
                f"token_level_reward of {where}",
                num_tokens,
            )
        else:
            _check_reward(member.reward, where)


def as_float32(value: float) -> float:
    """Round to the nearest float32, -0.0 to 0.0; infinity where it is out of float32's range."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(rounded) + 0.0


def _check_reward(reward: float | None, where: str) -> None:
    if reward is None:
        raise GroupError(
            f"reward of {where} is missing; push it with a reward, or push a tombstone for a "
            "rollout that failed"
        )
    if not math.isfinite(as_float32(reward)):
        raise GroupError(
            f"reward of {where} is {reward!r}, not finite in float32; push a finite reward, or "
            "push a tombstone for a rollout that failed"
        )


def _check_lengths(
    column: Column | None, allowed: tuple[int, ...], label: str, num_tokens: int
) -> None:
    if column is None:
        raise GroupError(f"{label} is missing; push it as an extra tensor of {num_tokens} elements")
    length = _length(column, FLOAT_DTYPES, label)
    if length not in allowed:
        expected = " or ".join(map(str, allowed))
        raise GroupError(
            f"{label} has {length} elements where its mask has {num_tokens}; send {expected}"
        )


def _length(column: Column, sizes: dict[str, int], label: str) -> int:
    size = sizes.get(column.dtype)
    if size is None:
        raise GroupError(f"{label} has dtype {column.dtype}; send one of {', '.join(sizes)}")
    length, rest = divmod(column.num_bytes, size)
    if rest:
        raise GroupError(
            f"{label} has {column.num_bytes} bytes, not a multiple of the {size} of {column.dtype}"
        )
    return length
