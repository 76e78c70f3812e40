"""Metadata without what is chance in it: the order of sets, which differs between processes."""

from __future__ import annotations

import struct
from typing import Any, Final

_NATURAL: Final = frozenset({str, bytes, int})
_pack_float: Final = struct.Struct(">d").pack


def orderless(value: Any) -> Any:
    """Plain data with a tuple for each set, alike for equal sets; the very same object without any.

    What is shared is walked once, and stays shared.
    """
    return _orderless(value, {})


def _orderless(value: Any, known: dict[int, Any]) -> Any:
    kind = type(value)
    is_set = kind is set or kind is frozenset
    if not is_set and kind is not dict and kind is not list and kind is not tuple:
        return value
    found = known.get(id(value))
    if found is None:
        found = (kind.__name__, sorted(value, key=_place)) if is_set else _members(value, known)
        known[id(value)] = found
    return found


def _members(value: Any, known: dict[int, Any]) -> Any:
    members = list(value.values() if type(value) is dict else value)
    changed = [_orderless(member, known) for member in members]
    if all(new is old for new, old in zip(changed, members, strict=True)):
        return value
    return dict(zip(value, changed, strict=True)) if type(value) is dict else type(value)(changed)


def _place(member: Any) -> tuple[str, Any]:
    """Where a member comes; nothing of it is copied."""
    if type(member) is tuple:
        return "tuple", tuple(map(_part, member))
    return _part(member)


def _part(value: Any) -> tuple[str, Any]:
    kind = type(value)
    if kind in _NATURAL:
        return kind.__name__, value
    if kind is float:
        return "float", _pack_float(value)
    return kind.__name__, 0 if value is None else int(value)
