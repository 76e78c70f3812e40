"""From a protobuf `Struct` to plain data, where its JSON mapping would raise on NaN."""

from __future__ import annotations

import math
from typing import Any, Final

from google.protobuf import struct_pb2

MAX_DEPTH: Final = 32
"""Levels of lists and structs within one another; protobuf's own limit lies at about 33."""


_MAX_NAME: Final = 80


class StructValueError(ValueError):
    """An entry can't be stored; the message names it and says what to send."""


def plain_entries(message: struct_pb2.Struct, *, label: str) -> dict[str, Any]:
    """Read a struct's entries; every number is a float.

    Args:
        message: The struct.
        label: What it is called in errors.

    Raises:
        StructValueError: A number isn't finite, or the nesting is deeper than `MAX_DEPTH`.
    """
    try:
        return _entries(message, 1)
    except _RefusedError as refusal:
        raise StructValueError(f"{label}{refusal.path}{refusal.reason}") from None


class _RefusedError(Exception):
    """What can't be stored; the path to it grows on the way out, not for each that can."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = ""


def _entries(message: struct_pb2.Struct, depth: int) -> dict[str, Any]:
    _check_depth(depth)
    entries = {}
    for name, value in message.fields.items():
        try:
            entries[name] = _plain(value, depth)
        except _RefusedError as refusal:
            refusal.path = f"[{name[:_MAX_NAME]!r}]{refusal.path}"
            raise
    return entries


def _members(message: struct_pb2.ListValue, depth: int) -> list[Any]:
    _check_depth(depth)
    members = []
    for i, value in enumerate(message.values):
        try:
            members.append(_plain(value, depth))
        except _RefusedError as refusal:
            refusal.path = f"[{i}]{refusal.path}"
            raise
    return members


def _plain(value: struct_pb2.Value, depth: int) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":
            if not math.isfinite(value.number_value):
                raise _RefusedError(f" is {value.number_value}; send a finite number")
            return value.number_value
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "list_value":
            return _members(value.list_value, depth + 1)
        case "struct_value":
            return _entries(value.struct_value, depth + 1)
        case _:
            return None


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _RefusedError(f" is nested deeper than {MAX_DEPTH} levels; send flatter data")


__all__ = ["MAX_DEPTH", "StructValueError", "plain_entries"]
