"""Between what users give and read, and dense memory: one way in, one way out.

Torch and NumPy are imported by whoever reads, never by importing this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from experience_buffer._codec.safetensors import TensorView
from experience_buffer._dense.arrays import array_of, array_view, buffer_view
from experience_buffer._dense.elements import checked, is_array, is_tensor, tensors
from experience_buffer._dense.lists import list_view, not_a_list, numbers_of
from experience_buffer._dense.rules import NAMES, RANGES, Rule, refusal, wrong_element, wrong_shape

if TYPE_CHECKING:
    from torch import Tensor

    TensorLike: TypeAlias = Tensor | Sequence[Any] | Any
    """A tensor, or what becomes one: a (nested) list, tuple or NumPy array."""

Kept: TypeAlias = Any
"""A field as it is kept: a `Tensor` that was given or read, else a `TensorView`; a NumPy array that
was read where torch isn't installed."""

INSTALL = "pip install 'experience-buffer[torch]'"


def kept(value: TensorLike, where: str, rule: Rule) -> Kept:
    """Keep a tensor as it is, and copy a list or an array into dense memory.

    Args:
        value: What a user gives.
        where: The field, for errors.
        rule: The field's.

    Raises:
        InvalidRequestError: The field can't hold it as it is; the text names field and value.
    """
    if type(value) is TensorView:
        return value
    found = value if is_tensor(value) else _copied(value, where, rule)
    if rule.is_ids:
        _check_ids(found, where, rule)
    return found


def _check_ids(found: Kept, where: str, rule: Rule) -> None:
    if len(found.shape) != 1:
        raise wrong_shape(found.shape, where)
    is_view = type(found) is TensorView
    if found.dtype in RANGES if is_view else tensors().is_of_integers(found):
        return
    dtype = NAMES[found.dtype] if is_view else found.dtype
    reason = f"{dtype}; {rule.wanted}, of an integer dtype"
    values = numbers_of(found) if is_view else tensors().numbers_of(found)
    if not values:
        raise refusal(where, f"is of {reason}")
    place = next((place for place, value in enumerate(values) if value % 1), 0)
    raise wrong_element(values[place], where, found.shape, place, f", of {reason}")


def view_of(kept: Kept, where: str, rule: Rule) -> TensorView:
    """The memory of what is kept; not copied where it lies as a payload has it.

    Raises:
        InvalidRequestError: The field can't hold it as it is.
        TypeError: The elements of a tensor can't be read.
    """
    if type(kept) is TensorView:
        return kept
    if is_array(kept):
        return array_view(kept, where, rule)
    view: TensorView = tensors().memory_view(kept)
    return view


def ids(kept: Kept, where: str) -> list[int]:
    """The token ids that are kept, as a list.

    Raises:
        InvalidRequestError: Those of a tensor can't be read.
    """
    if type(kept) is TensorView:
        return numbers_of(kept)
    try:
        found: list[int] = checked(kept).tolist()
    except TypeError as error:
        raise refusal(where, f"is {error}") from None
    return found


def readable(view: TensorView) -> Any:
    """What a user reads: a tensor, or an array where torch isn't installed; on the view's memory.

    Raises:
        ImportError: Neither torch nor NumPy is installed.
        TypeError: Torch isn't installed, and NumPy has no such dtype.
    """
    return _reader()(view)


def require_torch(what: str) -> None:
    """Say what to install where torch isn't.

    Raises:
        ModuleNotFoundError: It isn't installed.
    """
    if _torch() is None:
        raise ModuleNotFoundError(f"{what} needs torch: {INSTALL}", name="torch")


def torch_dtype(name: str) -> Any:
    """The dtype of a name such as `"torch.float32"`; the name where torch isn't installed."""
    torch = _torch()
    return name if torch is None else getattr(torch, name.removeprefix("torch."))


@cache
def _torch() -> Any:
    """Torch; None where it isn't installed."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None
    return torch


@cache
def _reader() -> Callable[[TensorView], Any]:
    if _torch() is not None:
        make: Callable[[TensorView], Any] = tensors().tensor_of
        return make
    try:
        import numpy  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"tensors are read with torch, or with NumPy: {INSTALL}, or pip install numpy",
            name="torch",
        ) from None
    return array_of


def _copied(value: Any, where: str, rule: Rule) -> TensorView:
    if isinstance(value, (list, tuple)):
        return list_view(value, where, rule)
    if is_array(value):
        return array_view(value.copy(), where, rule)
    if isinstance(value, (str, bytes, bytearray)):
        raise not_a_list(value, where, rule)
    if hasattr(value, "__array__"):  # Of another library, such as JAX or pandas.
        import numpy as np

        return array_view(np.array(value), where, rule)
    try:
        return buffer_view(value, where, rule)
    except TypeError:
        if isinstance(value, Sequence):
            return list_view(list(value), where, rule)
        raise not_a_list(value, where, rule) from None
