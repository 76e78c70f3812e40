"""Names, scopes, needs and parameters of the estimators.

Nothing here loads torch, so that configuration can be validated by a process that never computes.
The computations are in one module per family, found through `registry.py`; every name here has
its entry there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

Scope = Literal["group", "item"]
ParameterValue = float | bool | str

MASK_MODES = ("count", "skip")
"""`count`: a masked token is a step without reward and value. `skip`: it is no step."""


class ParameterError(ValueError):
    """An estimator's name or parameter isn't acceptable; the message names it and the limit."""


def _number(
    default: float, *, minimum: float, maximum: float, above_minimum: bool = False
) -> float:
    bounds = {"minimum": minimum, "maximum": maximum, "above_minimum": above_minimum}
    default_field: float = field(default=default, metadata=bounds)
    return default_field


def _choice(default: str, options: tuple[str, ...]) -> str:
    default_field: str = field(default=default, metadata={"options": options})
    return default_field


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoParameters:
    """Parameters of `grpo`."""

    eps: float = _number(1e-6, minimum=0.0, maximum=1.0, above_minimum=True)
    """Added to the standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceParameters:
    """Parameters of `reinforce` and of the token stage of `rloo`."""

    gamma: float = _number(1.0, minimum=0.0, maximum=1.0)
    """Discount per step."""
    mask_mode: str = _choice("skip", MASK_MODES)
    """What a masked token between valid ones is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlooParameters(ReinforceParameters):
    """Parameters of `rloo`: those of `reinforce`, which spreads the score over the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaeParameters(ReinforceParameters):
    """Parameters of `gae`."""

    lam: float = _number(1.0, minimum=0.0, maximum=1.0)
    """Lambda: weight of later temporal differences."""


EstimatorParameters = GrpoParameters | ReinforceParameters | RlooParameters | GaeParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorSpec:
    """What the rest of the server needs to know of an estimator."""

    name: str
    """Name recorded with what was computed."""
    scope: Scope
    """`group`: needs all members of a group at once. `item`: each experience stands alone."""
    needs: tuple[str, ...]
    """Fields an experience must carry; `a|b` is met by either, the later one is preferred."""
    parameters: type[EstimatorParameters]
    """Frozen dataclass with defaults and bounds."""


_GRPO = EstimatorSpec(name="grpo", scope="group", needs=("reward",), parameters=GrpoParameters)

ESTIMATORS: Mapping[str, EstimatorSpec] = {
    "grpo": _GRPO,
    "group_norm": _GRPO,
    "rloo": EstimatorSpec(name="rloo", scope="group", needs=("reward",), parameters=RlooParameters),
    "reinforce": EstimatorSpec(
        name="reinforce",
        scope="item",
        needs=("reward|token_level_reward",),
        parameters=ReinforceParameters,
    ),
    "gae": EstimatorSpec(
        name="gae",
        scope="item",
        needs=("values", "reward|token_level_reward"),
        parameters=GaeParameters,
    ),
}
"""Every estimator by the names a configuration may use."""


def estimator_spec(name: str) -> EstimatorSpec:
    """Return what is known of an estimator.

    Raises:
        ParameterError: There is no such estimator.
    """
    spec = ESTIMATORS.get(name)
    if spec is None:
        raise ParameterError(f"unknown estimator {name!r}; choose one of {', '.join(ESTIMATORS)}")
    return spec


def required_fields(name: str) -> tuple[str, ...]:
    """Return the fields an experience must carry for an estimator; `a|b` is met by either.

    Raises:
        ParameterError: There is no such estimator.
    """
    return estimator_spec(name).needs


def missing_fields(name: str, present: Collection[str]) -> tuple[str, ...]:
    """Return those of `required_fields(name)` that an experience with `present` fields lacks.

    Raises:
        ParameterError: There is no such estimator.
    """
    return tuple(
        need for need in required_fields(name) if not set(need.split("|")).intersection(present)
    )


def validate_parameters(name: str, parameters: Mapping[str, ParameterValue]) -> EstimatorParameters:
    """Check parameters against an estimator's names, types and bounds, and fill in defaults.

    Raises:
        ParameterError: Unknown estimator, unknown parameter, wrong type, or out of bounds.
    """
    spec = estimator_spec(name)
    fields = {known.name: known for known in dataclasses.fields(spec.parameters)}
    checked: dict[str, ParameterValue] = {}
    for key, value in parameters.items():
        if key not in fields:
            raise ParameterError(
                f"estimator {name!r} has no parameter {key!r}; it has {', '.join(fields)}"
            )
        checked[key] = _checked(f"{name}.{key}", value, fields[key].metadata)
    # The checks above stand for the types that a call with keywords from a mapping can't show.
    return spec.parameters(**checked)  # type: ignore[arg-type]


def _checked(label: str, value: ParameterValue, limits: Mapping[str, object]) -> ParameterValue:
    options = limits.get("options")
    if isinstance(options, tuple):
        if value not in options:
            raise ParameterError(f"{label} is {value!r}; choose one of {', '.join(options)}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterError(f"{label} is {value!r}; give a number")
    low, high, above = limits["minimum"], limits["maximum"], limits["above_minimum"]
    assert isinstance(low, float)
    assert isinstance(high, float)
    inside = (value > low if above else value >= low) and value <= high
    if not inside or math.isnan(value):
        raise ParameterError(
            f"{label} is {value!r}; it must lie in {'(' if above else '['}{low}, {high}]"
        )
    return float(value)
