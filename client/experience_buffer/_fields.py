"""What `Experience` is made of: attributes kept in its `extra` and `info`, tensors made of lists.

Torch is imported when a tensor is made, never by importing this module.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar, overload

if TYPE_CHECKING:
    from typing import Self

    import torch
    from torch import Tensor

    TensorLike: TypeAlias = Tensor | Sequence[Any] | Any
    """A tensor, or what becomes one: a (nested) list, tuple or NumPy array."""

T = TypeVar("T", float, int, str)

EXTRA_INPUTS: Final = {"values": "float32", "ref_logprobs": "float32", "versions": "int64"}
"""Extra tensors that are attributes too, and the dtypes that lists become."""
INFO_INPUTS: Final[dict[str, type]] = {
    "baseline_reward": float,
    "env_state_hash": str,
    "num_turns": int,
}
"""Entries of `info` that are attributes too, and their types."""


@dataclass(frozen=True, slots=True)
class CustomField:
    """A value of `info` that a trainer wants as a tensor of the batch.

    Attributes:
        source_field: Key in `Experience.info`.
        destination_field: Name of the batch's attribute.
        data_type: Its dtype, such as `torch.float32`.
    """

    source_field: str
    destination_field: str
    data_type: torch.dtype


# Where everyone finds it, and pickles look for it.
CustomField.__module__ = "experience_buffer.experience"


class ExtraTensor:
    """An attribute that is the tensor of its name in `extra`; None where there is none."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, experience: None, owner: type) -> Self: ...
    @overload
    def __get__(self, experience: Any, owner: type) -> Tensor | None: ...
    def __get__(self, experience: Any, owner: type) -> Any:
        return self if experience is None else experience.extra.get(self._name)

    def __set__(self, experience: Any, value: TensorLike | None) -> None:
        if value is None:
            experience.extra.pop(self._name, None)
        else:
            experience.extra[self._name] = tensor(value, EXTRA_INPUTS[self._name])


class InfoValue(Generic[T]):
    """An attribute that is the entry of its name in `info`; None where there is none.

    Setting it replaces the dict, which other experiences may share.
    """

    def __init__(self, kind: type[T]) -> None:
        self._kind: type[T] = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, experience: None, owner: type) -> Self: ...
    @overload
    def __get__(self, experience: Any, owner: type) -> T | None: ...
    def __get__(self, experience: Any, owner: type) -> Any:
        return self if experience is None else experience.info.get(self._name)

    def __set__(self, experience: Any, value: T | None) -> None:
        info = {key: entry for key, entry in experience.info.items() if key != self._name}
        if value is not None:
            info[self._name] = info_value(self._kind, value, self._name)
        experience.info = info


_READERS: Final[dict[type, tuple[Callable[[Any], Any], str]]] = {
    # The plus sign refuses text, which float() alone would read.
    float: (lambda value: float(+value), "a number"),
    int: (lambda value: int(operator.index(value)), "a whole number"),
    str: (str.__str__, "text, such as a digest's hexdigest()"),
}


def info_value(kind: type[T], value: Any, name: str) -> T:
    """Read what is to become an entry of `info`: a Python value, or NumPy's or torch's scalar.

    Raises:
        TypeError: It is of another kind.
    """
    read, wanted = _READERS[kind]
    try:
        plain: T = read(value)
    except (TypeError, ValueError, OverflowError):  # ValueError: a tensor of several elements.
        raise TypeError(f"{name} is {value!r:.80}; give {wanted}") from None
    return plain


def tensor(value: TensorLike, list_dtype: str | None) -> Tensor:
    """Return a tensor as it is; make one of a list with a dtype, of anything else with its own."""
    import torch

    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, list) and list_dtype is not None:
        return torch.tensor(value, dtype=getattr(torch, list_dtype))
    return torch.tensor(value)


def optional_tensor(value: TensorLike | None, list_dtype: str) -> Tensor | None:
    """Do what `tensor` does, unless there is nothing."""
    return None if value is None else tensor(value, list_dtype)
