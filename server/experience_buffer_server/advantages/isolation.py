"""Which groups an operator's function fails on, so that their neighbours go on."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence

from experience_buffer_server.advantages.arrays.values import (
    ExperienceInput,
    GroupFailure,
    GroupResult,
)
from experience_buffer_server.advantages.estimators.custom_functions import CustomEstimatorError
from experience_buffer_server.advantages.stages.running_moments import RunningMoments

Outcomes = list[GroupResult | GroupFailure]
Compute = Callable[..., Outcomes]
"""A launch as `advantages.compute` computes it, but for `groups`, and `batches`, `counted` and
`moments` by name. It raises `CustomEstimatorError` where an operator's function fails."""


def isolate(
    compute: Compute,
    groups: Sequence[Sequence[ExperienceInput]],
    *,
    batches: Sequence[int],
    counted: Sequence[bool],
    moments: RunningMoments | None,
) -> tuple[Outcomes, RunningMoments | None]:
    """Compute a launch so that a group on which an operator's function fails is the only one to.

    If the launch fails, each group is tried alone, and then the others once more, one statistics
    batch after another, without those that failed. A batch that fails in company fails whole.

    Args:
        compute: Computes a launch.
        groups: As for `advantages.compute`.
        batches: As for `advantages.compute`.
        counted: As for `advantages.compute`.
        moments: Running moments before the launch; not changed.

    Returns:
        What became of each group, and the moments after the launch.
    """
    trial = copy.deepcopy(moments)
    try:
        return compute(groups, batches=batches, counted=counted, moments=trial), trial
    except CustomEstimatorError:
        pass  # Reported below, with the group that is the reason.
    outcomes: dict[int, GroupResult | GroupFailure] = {}
    for index, group in enumerate(groups):
        trial = copy.deepcopy(moments)
        try:
            compute([group], batches=[0], counted=[counted[index]], moments=trial)
        except CustomEstimatorError as error:
            outcomes[index] = GroupFailure(str(error))
    sound = [index for index in range(len(groups)) if index not in outcomes]
    for _, members in itertools.groupby(sound, key=lambda index: batches[index]):
        indices = list(members)
        trial = copy.deepcopy(moments)
        try:
            computed = compute(
                [groups[index] for index in indices],
                batches=[0] * len(indices),
                counted=[counted[index] for index in indices],
                moments=trial,
            )
        except CustomEstimatorError as error:
            outcomes.update(dict.fromkeys(indices, GroupFailure(f"{error} (in a batch)")))
            continue
        outcomes.update(zip(indices, computed, strict=True))
        moments = trial
    return [outcomes[index] for index in range(len(groups))], moments
