"""Estimators of the operator's own: what the server's configuration declares of them.

Nothing here imports the operator's code, nor NumPy: names, needs and parameters are checked by a
process that never computes. The code itself is loaded and called in `custom_functions.py`.
"""

from __future__ import annotations

import dataclasses
import keyword
import math
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from .parameter_checks import ParameterError
from .parameters import GroupParameters, ReinforceParameters, RewardParameters
from .specs import ESTIMATORS, INPUT_FIELDS, EstimatorSpec, Scope

Computes = Literal["scores", "tokens"]
"""`scores`: one number per experience, which goes through the later stages like a built-in's.
`tokens`: the advantages of all tokens."""

_LARGEST_WHOLE = 2**53
"""Whole numbers travel as doubles, which hold no larger ones exactly."""
_RESERVED = {"estimator", "zero_variance"}

_declared: dict[str, EstimatorSpec] = {}


def declare(specs: Mapping[str, EstimatorSpec]) -> None:
    """Make the operator's estimators known to this process, in place of those declared before.

    `server.load_settings` is the only caller: the configuration is read once, before the settings
    of any buffer are checked, and nothing that comes over the network ever gets here.
    """
    _declared.clear()
    _declared.update(specs)


def declared() -> Mapping[str, EstimatorSpec]:
    """The operator's estimators, by name."""
    return MappingProxyType(_declared)


def custom_spec(
    name: str,
    *,
    computes: Computes,
    compares: Scope,
    needs: Sequence[str],
    parameters: Mapping[str, object],
) -> EstimatorSpec:
    """Describe an estimator of the operator's own, as `specs.ESTIMATORS` describes the others.

    Args:
        name: Its name in the configuration.
        computes: What its function returns.
        compares: Whether it compares the members of a group.
        needs: What an experience must carry.
        parameters: Names and defaults of its own parameters.

    Raises:
        ParameterError: As `checked_name`, `checked_needs` and `check_parameters`.
    """
    check_parameters(parameters, computes=computes, compares=compares)
    base = _base(computes, compares)
    fields: list[tuple[str, type, Any]] = [
        (key, type(default), dataclasses.field(default=default, metadata=_limits(default)))
        for key, default in parameters.items()
    ]
    if compares == "group" and base is not GroupParameters:
        policy = GroupParameters.__dataclass_fields__["zero_variance"]
        limits: Any = dataclasses.field(default=policy.default, metadata=policy.metadata)
        fields.append((policy.name, str, limits))
    kind = dataclasses.make_dataclass(
        f"Parameters_{name}", fields, bases=(base,), frozen=True, slots=True, kw_only=True
    )
    return EstimatorSpec(
        name=checked_name(name), compares=compares, needs=checked_needs(needs), parameters=kind
    )


def checked_name(name: str) -> str:
    """Give a name back; raise `ParameterError` if it is that of a built-in estimator."""
    if name in ESTIMATORS:
        raise ParameterError(f"{name!r} is a built-in estimator; choose another name")
    return name


def checked_needs(needs: Sequence[str]) -> tuple[str, ...]:
    """Give needs back; raise `ParameterError` unless each names inputs, `a|b`: either will do."""
    if not needs:
        raise ParameterError(f"empty; name at least one of {', '.join(INPUT_FIELDS)}")
    for need in needs:
        unknown = [name for name in need.split("|") if name not in INPUT_FIELDS]
        if unknown:
            raise ParameterError(
                f"{need!r} asks for {unknown[0]!r}; an experience has {', '.join(INPUT_FIELDS)} "
                "(a|b: either will do)"
            )
    if len(set(needs)) != len(needs):
        raise ParameterError(f"{list(needs)} names something twice")
    return tuple(needs)


def check_parameters(
    parameters: Mapping[str, object], *, computes: Computes, compares: Scope
) -> None:
    """Raise `ParameterError` unless every parameter has a name of its own and a usable default."""
    base = _base(computes, compares)
    for name, default in parameters.items():
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
            raise ParameterError(
                f"{name!r} can't be a parameter's name; give letters, digits and underscores that "
                "begin with a letter"
            )
        if name in _RESERVED or hasattr(base, name):
            raise ParameterError(
                f"{name!r} is taken by the stages around the estimator; choose another name"
            )
        _check_default(name, default)


def _base(computes: Computes, compares: Scope) -> type[RewardParameters]:
    """The stages that take place around the function: who returns tokens has placed the rewards."""
    if computes == "tokens":
        return RewardParameters
    return GroupParameters if compares == "group" else ReinforceParameters


def _check_default(name: str, default: object) -> None:
    if isinstance(default, bool | str):
        return
    if isinstance(default, int) and abs(default) <= _LARGEST_WHOLE:
        return
    if isinstance(default, float) and math.isfinite(default):
        return
    raise ParameterError(
        f"the default of {name!r} is {default!r}; give true, false, a text, a finite number, or a "
        f"whole one of at most {_LARGEST_WHOLE}"
    )


def _limits(default: object) -> dict[str, Any]:
    """What `parameter_checks.checked_parameters` is to accept: anything of the default's kind."""
    if isinstance(default, bool):
        return {"switch": True}
    if isinstance(default, str):
        return {"text": True}
    if isinstance(default, int):
        return {"minimum": -_LARGEST_WHOLE, "maximum": _LARGEST_WHOLE, "whole": True}
    return {"minimum": -sys.float_info.max, "maximum": sys.float_info.max}
