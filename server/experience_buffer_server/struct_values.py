"""From a protobuf `Struct` to plain data, where its JSON mapping would raise on NaN."""

from __future__ import annotations

import math
from typing import Any, Final

from google.protobuf import struct_pb2

MAX_DEPTH: Final = 32
"""Levels of lists and structs within one another; protobuf's own limit lies at about 33."""


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
    return _entries(message, label, 1)


def _entries(message: struct_pb2.Struct, path: str, depth: int) -> dict[str, Any]:
    _check_depth(path, depth)
    return {
        name: _plain(value, f"{path}[{name!r}]", depth) for name, value in message.fields.items()
    }


def _plain(value: struct_pb2.Value, path: str, depth: int) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":
            if not math.isfinite(value.number_value):
                raise StructValueError(f"{path} is {value.number_value}; send a finite number")
            return value.number_value
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "list_value":
            _check_depth(path, depth + 1)
            members = value.list_value.values
            return [_plain(member, f"{path}[{i}]", depth + 1) for i, member in enumerate(members)]
        case "struct_value":
            return _entries(value.struct_value, path, depth + 1)
        case _:
            return None


def _check_depth(path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise StructValueError(
            f"{path[:200]} is nested deeper than {MAX_DEPTH} levels; send flatter data"
        )


__all__ = ["MAX_DEPTH", "StructValueError", "plain_entries"]
