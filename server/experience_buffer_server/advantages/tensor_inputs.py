"""Whether an estimator can read what lies in an experience's tensors: dtypes and numbers.

Asked by the gate, so that nothing is stored for which a group can't be computed. Lengths were looked
at before. Legend: T response tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np

from experience_buffer_server.advantages.arrays.decoding import (
    Numbers,
    Raw,
    are_in_float32,
    bad_places,
    decode_mask,
    decode_numbers,
    odd_marks,
)
from experience_buffer_server.advantages.arrays.values import (
    FLOAT_DTYPES,
    MASK_DTYPES,
    NUMBER_DTYPES,
)

Elements = tuple[str, Raw]
"""Safetensors dtype code, such as `BF16`, and the little-endian elements of one dimension."""

_BOOTSTRAPPED: Final = "values"


def unreadable(
    names: Collection[str],
    *,
    mask: Elements | None,
    tensors: Mapping[str, Elements],
    lists: Mapping[str, Any],
    is_truncated: bool,
) -> str:
    """Say what of an experience an estimator can't read, and what to send; empty: nothing.

    Args:
        names: Those of `COLUMNS` that it reads.
        mask: The action mask, T; None: all tokens are valid.
        tensors: The inputs that are tensors, T each, of `values` perhaps one more.
        lists: The inputs that are lists of numbers in `info`, as long; others aren't looked at.
        is_truncated: Whether a bootstrap value would be used.
    """
    if mask is not None and (problem := mask_problem(*mask)):
        return problem
    for name in names:
        label, numbers = name, None
        if name in tensors:
            code, data = tensors[name]
            if code not in NUMBER_DTYPES:
                return f"{name} has dtype {code}; send one of {', '.join(NUMBER_DTYPES)}"
            numbers = decode_numbers(data, code)
        elif name in lists:
            label, numbers = f"info[{name!r}]", np.array(array("d", lists[name]))
        if numbers is not None and (
            problem := _number_problem(label, numbers, mask, name, is_truncated)
        ):
            return problem
    return ""


def is_all_ones(code: str, data: Raw) -> bool:
    """Whether a mask lets every token through; one that can't be read doesn't."""
    return code in MASK_DTYPES and bool(decode_mask(data, code).all())


def mask_problem(code: str, data: Raw) -> str:
    """Say why an action mask isn't one, and what to send; empty where it is."""
    if code not in MASK_DTYPES:
        return f"action_mask has dtype {code}; send one of {', '.join(MASK_DTYPES)}"
    # A token is trained on or it isn't: anything else is somebody's weight, label or padding.
    odd = odd_marks(data, code)
    if not odd.size:
        return ""
    place = int(odd[0])
    mark = float(decode_numbers(data, code)[place])
    return (
        f"action_mask is {mark if code in FLOAT_DTYPES else int(mark)} at response token {place}; send 1 where a token is "
        "trained on and 0 where it isn't"
    )


def _number_problem(
    label: str, numbers: Numbers, mask: Elements | None, name: str, is_truncated: bool
) -> str:
    if are_in_float32(numbers):
        return ""
    valid = np.ones(len(numbers), np.uint8)
    if mask is not None:
        marks = decode_mask(mask[1], mask[0])
        valid[: len(marks)] = marks
        if len(numbers) > len(marks):
            valid[len(marks) :] = name == _BOOTSTRAPPED and is_truncated
    bad = bad_places(numbers, valid)
    if not bad.size:
        return ""
    place = int(bad[0])
    return (
        f"{label} is {float(numbers[place])!r} at response token {place}, which isn't finite in "
        "float32; send finite numbers, or mask the token (action_mask 0 there)"
    )
