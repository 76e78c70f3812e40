"""How parameters are declared with their bounds, and how given values are checked against them.

Nothing here loads NumPy or torch. The parameters themselves are in `parameters.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, Protocol, TypeVar

ParameterValue = float | bool | str

LARGE = 1e9
_LEAST_EPS = 1e-30
"""Far below any deviation, and far from numbers whose reciprocal is infinite."""


class ParameterError(ValueError):
    """An estimator's name or parameter isn't acceptable; the message names it and the limit."""


class Checkable(Protocol):
    """A dataclass of parameters."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def check(self) -> None:
        """Raise `ParameterError` where values that are fine alone contradict one another."""


_Kind = TypeVar("_Kind", bound=Checkable)


def number(
    default: float, *, minimum: float = 0.0, maximum: float = LARGE, above_minimum: bool = False
) -> float:
    """Declare a number within bounds; `above_minimum`: the lower bound itself isn't allowed."""
    bounds = {"minimum": minimum, "maximum": maximum, "above_minimum": above_minimum}
    default_field: float = field(default=default, metadata=bounds)
    return default_field


def epsilon(default: float) -> float:
    """Declare what is added to a deviation of 0 or more, so that 0 divided by it is 0."""
    return number(default, minimum=_LEAST_EPS, maximum=1.0)


def count(default: int, *, minimum: int = 0, maximum: int = 1_000_000_000) -> int:
    """Declare a whole number within bounds."""
    bounds = {"minimum": minimum, "maximum": maximum, "whole": True}
    default_field: int = field(default=default, metadata=bounds)
    return default_field


def switch(default: bool) -> bool:
    """Declare what is on or off."""
    default_field: bool = field(default=default, metadata={"switch": True})
    return default_field


def choice(default: str, *options: str) -> str:
    """Declare one of several texts."""
    default_field: str = field(default=default, metadata={"options": options})
    return default_field


def refuse_idle(parameters: Checkable, *names: str, without: tuple[str, ...]) -> None:
    """Refuse parameters that have been set although the stage that reads them is off.

    Args:
        parameters: The values.
        names: Parameters of a stage.
        without: Those that turn it on: it is off while each is 0 or `none`.

    Raises:
        ParameterError: One of `names` differs from its default, and the stage is off.
    """
    if any(getattr(parameters, key) not in (0, "none") for key in without):
        return
    for name in names:
        value = getattr(parameters, name)
        if value != parameters.__dataclass_fields__[name].default:
            off = " and ".join(f"{key} is {getattr(parameters, key)!r}" for key in without)
            raise ParameterError(
                f"{name} is {value!r}, which has no effect while {off}; set "
                f"{' or '.join(without)} too, or leave {name} out"
            )


def checked_parameters(name: str, kind: type[_Kind], given: Mapping[str, Any]) -> _Kind:
    """Check given values against a parameter class, and fill in its defaults.

    Args:
        name: The estimator's name, for messages.
        kind: Its parameter class.
        given: What differs from the defaults.

    Raises:
        ParameterError: Unknown parameter, wrong type, out of bounds, contradictory or without
            effect.
    """
    fields = {known.name: known for known in dataclasses.fields(kind)}
    checked: dict[str, Any] = {}
    for key, value in given.items():
        if key not in fields:
            raise ParameterError(_unknown(name, kind, key, sorted(fields)))
        checked[key] = _checked(f"{name}.{key}", value, fields[key].metadata)
    parameters = kind(**checked)
    parameters.check()
    return parameters


def _unknown(name: str, kind: type, key: str, known: list[str]) -> str:
    start = f"estimator {name!r} has no parameter {key!r}; "
    close = difflib.get_close_matches(key, known, n=1)
    if not close:
        return f"{start}it has {', '.join(known)}"
    own = sorted(inspect.get_annotations(kind))
    return f"{start}did you mean {close[0]!r}?" + (f" Its own are {', '.join(own)}" if own else "")


def _checked(label: str, value: object, limits: Mapping[str, Any]) -> ParameterValue:
    options = limits.get("options")
    if options is not None:
        if not isinstance(value, str) or value not in options:
            raise ParameterError(f"{label} is {value!r}; choose one of {', '.join(options)}")
        return value
    if limits.get("switch"):
        if not isinstance(value, bool):
            raise ParameterError(f"{label} is {value!r}; give true or false")
        return value
    if limits.get("text"):
        if not isinstance(value, str):
            raise ParameterError(f"{label} is {value!r}; give a text")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterError(f"{label} is {value!r}; give a number")
    low, high, above = limits["minimum"], limits["maximum"], limits.get("above_minimum", False)
    inside = (value > low if above else value >= low) and value <= high
    if not inside or math.isnan(value):
        raise ParameterError(
            f"{label} is {value!r}; it must lie in {'(' if above else '['}{low}, {high}]"
        )
    if not limits.get("whole"):
        return float(value)
    if value != int(value):
        raise ParameterError(f"{label} is {value!r}; give a whole number")
    return int(value)
