"""Which experiences a call is about, as its request says it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from experience_buffer._arguments import as_flag, misspelt, refused
from experience_buffer._messages import fields
from experience_buffer._messages.names import GROUP_STATE, STATE
from experience_buffer.errors import InvalidRequestError
from experience_buffer.looking import Where
from experience_buffer.v1 import service_pb2 as pb

_RANGES: Final = (
    "reward",
    "response_tokens",
    "policy_version",
    "staleness",
    "push_time",
    "departure_time",
)
_RANGE: Final = "(lowest, highest), each a number or None"
_NUM_ENDS: Final = 2


def filter_of(where: Mapping[str, Any]) -> pb.Filter:
    """Make a filter of what a verb was given by the names of `Where`; what is None or empty matches all.

    Raises:
        InvalidRequestError: A name isn't known, or a value can't be.
    """
    made = pb.Filter()
    for name, value in where.items():
        if name not in Where.__annotations__:
            raise InvalidRequestError(
                f"there is no filter {name!r}; {misspelt(name, Where.__annotations__)}",
                subject=name,
            )
        if value is None:
            continue
        if name in _RANGES:
            _set_range(made, name, value)
        elif name == "state":
            made.state = STATE.number(value, name)
        elif name == "flags":
            made.flags.extend(fields.texts(name, value))
        elif name == "truncated":
            made.truncated = as_flag(name, value)
        else:
            fields.fill(made, {name: value})
    return made


def _set_range(made: pb.Filter, name: str, value: Any) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != _NUM_ENDS:
        raise refused(name, value, _RANGE)
    for end, number in zip(("min", "max"), value, strict=True):
        if number is None:
            continue
        field = made.DESCRIPTOR.fields_by_name[f"{end}_{name}"]
        setattr(made, field.name, fields.plain(f"{name}[{end == 'max':d}]", number, field))


def group_states(state: str | Sequence[str] | None) -> list[int]:
    """The states of groups that are asked for; none: all.

    Raises:
        InvalidRequestError: There is no such state.
    """
    names = [] if state is None else fields.texts("state", state)
    return [GROUP_STATE.number(name, "state") for name in names]
