"""NumPy's arrays and other libraries' as dense memory, and dense memory as NumPy's arrays.

NumPy is imported by what makes arrays, never by importing this module.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from experience_buffer._codec.safetensors import TensorView
from experience_buffer._dense.lists import list_view
from experience_buffer._dense.rules import CODES, NAMES, Rule, refusal

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BUFFER_CODES: Final = {
    ("f", 4): "F32",
    ("d", 8): "F64",
    ("e", 2): "F16",
    ("?", 1): "BOOL",
    **{(kind, size): f"I{8 * size}" for kind in "bhilq" for size in (1, 2, 4, 8)},
    **{(kind, size): f"U{8 * size}" for kind in "BHILQ" for size in (1, 2, 4, 8)},
}
"""Dtype codes by format character and item size of the buffer protocol."""


def array_view(array: NDArray[Any], where: str, rule: Rule) -> TensorView:
    """The memory of an array, copied where it doesn't lie as a payload has it.

    Args:
        array: Of NumPy's.
        where: The field, for errors.
        rule: The field's.

    Raises:
        InvalidRequestError: The field can't hold it as it is.
    """
    import numpy as np

    if type(array) is not np.ndarray:
        if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
            raise refusal(where, "is a masked array; give one without masked elements")
        array = np.asarray(array)
    dtype = array.dtype
    if dtype.kind == "O":
        return list_view(array.tolist(), where, rule) if array.ndim else _scalar(array, where, rule)
    code = _code(dtype)
    if code is None:
        raise refusal(
            where, f"is an array of {dtype}; {rule.wanted}, of a dtype that torch has too"
        )
    if not dtype.isnative or not array.flags.c_contiguous:
        array = array.astype(dtype.newbyteorder("="), order="C", copy=False)
    flat: Any = array.reshape(-1).view(np.uint8)
    return TensorView(code, array.shape, memoryview(flat))


def buffer_view(value: Any, where: str, rule: Rule) -> TensorView:
    """Copy what another library offers by the buffer protocol, such as an `array.array`.

    Raises:
        InvalidRequestError: The field can't hold it as it is.
        TypeError: It offers nothing.
    """
    view = memoryview(value)
    code = None if isinstance(value, (bytes, bytearray)) else _code_of(view)
    if code is None:
        raise refusal(where, f"is a {type(value).__name__}; {rule.wanted}")
    return TensorView(code, tuple(view.shape or ()), memoryview(bytearray(view.tobytes())))


def array_of(view: TensorView) -> NDArray[Any]:
    """Make an array on a view's memory; copied only if that can't be written to.

    Raises:
        TypeError: NumPy has no such dtype.
    """
    import numpy as np

    try:
        dtype = np.dtype(NAMES[view.dtype])
    except TypeError:
        raise TypeError(
            f"NumPy has no {NAMES[view.dtype]}; read it with torch: pip install "
            "'experience-buffer[torch]'"
        ) from None
    data = bytearray(view.data) if view.data.readonly else view.data
    return np.frombuffer(data, dtype).reshape(view.shape)


@cache
def _code(dtype: Any) -> str | None:
    """Of a dtype of NumPy's, whose name takes long to make."""
    return CODES.get(dtype.name)


def _code_of(view: memoryview) -> str | None:
    return _BUFFER_CODES.get((view.format, view.itemsize))


def _scalar(array: NDArray[Any], where: str, rule: Rule) -> TensorView:
    view = list_view([array.item()], where, rule)
    return TensorView(view.dtype, (), view.data)
