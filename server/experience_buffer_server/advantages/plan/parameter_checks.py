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
_OFF = (0, "none", "mean")
"""What a parameter is while the stage that it turns on is off."""


class ParameterError(ValueError):
    """An estimator's name or parameter isn't acceptable; the message names it and the limit."""


class Checkable(Protocol):
    """A dataclass of parameters."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def check(self) -> None:
        """Raise `ParameterError` where values that are fine alone contradict one another."""


_Kind = TypeVar("_Kind", bound=Checkable)


def _declared(default: Any, only_with: tuple[str, ...] = (), **limits: Any) -> Any:
    return field(default=default, metadata={**limits, "only_with": only_with})


def number(
    default: float,
    *,
    minimum: float = 0.0,
    maximum: float = LARGE,
    above_minimum: bool = False,
    only_with: tuple[str, ...] = (),
) -> Any:
    """Declare a number within bounds; `above_minimum`: the lower bound itself isn't allowed.

    Here and below, `only_with` names the parameters that turn on the stage that reads it: it is
    refused where it differs from its default, and each of them is off.
    """
    bounds = {"minimum": minimum, "maximum": maximum, "above_minimum": above_minimum}
    return _declared(default, only_with, **bounds)


def epsilon(default: float, *, only_with: tuple[str, ...] = ()) -> Any:
    """Declare what is added to a deviation of 0 or more, so that 0 divided by it is 0."""
    return number(default, minimum=_LEAST_EPS, maximum=1.0, only_with=only_with)


def count(
    default: int,
    *,
    minimum: int = 0,
    maximum: int = 1_000_000_000,
    only_with: tuple[str, ...] = (),
) -> Any:
    """Declare a whole number within bounds."""
    return _declared(default, only_with, minimum=minimum, maximum=maximum, whole=True)


def switch(default: bool, *, only_with: tuple[str, ...] = ()) -> Any:
    """Declare what is on or off."""
    return _declared(default, only_with, switch=True)


def choice(default: str, *options: str, only_with: tuple[str, ...] = ()) -> Any:
    """Declare one of several texts."""
    return _declared(default, only_with, options=options)


def _refuse_idle(parameters: Checkable) -> None:
    """Raise `ParameterError` where one has been set although the stage that reads it is off."""
    for known in dataclasses.fields(parameters):
        value, switches = getattr(parameters, known.name), known.metadata.get("only_with", ())
        stages = {key: getattr(parameters, key) for key in switches}
        if stages and value != known.default and all(stage in _OFF for stage in stages.values()):
            off = " and ".join(f"{key} is {stage!r}" for key, stage in stages.items())
            raise ParameterError(
                f"{known.name} is {value!r}, which has no effect while {off}; set "
                f"{' or '.join(stages)} too, or leave {known.name} out"
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
    _refuse_idle(parameters)
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
