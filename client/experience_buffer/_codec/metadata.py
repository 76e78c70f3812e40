"""Metadata about to be written: what is plainly plain data is seen at a glance.

`plain_values` decides about everything else, and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from experience_buffer._codec.limits import DEFAULT_LIMITS
from experience_buffer._codec.plain_values import Normaliser

_ATOMS: Final = frozenset({str, type(None), float, bool, bytes})
_MAX_INT: Final = 2**63
_MAX_DEPTH: Final = 16
"""Far below the limit, since whatever is deeper is only looked at once more."""


def plain_metas(metas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the experiences' metadata as plain data, the very same objects where they are that.

    Raises:
        TrxpError: As `Normaliser.normal`.
    """
    if _room_after(metas, DEFAULT_LIMITS.max_nodes, _MAX_DEPTH) >= 0:
        return metas
    normaliser = Normaliser(DEFAULT_LIMITS)
    return [normaliser.normal(meta, index=index) for index, meta in enumerate(metas)]


def has_few_values(metas: list[Any]) -> bool:
    """Whether it is plain at a glance that a reader takes the metadata, whatever the texts' sizes.

    A value, with its key and what opens and closes it, takes four opcodes at most.
    """
    most = DEFAULT_LIMITS.max_nodes
    return _room_after(metas, most, _MAX_DEPTH) >= most - most // 4


def _room_after(values: Collection[Any], room: int, max_depth: int) -> int:
    """How many more values fit after those of a list or dict; below 0 where one may not be plain data.

    Only what is common is known here. What is shared is walked, and counted, each time.
    """
    room -= len(values) + 1
    for value in values:
        kind = type(value)
        if kind in _ATOMS:
            continue
        if kind is int:
            if not -_MAX_INT < value < _MAX_INT:
                return -1
        elif kind is not dict and kind is not list:
            return -1
        elif not value:
            room -= 1
        else:
            members = value
            if kind is dict:
                for key in value:
                    if type(key) is not str:
                        return -1
                members = value.values()
            room = _room_after(members, room, max_depth - 1) if max_depth else -1
            if room < 0:
                return room
    return room
