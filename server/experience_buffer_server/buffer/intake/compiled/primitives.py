"""What the compiled functions do with bytes: look, compare, copy, read and write numbers.

Every index is checked: what isn't there raises IndexError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

int64 = cast(Callable[[Any], int], np.int64)
"""Compiled, `int` of a byte would be unsigned, and together with a signed number a float."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Compile a function together with those that call it."""
    return cast(_Function, numba.njit(boundscheck=True)(function))


def _vectorised(function: _Function) -> _Function:
    # Checks of each index would keep a loop from being vectorised. These go through slices, whose
    # bounds they have checked.
    return cast(_Function, numba.njit(boundscheck=False)(function))


def constant(text: str) -> Array:
    """A text of bytes that compiled functions compare with, or write."""
    return np.frombuffer(text.encode("latin-1"), np.uint8)


def names_table(names: tuple[str, ...]) -> tuple[Array, Array]:
    """Names one after another, and where each begins and ends; see `find`."""
    return constant("".join(names)), np.cumsum([0, *map(len, names)])


@compiled
def is_at(data: Array, pos: int, text: Array) -> bool:
    """Whether a text stands there."""
    if pos + text.size > data.size:
        return False
    for i in range(text.size):  # noqa: SIM110 - there are no generators in compiled code
        if data[pos + i] != text[i]:
            return False
    return True


@compiled
def find(data: Array, start: int, size: int, names: Array, ends: Array) -> int:
    """Which of a table's names stands there; -1: none."""
    for name in range(ends.size - 1):
        begin = ends[name]
        if ends[name + 1] - begin != size:
            continue
        for i in range(size):
            if data[start + i] != names[begin + i]:
                break
        else:
            return name
    return -1


@compiled
def are_equal(data: Array, start: int, other: int, size: int) -> bool:
    """Whether two texts of one size are equal."""
    for i in range(size):  # noqa: SIM110
        if data[start + i] != data[other + i]:
            return False
    return True


@compiled
def is_less(data: Array, start: int, size: int, other: int, other_size: int) -> bool:
    """Whether the first of two texts comes before the other, byte by byte."""
    for i in range(min(size, other_size)):
        if data[start + i] != data[other + i]:
            return bool(data[start + i] < data[other + i])
    return size < other_size


@compiled
def uint(data: Array, pos: int, size: int) -> int:
    """A number of up to 8 bytes, little endian; below 0 where it exceeds 63 bits."""
    value = int64(0)
    for i in range(size):
        value |= int64(data[pos + i]) << int64(8 * i)
    return value


@compiled
def decimal(data: Array, pos: int) -> tuple[int, int]:
    """A number as JSON has it, and where it ends; -1: none, or one of more than 15 digits."""
    value, first = int64(0), pos
    while 48 <= data[pos] <= 57:
        value = value * 10 + int64(data[pos]) - 48
        pos += 1
        if pos - first > 15:
            return -1, pos
    if pos == first or (data[first] == 48 and pos - first > 1):
        return -1, pos
    return value, pos


@_vectorised
def _is_ascii(data: Array, start: int, size: int) -> bool:
    if min(start, size) < 0 or start + size > data.size:
        raise IndexError
    text = data[start : start + size]
    joined = np.uint8(0)
    for i in range(text.size):
        joined |= text[i]
    return bool(joined < 0x80)


@compiled
def is_utf8(data: Array, start: int, size: int) -> bool:
    """Whether a text is valid Unicode without surrogates (RFC 3629, section 4)."""
    if _is_ascii(data, start, size):
        return True
    pos, end = start, start + size
    while pos < end:
        byte = data[pos]
        pos += 1
        if byte < 0x80:
            continue
        # The bounds of the second byte keep out spellings that are too long, surrogates, and
        # what is beyond Unicode.
        low, high = 0x80, 0xBF
        if 0xC2 <= byte <= 0xDF:
            more = 1
        elif 0xE0 <= byte <= 0xEF:
            more = 2
            low = 0xA0 if byte == 0xE0 else low
            high = 0x9F if byte == 0xED else high
        elif 0xF0 <= byte <= 0xF4:
            more = 3
            low = 0x90 if byte == 0xF0 else low
            high = 0x8F if byte == 0xF4 else high
        else:
            return False
        if pos + more > end:
            return False
        for i in range(more):
            if not low <= data[pos + i] <= high:
                return False
            low, high = 0x80, 0xBF
        pos += more
    return True


@_vectorised
def copy(data: Array, start: int, size: int, out: Array, w: int) -> int:
    """Copy bytes; returns where what follows is to be written, as all that write do."""
    if min(start, size, w) < 0 or start + size > data.size or w + size > out.size:
        raise IndexError
    source, target = data[start : start + size], out[w : w + size]
    for i in range(source.size):
        target[i] = source[i]
    return w + size


@compiled
def put(out: Array, w: int, text: Array) -> int:
    """Write a constant."""
    return copy(text, 0, text.size, out, w)


@compiled
def put_uint(out: Array, w: int, value: int, size: int) -> int:
    """Write a number, little endian."""
    for i in range(size):
        out[w + i] = (value >> (8 * i)) & 0xFF
    return w + size


@compiled
def put_decimal(out: Array, w: int, value: int) -> int:
    """Write a number of at least 0 as JSON has it."""
    size, rest = 1, value // 10
    while rest:
        size, rest = size + 1, rest // 10
    for i in range(size - 1, -1, -1):
        out[w + i] = 48 + value % 10
        value //= 10
    return w + size
