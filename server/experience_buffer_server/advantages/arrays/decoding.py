"""Raw elements of payloads as arrays: masks by what isn't zero, numbers exactly. With NumPy alone.

Legend: D tokens of one or more experiences, one after another.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .values import FLOAT_DTYPES, MASK_DTYPES

Raw = bytes | bytearray | memoryview
Numbers = NDArray[np.float32] | NDArray[np.float64]
Mask = NDArray[np.uint8]

FLOAT32: Final = np.finfo(np.float32)
_FLOAT_WORDS: Final = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
_INTEGER_WORDS: Final = {
    "BOOL": "u1", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2",
    "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8",
}  # fmt: skip
# A mask is only compared with zero, so signed and unsigned ones are decoded alike.
_MASK_WORDS: Final = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}


def decode_mask(data: Raw, code: str) -> Mask:
    """1 where an element isn't zero, else 0, shape [D]; `code` is one of `MASK_DTYPES`."""
    if not len(data):
        return np.zeros(0, dtype=np.uint8)
    if code in FLOAT_DTYPES:
        floats: NDArray[np.bool_] = decode_numbers(data, code) != 0
        return floats.view(np.uint8)
    words: NDArray[Any] = np.frombuffer(data, dtype=_MASK_WORDS[MASK_DTYPES[code]])
    valid: NDArray[np.bool_] = words != 0
    return valid.view(np.uint8)


def odd_marks(data: Raw, code: str) -> NDArray[np.int64]:
    """Where an element of a mask is neither 0 nor 1, ascending; `code` is one of `MASK_DTYPES`.

    A boolean is one of them, whatever its byte is.
    """
    if code == "BOOL" or not len(data):
        return np.zeros(0, dtype=np.int64)
    if code in FLOAT_DTYPES:
        numbers = decode_numbers(data, code)
        return np.flatnonzero((numbers != 0) & (numbers != 1))
    # Read without a sign, those below 0 are large.
    words: NDArray[Any] = np.frombuffer(data, dtype=_MASK_WORDS[MASK_DTYPES[code]])
    return np.flatnonzero(words > 1) if words.max() > 1 else np.zeros(0, dtype=np.int64)


def decode_numbers(data: Raw, code: str) -> Numbers:
    """The numbers, shape [D]; float64 of float64 and of integers, else float32.

    Integers beyond 2^53 are rounded once, as they are anyway when float32 is computed of them.

    Args:
        data: Little-endian elements.
        code: One of `NUMBER_DTYPES`.
    """
    if not len(data):
        is_wide = code == "F64" or code in _INTEGER_WORDS
        return np.zeros(0, np.float64) if is_wide else np.zeros(0, np.float32)
    if code == "BF16":
        # A bfloat16 is the upper half of a float32.
        halves: NDArray[Any] = np.frombuffer(data, dtype="<u2")
        return (halves.astype(np.uint32) << 16).view(np.float32)
    if code in _INTEGER_WORDS:
        integers: NDArray[Any] = np.frombuffer(data, dtype=_INTEGER_WORDS[code])
        return integers.astype(np.float64)
    decoded: NDArray[Any] = np.frombuffer(data, dtype=_FLOAT_WORDS[code])
    return decoded.astype(np.float32) if code == "F16" else decoded


def are_in_float32(numbers_D: Numbers) -> bool:
    """Whether all are finite, and still are once rounded to float32."""
    # A NaN becomes both extremes and fails both comparisons.
    return not numbers_D.size or bool(
        numbers_D.min() >= FLOAT32.min and numbers_D.max() <= FLOAT32.max
    )


def bad_places(numbers_D: Numbers, mask_D: Mask) -> NDArray[np.int64]:
    """Where a number isn't finite in float32 and the mask isn't 0, ascending."""
    # Masked ones are looked at apart only where something stands out.
    if are_in_float32(numbers_D):
        return np.zeros(0, dtype=np.int64)
    within = (numbers_D >= FLOAT32.min) & (numbers_D <= FLOAT32.max)
    return np.flatnonzero(~within & (mask_D != 0))
