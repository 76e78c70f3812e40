"""What `Experience` is made of: attributes that keep what is given as it is, or say what is lost.

Torch and NumPy are imported when a tensor is read, never by importing this module.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

from experience_buffer._arguments import shown
from experience_buffer._codec.safetensors import TensorView
from experience_buffer._dense import convert
from experience_buffer._dense.elements import checked
from experience_buffer._dense.rules import ANY, RULES, Rule, refusal
from experience_buffer.eid import EID

if TYPE_CHECKING:
    from typing import Self

    import torch
    from torch import Tensor

    from experience_buffer._dense.convert import Kept
    from experience_buffer._dense.convert import TensorLike as TensorLike

T = TypeVar("T", float, int, str)
K = TypeVar("K")

EXTRA_INPUTS: Final = ("values", "ref_logprobs", "versions")
"""Extra tensors that are attributes too."""
INFO_INPUTS: Final[dict[str, type]] = {
    "baseline_reward": float,
    "env_state_hash": str,
    "num_turns": int,
}
"""Entries of `info` that are attributes too, and their types."""
_MAX_EXACT: Final = 2**53
"""Whole numbers up to it are float64 numbers."""


@dataclass(frozen=True, slots=True)
class CustomField:
    """A value of `info` that a trainer wants as a tensor of the batch.

    Attributes:
        source_field: Key in `Experience.info`.
        destination_field: Name of the batch's attribute.
        data_type: Its dtype, such as `torch.float32`, or that one's name, `"torch.float32"`.
    """

    source_field: str
    destination_field: str
    data_type: torch.dtype | str

    def __post_init__(self) -> None:
        from experience_buffer._codec.item import DTYPE_NAMES  # Here, since few have such fields.

        if str(self.data_type) not in DTYPE_NAMES:
            raise refusal(
                "data_type",
                f"is {shown(self.data_type)}; give a torch dtype, or its name such as "
                "'torch.float32'",
            )


# Where everyone finds it, and pickles look for it.
CustomField.__module__ = "experience_buffer.experience"


class TensorField:
    """An attribute that is a tensor, or None. It may be set to a list or an array, too.

    The tensor is made when it is first read, of the memory that was given or received; from then
    on it is the same one, and what is changed in it is sent.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._rule = RULES[name]

    @overload
    def __get__(self, experience: None, owner: type) -> Self: ...
    @overload
    def __get__(self, experience: Any, owner: type) -> Tensor | None: ...
    def __get__(self, experience: Any, owner: type) -> Any:
        if experience is None:
            return self
        state = experience.__dict__
        kept = state.get(self._name)
        if type(kept) is TensorView:
            kept = state[self._name] = convert.readable(kept)
        return kept

    def __set__(self, experience: Any, value: TensorLike | None) -> None:
        if value is not None:
            value = convert.kept(value, self._name, self._rule)
        experience.__dict__[self._name] = value


class TokensField(TensorField):
    """The same of a tensor that is always there."""

    if TYPE_CHECKING:

        @overload
        def __get__(self, experience: None, owner: type) -> Self: ...
        @overload
        def __get__(self, experience: Any, owner: type) -> Tensor: ...
        def __get__(self, experience: Any, owner: type) -> Any: ...

    def __set__(self, experience: Any, value: TensorLike) -> None:
        # None, too, is refused here.
        experience.__dict__[self._name] = convert.kept(value, self._name, self._rule)


def kept(experience: Any, name: str) -> Kept:
    """What a `TensorField` is, as it is kept: no tensor is made of it."""
    return experience.__dict__[name]


def num_rows(kept: Kept) -> int:
    """The size of its first dimension."""
    return int(kept.shape[0])


class Tensors(MutableMapping[str, "Tensor"]):
    """Tensors by name. What is set may be a list or an array, too; what is read is a tensor.

    Not to be changed while another thread uses it.
    """

    __slots__ = ("_attribute", "_kept", "_rules")

    def __init__(
        self, tensors: Mapping[str, TensorLike], *, attribute: str, rules: Mapping[str, Rule]
    ) -> None:
        self._attribute = attribute
        self._rules = rules
        self._kept: dict[str, Kept] = {}
        for name, tensor in tensors.items():
            self[name] = tensor

    def __getitem__(self, name: str) -> Tensor:
        kept = self._kept[name]
        if type(kept) is TensorView:
            kept = self._kept[name] = convert.readable(kept)
        tensor: Tensor = kept
        return tensor

    def __setitem__(self, name: str, value: TensorLike) -> None:
        if not isinstance(name, str):
            raise refusal(self._attribute, f"has the key {shown(name)}; names are texts")
        where = f"{self._attribute}[{name!r}]"
        self._kept[name] = convert.kept(value, where, self._rules.get(name, ANY))

    def __delitem__(self, name: str) -> None:
        del self._kept[name]

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return repr(dict(self))

    def kept(self) -> dict[str, Kept]:
        """The tensors as they are kept; nothing is made for it."""
        return self._kept


