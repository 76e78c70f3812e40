"""Advantages of packed experiences: pure functions from rewards, masks and values to float32.

Nothing here does I/O. Importing the package loads neither NumPy nor torch nor compiled loops:
names, parameters and values are there for a process that only validates; `compute` loads what it
computes with when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from experience_buffer_server.advantages.arrays.values import (
    Column,
    ExperienceAdvantages,
    ExperienceInput,
    GroupFailure,
    GroupResult,
)
from experience_buffer_server.advantages.plan.parameter_checks import ParameterError
from experience_buffer_server.advantages.plan.specs import (
    ESTIMATORS,
    INPUT_FIELDS,
    EstimatorSpec,
    Plan,
    estimator_spec,
    plan,
)

if TYPE_CHECKING:
    from experience_buffer_server.advantages.estimators.registry import Estimator
    from experience_buffer_server.advantages.plan.parameter_checks import ParameterValue
    from experience_buffer_server.advantages.stages.running_moments import RunningMoments

__all__ = [
    "ESTIMATORS",
    "INPUT_FIELDS",
    "Column",
    "EstimatorSpec",
    "ExperienceAdvantages",
    "ExperienceInput",
    "GroupFailure",
    "GroupResult",
    "ParameterError",
    "Plan",
    "compute",
    "estimator_spec",
    "plan",
]


def compute(
    groups: Sequence[Sequence[ExperienceInput]],
    *,
    estimator: str,
    parameters: Mapping[str, ParameterValue],
    device: str = "cpu",
    threads: int = 1,
    batches: Sequence[int] | None = None,
    moments: RunningMoments | None = None,
    counted: Sequence[bool] | None = None,
    custom: Mapping[str, tuple[EstimatorSpec, Estimator]] | None = None,
) -> list[GroupResult | GroupFailure]:
    """Compute the advantages of many groups in one packed launch.

    An experience's result depends on nothing but its group (for plans of scope `item`, on nothing
    but itself): the order of members and groups and the neighbours in the launch don't change a bit
    of it. Exceptions are what is configured to depend on more: the statistics of a batch, and
    running moments. It can be called from several threads, each with moments of its own.

    Args:
        groups: Members of each group, in any order, without tombstones: a failed rollout has no
            vote and gets no advantages. An empty group gives an empty result.
        estimator: A name of `ESTIMATORS` or of `custom`.
        parameters: Parameters that differ from the estimator's defaults.
        device: Where tokens are computed: `cpu`, or a torch device such as `cuda:0`.
        threads: Threads that the CPU's loops over tokens are spread over; they change no bit.
        batches: Per group, the batch whose statistics it shares, ascending; None: all groups are
            one batch. A group that fails isn't part of its batch.
        moments: Running moments of the buffer, updated in place in the order of the groups, without
            those that fail, and not if this raises; needed where the parameters use them.
        counted: Per group, whether its votes enter the running moments; False for one that was
            counted before and is computed again. None: all of them do.
        custom: Estimators of the operator's own, by name.

    Returns:
        For each group, in order, its result, or why it can't be computed. A group that fails
        doesn't touch its neighbours. The bytes of the experiences of one launch are views of one
        array: keep copies of what is kept for long.

    Raises:
        ParameterError: Unknown estimator, or a parameter that `plan` refuses.
        ValueError: `batches` or `counted` don't fit the groups, `batches` descend, or there are no
            moments where the parameters use them.
    """
    known = custom or {}
    chosen = plan(estimator, parameters, {name: spec for name, (spec, _) in known.items()})
    for name, given in (("batches", batches), ("counted", counted)):
        if given is not None and len(given) != len(groups):
            raise ValueError(f"{name} has {len(given)} elements for {len(groups)} groups")
    if batches is not None and sorted(batches) != list(batches):
        raise ValueError("batches descend; give groups in the order of their batches")
    from experience_buffer_server.advantages.estimators.registry import REGISTRY

    from .launch import Settings, run

    own = {spec.name: functions for spec, functions in known.values()}
    functions = {**own, **REGISTRY}[chosen.spec.name]
    settings = Settings(
        plan=chosen, functions=functions, device=device, threads=threads, moments=moments
    )
    return run(groups, settings, batches=batches, counted=counted)
