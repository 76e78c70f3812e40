"""Plain data as JSON texts in a table, of bounded size: texts that are shared in a payload multiply here."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

from experience_buffer._show import plain

MOST_CHARS: Final = 64 << 20
"""Of the text that one value becomes."""
_SMALL_BYTES: Final = 4096
"""Metadata of a payload that can't become much, whatever it shares."""
_PER_VALUE: Final = 8


def _else(value: object) -> object:
    """What JSON hasn't: sets as lists, bytes in base64."""
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return repr(value)


_ENCODER: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_else
)


def encoded(value: Any, *, metadata_bytes: int) -> str | None:
    """A value as JSON; None where there is none, or it would be too large.

    NaN and the infinities become texts, keys too.

    Args:
        value: Plain data, as metadata holds it.
        metadata_bytes: Of the metadata that it is a part of.
    """
    if value is None:
        return None
    if metadata_bytes > _SMALL_BYTES and _room_after(value, MOST_CHARS) < 0:
        return None
    try:
        return _ENCODER.encode(value)
    except (ValueError, TypeError):
        return _ENCODER.encode(_speakable(value))


def _speakable(value: Any) -> Any:
    """As JSON has it, where its own rules refuse a number or a key."""
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else str(key): _speakable(each)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_speakable(each) for each in value]
    return plain(value)


def _room_after(value: Any, room: int) -> int:
    room -= _PER_VALUE
    if isinstance(value, (str, bytes)):
        return room - len(value)
    if isinstance(value, int):
        return room - value.bit_length() // 3
    if isinstance(value, Mapping):
        for key, each in value.items():
            room = _room_after(each, _room_after(key, room))
            if room < 0:
                break
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            room = _room_after(each, room)
            if room < 0:
                break
    return room
