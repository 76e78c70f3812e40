"""One launch: many groups checked, packed, taken through the stages together, and unpacked.

The order of the stages is here; none of their formulas is. Legend: B experiences, G groups, D
tokens of all experiences.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Floats
from experience_buffer_server.advantages.arrays.values import (
    ExperienceInput,
    GroupDetails,
    GroupError,
    GroupFailure,
    GroupResult,
)
from experience_buffer_server.advantages.estimators.registry import Estimator
from experience_buffer_server.advantages.estimators.token_returns import (
    cpgd,
    gae,
    on_policy_distill,
    reinforce,
)
from experience_buffer_server.advantages.kernels.devices import token_stages
from experience_buffer_server.advantages.plan.parameters import (
    AdvantageParameters,
    BatchParameters,
    RewardParameters,
)
from experience_buffer_server.advantages.plan.specs import Plan
from experience_buffer_server.advantages.stages.masked_members import (
    trained_places,
    with_masked,
)
from experience_buffer_server.advantages.stages.normalise import (
    clip_advantages,
    normalise_across_batch,
    normalise_advantages,
    normalise_rewards,
)
from experience_buffer_server.advantages.stages.reward_shaping import (
    clip_rewards,
    overlong_penalty,
    turn_rewards,
)
from experience_buffer_server.advantages.stages.running_moments import (
    RunningMoments,
    normalise_by_moments,
)

from .checks import check_group, reads_of
from .packing import bad_tokens, pack
from .unpacking import Results, apply_policy, batch_details, common_details, cut

Group = Sequence[ExperienceInput]
Outcome = GroupResult | GroupFailure

_SINGLE_LOOPS = (reinforce, gae, cpgd, on_policy_distill)
"""Token steps whose results come from one loop that accumulates in float64: rounded to float32
there and then, they are rounded once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a launch is computed; `advantages.compute` describes each field."""

    plan: Plan
    functions: Estimator
    device: str
    threads: int
    moments: RunningMoments | None


def run(
    groups: Sequence[Group],
    settings: Settings,
    *,
    batches: Sequence[int] | None,
    counted: Sequence[bool] | None,
) -> list[Outcome]:
    """See `advantages.compute`."""
    reads = reads_of(settings.plan)
    outcomes: dict[int, Outcome] = {}
    for index, group in enumerate(groups):
        try:
            check_group(group, reads=reads)
        except GroupError as error:
            outcomes[index] = GroupFailure(str(error))
    leaves_out = not settings.plan.parameters.masked_votes
    places = {
        index: trained_places(group, by_run=reads.votes) if leaves_out else range(len(group))
        for index, group in enumerate(groups)
        if index not in outcomes
    }
    while accepted := [index for index in range(len(groups)) if index not in outcomes]:
        # A group may fail after it was counted: only a launch without failures is kept.
        moments = copy.deepcopy(settings.moments)
        trial = dataclasses.replace(settings, moments=moments)
        own_counted = None if counted is None else [counted[index] for index in accepted]
        try:
            # What overflows, or isn't a number, is found where it matters, and fails its own group.
            with np.errstate(over="ignore", invalid="ignore"):
                batch = pack(
                    [[groups[index][place] for place in places[index]] for index in accepted],
                    settings.plan,
                    batches=None if batches is None else [batches[index] for index in accepted],
                    places=[places[index] for index in accepted],
                )
                computed = _compute(batch, trial, own_counted)
        except _FailingError as error:
            for index, problem in zip(accepted, error.of_groups, strict=True):
                if problem is not None:
                    outcomes[index] = GroupFailure(problem)
            continue
        for index, outcome in zip(accepted, computed, strict=True):
            if isinstance(outcome, GroupResult):
                outcome = with_masked(
                    outcome, groups[index], places[index], settings.plan.parameters
                )
            outcomes[index] = outcome
        if settings.moments is not None and moments is not None:
            settings.moments.become(moments)
    return [outcomes[index] for index in range(len(groups))]


class _FailingError(Exception):
    """Groups that must leave the launch before others are compared with them."""

    def __init__(self, batch: Batch, problems: dict[int, str]) -> None:
        """Keep why, by row of the batch."""
        super().__init__(f"{len(problems)} experiences can't be computed")
        self.of_groups = _first_of_groups(batch, problems)
        """The problem of each group, None where there is none."""


def _score(batch: Batch, settings: Settings, details: GroupDetails) -> tuple[Floats, Batch]:
    """The stages over scalar rewards up to the estimator's scores.

    Returns:
        Scores, shape [B]; and the batch without token-level rewards if the scores took their place.
    """
    parameters, scores = settings.plan.parameters, settings.functions.scores
    rewards_B = batch.rewards
    if isinstance(parameters, RewardParameters):
        rewards_B = turn_rewards(rewards_B, batch, parameters)
        rewards_B = overlong_penalty(rewards_B, batch, parameters)
    if scores is None:
        return rewards_B, batch
    scores_B = scores(rewards_B, batch, parameters, details)
    # One that returns what it was given only records.
    if scores_B is rewards_B or not batch.has_token_rewards.any():
        return scores_B, batch
    none_B = np.zeros_like(batch.has_token_rewards)
    return scores_B, dataclasses.replace(batch, has_token_rewards=none_B)


def _normalise(
    scores_B: Floats,
    batch: Batch,
    settings: Settings,
    details: GroupDetails,
    *,
    counted: Sequence[bool] | None,
) -> Floats:
    """The stages over finite scores, up to what is placed on the tokens."""
    parameters = settings.plan.parameters
    if not isinstance(parameters, RewardParameters):
        return scores_B
    scores_B = normalise_by_moments(
        scores_B, batch, parameters, settings.moments, details, counted=counted
    )
    scores_B = clip_rewards(scores_B, batch, parameters, details)
    return normalise_rewards(scores_B, batch, parameters, details)


def _groups_of(batch: Batch, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.searchsorted(batch.group_offsets, rows, side="right") - 1


def _first_of_groups(batch: Batch, problems: dict[int, str]) -> list[str | None]:
    """The problem of the first experience with one, for each group."""
    found: list[str | None] = [None] * (len(batch.group_offsets) - 1)
    rows = sorted(problems, reverse=True)
    for row, group in zip(rows, _groups_of(batch, np.array(rows, dtype=np.int64)), strict=True):
        found[group] = problems[row]
    return found


def _compute(batch: Batch, settings: Settings, counted: Sequence[bool] | None) -> list[Outcome]:
    """The outcome of each group of a batch.

    Raises:
        _FailingError: Groups can't be computed, and the others' numbers may depend on them.
    """
    if batch.problems:
        raise _FailingError(batch, batch.problems)
    parameters = settings.plan.parameters
    details: GroupDetails = [{} for _ in range(len(batch.group_offsets) - 1)]
    scores_B, batch = _score(batch, settings, details)
    _require(np.isfinite(scores_B), batch, parameters)
    scores_B = _normalise(scores_B, batch, settings, details, counted=counted)
    _require(np.isfinite(scores_B), batch, parameters)
    results = _compute_tokens(batch, settings, scores_B, details)
    is_good_B = np.ones(len(scores_B), dtype=np.bool_)
    for result in results:
        is_good_B[bad_tokens(result, batch.mask, batch.offsets)] = False
    if parameters.uses_batch or parameters.uses_running_moments:
        _require(is_good_B, batch, parameters)
    failures = _first_of_groups(batch, _overflows(is_good_B, batch, parameters))
    apply_policy(batch, parameters, details, results)
    items = cut(batch, details, results)
    common, of_batches = common_details(settings.plan), batch_details(batch, parameters)
    offsets = batch.group_offsets.tolist()
    outcomes: list[Outcome] = []
    for group, failure in enumerate(failures):
        if failure is not None:
            outcomes.append(GroupFailure(failure))
            continue
        own = items[offsets[group] : offsets[group + 1]]
        recorded = {**common, "members": len(own), **details[group], **of_batches[group]}
        outcomes.append(GroupResult(items=tuple(own), details=recorded))
    return outcomes


def _compute_tokens(
    batch: Batch, settings: Settings, rewards_B: Floats, details: GroupDetails
) -> Results:
    """The stages over tokens."""
    parameters, step = settings.plan.parameters, settings.functions.tokens
    rounds_once = step in _SINGLE_LOOPS and not _has_later_stages(parameters)
    stages = token_stages(
        batch,
        device=settings.device,
        threads=settings.threads,
        precision="float32" if rounds_once else "float64",
    )
    tokens = step(stages, rewards_B, batch, parameters)
    advantages = tokens.advantages
    if isinstance(parameters, AdvantageParameters):
        if _normalises(parameters):
            means_B = stages.sums(advantages) / np.maximum(batch.num_valid, 1)
            _require(np.abs(means_B) <= np.finfo(np.float32).max, batch, parameters)
        advantages = normalise_advantages(stages, advantages, batch, parameters, details)
        advantages = clip_advantages(stages, advantages, batch, parameters, details)
        advantages = normalise_across_batch(stages, advantages, batch, parameters, details)
    return stages.fetch(advantages, None if tokens.returns is advantages else tokens.returns)


def _normalises(parameters: AdvantageParameters) -> bool:
    levels = (
        parameters.advantage_norm_mean,
        parameters.advantage_norm_std,
        parameters.cross_batch,
    )
    return any(level != "none" for level in levels)


def _has_later_stages(parameters: BatchParameters) -> bool:
    """Whether anything but rounding happens to advantages after the estimator's token stage."""
    if not isinstance(parameters, AdvantageParameters):
        return False
    return _normalises(parameters) or parameters.advantage_clip > 0


def _require(is_good_B: NDArray[np.bool_], batch: Batch, parameters: BatchParameters) -> None:
    """Raise `_FailingError` unless all numbers so far can be used."""
    if overflows := _overflows(is_good_B, batch, parameters):
        raise _FailingError(batch, overflows)


def _overflows(
    is_good_B: NDArray[np.bool_], batch: Batch, parameters: BatchParameters
) -> dict[int, str]:
    """What is wrong with the rows that aren't good."""
    shared = " with the statistics of its batch" if parameters.uses_batch else ""
    bad = np.flatnonzero(~is_good_B)
    indices = batch.places[bad]
    return {
        row: (
            f"experience {index} of the group: the result is beyond float32{shared}; push rewards, "
            "values and log-probabilities of usual size"
        )
        for row, index in zip(bad.tolist(), indices.tolist(), strict=True)
    }
