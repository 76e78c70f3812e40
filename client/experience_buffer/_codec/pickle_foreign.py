"""What stands in for the calls a pickle asks for: nothing is ever called.

NumPy scalars, which Trinity-RFT's reward functions do produce, become Python numbers. Anything else
becomes a `Foreign` value, which only knows its name.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

_SCALAR: Final = frozenset({"numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar"})
_MAX_NAME: Final = 100
_FORMATS: Final = {
    "b1": "?",
    "i1": "b",
    "i2": "h",
    "i4": "i",
    "i8": "q",
    "u1": "B",
    "u2": "H",
    "u4": "I",
    "u8": "Q",
    "f2": "e",
    "f4": "f",
    "f8": "d",
}


@dataclass(slots=True, eq=False)
class Foreign:
    """A value that isn't plain data: the name of what would have made it."""

    name: str


@dataclass(slots=True, eq=False)
class _Global(Foreign):
    """A class or function, named and not yet called."""


@dataclass(slots=True, eq=False)
class _DType(Foreign):
    """A NumPy scalar's type: its code and, once its state is known, whether it is big endian."""

    code: str
    is_big_endian: bool = False


def find(module: str, name: str) -> Foreign:
    """Name a global."""
    # Both may be texts of any length that the pickle names again and again.
    return _Global(f"{module[:_MAX_NAME]}.{name[:_MAX_NAME]}")


def reduce(function: Foreign, args: object) -> object:
    """Stand in for `function(*args)`.

    Returns:
        A Python number, str or bytes for a NumPy scalar, else a `Foreign`.
    """
    if isinstance(function, _Global) and isinstance(args, tuple):
        if function.name == "numpy.dtype" and args and isinstance(args[0], str):
            code = args[0][:_MAX_NAME]
            return _DType(f"numpy.{code}", code)
        if function.name in _SCALAR and len(args) == 2:
            dtype, data = args
            if isinstance(dtype, _DType) and isinstance(data, bytes):
                return _scalar(dtype, data)
    return Foreign(function.name)


def build(target: object, state: object) -> bool:
    """Stand in for setting an object's state; False if `target` is plain data."""
    if isinstance(target, _DType) and isinstance(state, tuple) and len(state) > 1:
        target.is_big_endian = state[1] == ">"
    return isinstance(target, Foreign)


def _scalar(dtype: _DType, data: bytes) -> object:
    code = dtype.code
    layout = _FORMATS.get(code)
    if layout is not None and len(data) == struct.calcsize(layout):
        return struct.unpack((">" if dtype.is_big_endian else "<") + layout, data)[0]
    if code[:1] == "U" and len(data) % 4 == 0:
        encoding = "utf-32-be" if dtype.is_big_endian else "utf-32-le"
        try:
            return data.decode(encoding, "surrogatepass").rstrip("\0")
        except UnicodeDecodeError:
            return Foreign(dtype.name)
    if code[:1] == "S":
        return data.rstrip(b"\0")
    return Foreign(dtype.name)
