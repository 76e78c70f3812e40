"""Names, scopes, needs and parameter classes of the estimators.

Nothing here loads NumPy or torch. The computations are in one module per family, found through
`registry.py`; every name here has its entry there. Estimators of the operator's own are declared in
the configuration (`custom.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from . import parameters as p
from .parameter_checks import ParameterError, checked_parameters
from .parameters import BatchParameters

Scope = Literal["group", "item"]

INPUT_FIELDS = (
    "reward",
    "token_level_reward",
    "values",
    "logprobs",
    "ref_logprobs",
    "teacher_logprobs",
    "baseline_reward",
    "env_state_hash",
)
"""What estimators may read of an experience beside its mask; the order is stored: append only."""
COLUMNS = ("token_level_reward", "values", "logprobs", "ref_logprobs", "teacher_logprobs")
"""Those of them with one number per response token: a tensor, or a list in `info`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorSpec:
    """What the rest of the server needs to know of an estimator."""

    name: str
    """Name recorded with what was computed."""
    compares: Scope
    """`group`: it compares the members of a group. `item`: each experience stands alone."""
    needs: tuple[str, ...]
    """Names of `INPUT_FIELDS` that an experience must carry; `a|b` is met by either."""
    parameters: type[BatchParameters]
    """Frozen dataclass with defaults and bounds."""
    runs_in_task: bool = False
    """It looks at the steps of the runs of a task, so groups must be tasks."""


_REWARD = ("reward",)
_ANY_REWARD = ("reward|token_level_reward",)


def _group(
    name: str, parameters: type[BatchParameters], *needs: str, runs_in_task: bool = False
) -> EstimatorSpec:
    return EstimatorSpec(
        name=name,
        compares="group",
        needs=(*_REWARD, *needs),
        parameters=parameters,
        runs_in_task=runs_in_task,
    )


def _item(name: str, parameters: type[BatchParameters], *needs: str) -> EstimatorSpec:
    return EstimatorSpec(name=name, compares="item", needs=needs, parameters=parameters)


_GRPO = _group("grpo", p.GrpoParameters)
_REINFORCE_BASELINE = _group("reinforce_baseline", p.ReinforceBaselineParameters)

ESTIMATORS: Mapping[str, EstimatorSpec] = {
    "grpo": _GRPO,
    "group_norm": _GRPO,
    "dr_grpo": _group("dr_grpo", p.GroupParameters),
    "rloo": _group("rloo", p.GroupParameters),
    "reinforce_baseline": _REINFORCE_BASELINE,
    "opmd": _group("opmd", p.OpmdParameters),
    "asymre": _group("asymre", p.AsymreParameters),
    "step_wise_grpo": _group("step_wise_grpo", p.StepWiseGrpoParameters, runs_in_task=True),
    "gigpo": _group("gigpo", p.GigpoParameters, "env_state_hash", runs_in_task=True),
    "cpgd": _item("cpgd", p.CpgdParameters, *_ANY_REWARD),
    "reinforce": _item("reinforce", p.ReinforceParameters, *_ANY_REWARD),
    "reinforce_plus_plus": _item(
        "reinforce_plus_plus", p.ReinforcePlusPlusParameters, *_ANY_REWARD
    ),
    "remax": _item("remax", p.ReinforceParameters, "baseline_reward", *_ANY_REWARD),
    "gae": _item("gae", p.GaeParameters, "values", *_ANY_REWARD),
    "on_policy_distill": _item(
        "on_policy_distill", p.DistillationParameters, "teacher_logprobs", "logprobs"
    ),
}
"""Every estimator that comes with the server, by the names a configuration may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One estimator with its checked parameters: what a buffer computes."""

    spec: EstimatorSpec
    parameters: BatchParameters

    @property
    def scope(self) -> Scope:
        """`group` if all members of a group are needed at once."""
        return "group" if self.parameters.uses_groups else self.spec.compares

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields an experience must carry; `a|b` is met by either."""
        uses_kl = getattr(self.parameters, "kl_coef", 0.0) > 0
        return (*self.spec.needs, *(("logprobs", "ref_logprobs") if uses_kl else ()))


def estimator_spec(name: str, custom: Mapping[str, EstimatorSpec] | None = None) -> EstimatorSpec:
    """Return what is known of an estimator.

    Raises:
        ParameterError: There is no such estimator.
    """
    known = {**ESTIMATORS, **(custom or {})}
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        what = f"did you mean {near[0]!r}? There are" if near else "choose one of"
        raise ParameterError(f"unknown estimator {name!r}; {what} {', '.join(known)}")
    return known[name]


def plan(
    name: str, parameters: Mapping[str, Any], custom: Mapping[str, EstimatorSpec] | None = None
) -> Plan:
    """Check an estimator's name and parameters, and fill in the defaults.

    Raises:
        ParameterError: Unknown estimator or parameter, wrong type, out of bounds, contradictory.
    """
    spec = estimator_spec(name, custom)
    return Plan(spec=spec, parameters=checked_parameters(name, spec.parameters, parameters))
