"""Lists of numbers as dense memory. Needs neither torch nor NumPy."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from numbers import Integral, Real
from typing import Any, Final

from experience_buffer._arguments import shown
from experience_buffer._codec.safetensors import ITEM_BYTES, TensorView
from experience_buffer._dense.elements import checked
from experience_buffer._dense.rules import (
    NAMES,
    RANGES,
    Rule,
    element_at,
    refusal,
    wrong_element,
)

_FORMATS: Final = {
    **{f"I{8 * size}": letter for size, letter in zip((1, 2, 4, 8), "bhiq", strict=True)},
    **{f"U{8 * size}": letter for size, letter in zip((1, 2, 4, 8), "BHIQ", strict=True)},
    **{"F32": "f", "F64": "d", "F16": "e", "BOOL": "?"},
}
_EXACT_BITS: Final = 24
"""Whole numbers of as many bits are float32 numbers."""
_GIVE: Final = "give a list, a NumPy array or a tensor"


def list_view(values: Sequence[Any], where: str, rule: Rule) -> TensorView:
    """Copy a list, of numbers or of lists, into memory that can be written to.

    Args:
        values: A list or another sequence.
        where: The field, for errors.
        rule: The field's.

    Raises:
        InvalidRequestError: A value can't be kept as it is; the text names it and its place.
    """
    shape, flat, kinds = _flattened(values, where, rule)
    code = rule.list_dtype or ("F32" if not flat or "float" in kinds.values() else "I64")
    if rule.list_dtype is None and flat and set(kinds.values()) == {"bool"}:
        code = "BOOL"
    if code == "BOOL":
        data = _mask(flat, kinds, where, shape, rule)
    elif code in RANGES:
        data = _integers(flat, kinds, where, shape, rule, code)
    else:
        data = _floats(flat, kinds, where, shape, code)
    return TensorView(code, shape, memoryview(data))


def numbers_of(view: TensorView) -> list[Any]:
    """The real numbers of a view, flat; none where Python hasn't their dtype."""
    letter = _FORMATS.get(view.dtype)
    if letter is None:
        return []
    num_values = len(view.data) // ITEM_BYTES[view.dtype]
    return list(struct.unpack(f"<{num_values}{letter}", view.data))


def _flattened(
    values: Sequence[Any], where: str, rule: Rule
) -> tuple[tuple[int, ...], Sequence[Any], dict[type, str]]:
    """The shape of nested lists, their numbers behind one another, and what these are."""
    shape: tuple[int, ...] = (len(values),)
    flat = values
    while True:
        kinds = {kind: _kind(kind) for kind in set(map(type, flat))}
        found = set(kinds.values())
        if found <= {"int", "float", "bool"}:
            return shape, flat, kinds
        if "array" in found:  # Or a tensor: of one element, or of a row.
            flat = [
                _listed(each, where, shape, index) if kinds[type(each)] == "array" else each
                for index, each in enumerate(flat)
            ]
            continue
        if found != {"list"}:
            nested = ("int", "float", "bool") if "list" in found else ()
            _refuse_first(flat, kinds, (*nested, "other"), where, shape, f"; {rule.wanted}")
        num_each = len(flat[0])
        for index, row in enumerate(flat):
            if len(row) != num_each:
                reason = f", {len(row)} long, where the first has {num_each}; give rows of one size"
                raise wrong_element(row, where, shape, index, reason)
        shape = (*shape, num_each)
        flat = list(chain.from_iterable(flat))


def _kind(kind: type) -> str:
    if issubclass(kind, bool) or (kind.__module__ == "numpy" and kind.__name__ in _NUMPY_BOOLS):
        return "bool"
    if issubclass(kind, Integral):
        return "int"
    if issubclass(kind, Real):
        return "float"
    if issubclass(kind, (list, tuple)):
        return "list"
    return "array" if hasattr(kind, "tolist") else "other"


_NUMPY_BOOLS: Final = ("bool", "bool_")


def _listed(value: Any, where: str, shape: tuple[int, ...], index: int) -> Any:
    try:
        return checked(value).tolist()
    except TypeError as error:
        raise refusal(element_at(where, shape, index), f"is {error}") from None


def _refuse_first(
    flat: Sequence[Any],
    kinds: dict[type, str],
    unwanted: Iterable[str],
    where: str,
    shape: tuple[int, ...],
    reason: str,
) -> None:
    """Raise for the first value of these kinds, if there is one."""
    bad = {kind for kind, word in kinds.items() if word in unwanted}
    for index, value in enumerate(flat) if bad else ():
        if type(value) in bad:
            raise wrong_element(value, where, shape, index, reason)


def _mask(
    flat: Sequence[Any], kinds: dict[type, str], where: str, shape: tuple[int, ...], rule: Rule
) -> bytearray:
    if set(kinds.values()) - {"bool"}:
        for index, value in enumerate(flat) if not {0, 1}.issuperset(flat) else ():
            if value not in (0, 1):
                raise wrong_element(value, where, shape, index, f"; {rule.wanted}")
    return bytearray(map(bool, flat))


def _integers(
    flat: Sequence[Any],
    kinds: dict[type, str],
    where: str,
    shape: tuple[int, ...],
    rule: Rule,
    code: str,
) -> bytearray:
    unwanted = ("float", "bool") if rule.list_dtype else ()
    _refuse_first(flat, kinds, unwanted, where, shape, f"; {rule.wanted}")
    try:
        return _packed(flat, code)
    except (struct.error, OverflowError):
        least, greatest = RANGES[code]
        for index, value in enumerate(flat):
            if not least <= value <= greatest:
                reason = (
                    f", beyond {NAMES[code]} ({least} to {greatest}), which a list becomes; "
                    "give a NumPy array or a tensor of a dtype that holds it"
                )
                raise wrong_element(value, where, shape, index, reason) from None
        raise


def _floats(
    flat: Sequence[Any], kinds: dict[type, str], where: str, shape: tuple[int, ...], code: str
) -> bytearray:
    if "int" in kinds.values():
        _check_exact(flat, kinds, where, shape)
    try:
        return _packed(flat, code)
    except OverflowError:
        for index, value in enumerate(flat):
            try:
                _packed([value], code)
            except OverflowError:
                reason = (
                    f", beyond {NAMES[code]}, which a list becomes; give a NumPy array or a tensor "
                    "of float64"
                )
                raise wrong_element(value, where, shape, index, reason) from None
        raise


def _check_exact(
    flat: Sequence[Any], kinds: dict[type, str], where: str, shape: tuple[int, ...]
) -> None:
    """Check that whole numbers stay what they are as float32."""
    most = 1 << _EXACT_BITS
    is_int = {kind for kind, word in kinds.items() if word == "int"}
    for index, value in enumerate(flat):
        if type(value) in is_int and not -most <= value <= most:
            odd = abs(int(value))
            if odd.bit_length() - (odd & -odd).bit_length() + 1 > _EXACT_BITS:
                reason = (
                    ", which float32 would round, as a list becomes; give a NumPy array or a "
                    "tensor of int64 or float64"
                )
                raise wrong_element(value, where, shape, index, reason)


def _packed(flat: Sequence[Any], code: str) -> bytearray:
    data = bytearray(len(flat) * ITEM_BYTES[code])
    struct.pack_into(f"<{len(flat)}{_FORMATS[code]}", data, 0, *flat)
    return data


def not_a_list(value: Any, where: str, rule: Rule) -> Exception:
    """The error of what is neither a list nor an array nor a tensor."""
    return refusal(where, f"is {shown(value)}; {rule.wanted}: {_GIVE}")
