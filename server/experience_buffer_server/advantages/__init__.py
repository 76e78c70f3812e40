"""Advantages of packed experiences: pure functions from rewards, masks and values to float32.

Nothing here does I/O. Importing the package loads no torch: names, parameters and values are there
for a process that only validates; `compute` loads torch when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .specs import (
    ESTIMATORS,
    EstimatorSpec,
    ParameterError,
    ParameterValue,
    estimator_spec,
    missing_fields,
    required_fields,
    validate_parameters,
)
from .values import Column, ExperienceAdvantages, ExperienceInput, GroupFailure, GroupResult

__all__ = [
    "ESTIMATORS",
    "Column",
    "EstimatorSpec",
    "ExperienceAdvantages",
    "ExperienceInput",
    "GroupFailure",
    "GroupResult",
    "ParameterError",
    "compute",
    "estimator_spec",
    "missing_fields",
    "required_fields",
    "validate_parameters",
]


def compute(
    groups: Sequence[Sequence[ExperienceInput]],
    *,
    estimator: str,
    parameters: Mapping[str, ParameterValue],
    device: str = "cpu",
) -> list[GroupResult | GroupFailure]:
    """Compute the advantages of many groups in one packed launch.

    An experience's result depends on nothing but its group (for estimators of scope `item`, on
    nothing but itself): the order of members and groups and the neighbours in the launch don't
    change a bit of it. It can be called from several threads.

    Args:
        groups: Members of each group, in any order, without tombstones: a failed rollout has no
            vote and gets no advantages. An empty group gives an empty result.
        estimator: A name of `ESTIMATORS`.
        parameters: Parameters that differ from the estimator's defaults.
        device: Torch device that computes the token stage, such as `cpu` or `cuda:0`.

    Returns:
        For each group, in order, its result, or why it can't be computed. A group that fails
        doesn't touch its neighbours.

    Raises:
        ParameterError: Unknown estimator, or a parameter that `validate_parameters` refuses.
    """
    from .launch import run

    return run(groups, estimator=estimator, parameters=parameters, device=device)
