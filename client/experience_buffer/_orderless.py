"""Metadata without what is chance in it: the order of sets, which differs between processes."""

from __future__ import annotations

import pickle
from typing import Any, Final

_NATURAL: Final = (str, bytes, int)


def orderless(value: Any) -> Any:
    """Plain data with a tuple for each set, alike for equal sets; the very same object without any.

    Containers that are shared are walked once.
    """
    return _orderless(value, {})


def _orderless(value: Any, known: dict[int, Any]) -> Any:
    kind = type(value)
    if kind is set or kind is frozenset:
        return kind.__name__, sorted(value, key=_place)
    if kind is not dict and kind is not list and kind is not tuple:
        return value
    found = known.get(id(value))
    if found is None:
        members = list(value.values() if kind is dict else value)
        changed = [_orderless(member, known) for member in members]
        if all(new is old for new, old in zip(changed, members, strict=True)):
            found = value
        else:
            found = dict(zip(value, changed, strict=True)) if kind is dict else kind(changed)
        known[id(value)] = found
    return found


def _place(member: Any) -> tuple[str, Any]:
    kind = type(member)
    # Only of few members is it costly: large sets have texts, bytes and small integers alone.
    return kind.__name__, member if kind in _NATURAL else pickle.dumps(member, protocol=5)