class ExtraField:
    """The attribute `extra`; it may be set to any mapping, which is copied."""

    if TYPE_CHECKING:

        @overload
        def __get__(self, experience: None, owner: type) -> Self: ...
        @overload
        def __get__(self, experience: Any, owner: type) -> Tensors: ...
        def __get__(self, experience: Any, owner: type) -> Any: ...

    def __set__(self, experience: Any, value: Mapping[str, TensorLike] | None) -> None:
        experience.__dict__["extra"] = _tensors(value or None, "extra", _EXTRA_RULES)


class ImagesField:
    """The attribute `multi_modal_inputs`; it may be set to any mapping, which is copied, or None."""

    if TYPE_CHECKING:

        @overload
        def __get__(self, experience: None, owner: type) -> Self: ...
        @overload
        def __get__(self, experience: Any, owner: type) -> Tensors | None: ...
        def __get__(self, experience: Any, owner: type) -> Any: ...

    def __set__(self, experience: Any, value: Mapping[str, TensorLike] | None) -> None:
        images = None if value is None else _tensors(value, "multi_modal_inputs", {})
        experience.__dict__["multi_modal_inputs"] = images


_EXTRA_RULES: Final = {name: RULES[name] for name in EXTRA_INPUTS}


def _tensors(
    value: Mapping[str, TensorLike] | None, attribute: str, rules: Mapping[str, Rule]
) -> Tensors:
    if value is None:
        return Tensors({}, attribute=attribute, rules=rules)
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        raise refusal(attribute, f"is a {kind}; give a dict of tensors, arrays or lists by name")
    # As they are kept: nothing is made to copy them.
    tensors = value.kept() if isinstance(value, Tensors) else value
    return Tensors(tensors, attribute=attribute, rules=rules)


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
            experience.extra[self._name] = value


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


class PlainField(Generic[K]):
    """An attribute that is a plain value; what else stands for it, such as a 0-d tensor, becomes one.

    It is read as any attribute is: there is nothing to do then.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    if TYPE_CHECKING:

        @overload
        def __get__(self, experience: None, owner: type) -> Self: ...
        @overload
        def __get__(self, experience: Any, owner: type) -> K: ...
        def __get__(self, experience: Any, owner: type) -> Any: ...

    def __set__(self, experience: Any, value: Any) -> None:
        experience.__dict__[self._name] = self._plain(value)

    def _plain(self, value: Any) -> K:
        raise NotImplementedError


class RewardField(PlainField["float | None"]):
    """A number as it is given, or None."""

    def _plain(self, value: Any) -> float | None:
        kind = type(value)
        is_exact = kind is int and -_MAX_EXACT <= value <= _MAX_EXACT
        if is_exact or value is None or kind is float or kind is bool:
            return value  # type: ignore[no-any-return]
        return info_value(float, value, self._name)


class CountField(PlainField[int]):
    """A whole number."""

    def _plain(self, value: Any) -> int:
        return value if type(value) is int else info_value(int, value, self._name)


class EidField(PlainField[EID]):
    """An `EID`, or what has its five parts, as attributes or by name; None: a new one."""

    def _plain(self, value: Any) -> EID:
        if isinstance(value, EID):
            return value
        if value is None:
            return EID()
        try:
            return EID(**value) if isinstance(value, Mapping) else EID(*_eid_parts(value))
        except (TypeError, AttributeError):
            raise refusal(
                self._name,
                f"is {shown(value)}; give EID(batch, task, run, step), or a dict of these",
            ) from None


_eid_parts = operator.attrgetter("batch", "task", "run", "step", "suffix")


def _float(value: Any) -> float:
    # The plus sign refuses text, which float() alone would read.
    number = float(+value)
    if isinstance(value, int) and int(number) != value:
        raise ValueError
    return number


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return int(operator.index(value))


_READERS: Final[dict[type, tuple[Callable[[Any], Any], str]]] = {
    float: (_float, "a number that float64 holds"),
    int: (_whole, "a whole number"),
    str: (str.__str__, "text, such as a digest's hexdigest()"),
}


def info_value(kind: type[T], value: Any, name: str) -> T:
    """Read what is to become a plain value: a Python one, or NumPy's or torch's of one element.

    Raises:
        InvalidRequestError: It is of another kind.
    """
    read, wanted = _READERS[kind]
    try:
        value = checked(value)
    except TypeError as error:
        raise refusal(name, f"is {error}") from None
    try:
        plain: T = read(value.item() if hasattr(value, "item") else value)
    except Exception:  # The caller's own class, or an array or tensor of several elements.
        raise refusal(name, f"is {shown(value)}; give {wanted}") from None
    return plain
