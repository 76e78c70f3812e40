"""One launch: many groups checked, packed, taken through the stages together, and unpacked.

The order of the stages is here; none of their formulas is. Legend: B experiences, G groups, D
tokens of all experiences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .batch import Batch
from .checks import Reads, check_group, reads_of
from .devices import token_stages
from .distillation import on_policy_distill
from .moments import RunningMoments, normalise_by_moments
from .normalise import (
    clip_advantages,
    normalise_across_batch,
    normalise_advantages,
    normalise_rewards,
)
from .packing import bad_tokens, pack
from .parameters import AdvantageParameters, BatchParameters, RewardParameters
from .registry import Estimator
from .shaping import clip_rewards, overlong_penalty, turn_rewards
from .specs import Plan
from .token_returns import TokenAdvantages, cpgd, gae, reinforce
from .tokens import Floats, TokenStages
from .unpacking import Results, apply_policy, batch_details, common_details, cut
from .values import ExperienceInput, GroupDetails, GroupError, GroupFailure, GroupResult

Group = Sequence[ExperienceInput]
Outcome = GroupResult | GroupFailure

_SINGLE_LOOPS = (reinforce, gae, cpgd, on_policy_distill)
"""Token steps whose results come from one loop that accumulates in float64: rounded to float32
there and then, they are rounded once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a launch is computed; `advantages.compute` describes each field."""

    functions: Estimator
    device: str
    threads: int
    moments: RunningMoments | None


def run(
    groups: Sequence[Group],
    plan: Plan,
    settings: Settings,
    *,
    batches: Sequence[int] | None,
    counted: Sequence[bool] | None,
) -> list[Outcome]:
    """See `advantages.compute`."""
    # What overflows, or isn't a number, is found where it matters, and fails its own group.
    with np.errstate(over="ignore", invalid="ignore"):
        return _run(groups, plan, settings, batches=batches, counted=counted)


def _run(
    groups: Sequence[Group],
    plan: Plan,
    settings: Settings,
    *,
    batches: Sequence[int] | None,
    counted: Sequence[bool] | None,
) -> list[Outcome]:
    reads = reads_of(plan)
    outcomes: dict[int, Outcome] = {}
    for index, group in enumerate(groups):
        if (refusal := _refusal(group, reads)) is not None:
            outcomes[index] = refusal
    accepted = [index for index in range(len(groups)) if index not in outcomes]
    batch = _pack(groups, plan, accepted, batches)
    if batch.problems:
        # Seen only now, inside tensors. Such a group must not reach the statistics of its batch,
        # so the others are packed again without it.
        for index, problem in zip(accepted, _first_of_groups(batch, batch.problems), strict=True):
            if problem is not None:
                outcomes[index] = GroupFailure(problem)
        accepted = [index for index in accepted if index not in outcomes]
        batch = _pack(groups, plan, accepted, batches)
    if accepted:
        own_counted = None if counted is None else [counted[index] for index in accepted]
        computed = _compute(batch, plan, settings, own_counted)
        outcomes.update(zip(accepted, computed, strict=True))
    return [outcomes[index] for index in range(len(groups))]


def _score(
    batch: Batch, plan: Plan, settings: Settings, details: GroupDetails
) -> tuple[Floats, Batch]:
    """The stages over scalar rewards up to the estimator's scores.

    Returns:
        Scores, shape [B]; and the batch without token-level rewards if the scores took their place.
    """
    parameters, scores = plan.parameters, settings.functions.scores
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
    plan: Plan,
    settings: Settings,
    details: GroupDetails,
    *,
    counted: Sequence[bool] | None,
) -> Floats:
    """The stages over scores, up to what is placed on the tokens; NaN where one isn't finite."""
    parameters = plan.parameters
    if not isinstance(parameters, RewardParameters):
        return scores_B
    bad_B = ~np.isfinite(scores_B)
    if bad_B.any():
        # Their groups fail. Until then they count in no moments, and NaN in no statistics.
        scores_B = np.where(bad_B, np.nan, scores_B)
        failing = set(_groups_of(batch, np.flatnonzero(bad_B)).tolist())
        counts = [True] * len(details) if counted is None else counted
        counted = [count and group not in failing for group, count in enumerate(counts)]
    scores_B = normalise_by_moments(
        scores_B, batch, plan, settings.moments, details, counted=counted
    )
    scores_B = clip_rewards(scores_B, batch, parameters, details)
    return normalise_rewards(scores_B, batch, parameters, details)


def _refusal(group: Group, reads: Reads) -> GroupFailure | None:
    try:
        check_group(group, reads=reads)
    except GroupError as error:
        return GroupFailure(str(error))
    return None


def _pack(
    groups: Sequence[Group], plan: Plan, accepted: Sequence[int], batches: Sequence[int] | None
) -> Batch:
    own_batches = None if batches is None else [batches[index] for index in accepted]
    return pack([groups[index] for index in accepted], plan, batches=own_batches)


def _groups_of(batch: Batch, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.searchsorted(batch.group_offsets, rows, side="right") - 1


def _first_of_groups(batch: Batch, problems: dict[int, str]) -> list[str | None]:
    """The problem of the first experience with one, for each group."""
    found: list[str | None] = [None] * (len(batch.group_offsets) - 1)
    rows = sorted(problems, reverse=True)
    for row, group in zip(rows, _groups_of(batch, np.array(rows, dtype=np.int64)), strict=True):
        found[group] = problems[row]
    return found


def _compute(
    batch: Batch, plan: Plan, settings: Settings, counted: Sequence[bool] | None
) -> list[Outcome]:
    details: GroupDetails = [{} for _ in range(len(batch.group_offsets) - 1)]
    scores_B, batch = _score(batch, plan, settings, details)
    scores_B = _normalise(scores_B, batch, plan, settings, details, counted=counted)
    results, bad_B = _compute_tokens(batch, plan, settings, scores_B, details)
    bad = np.flatnonzero(bad_B)
    indices = bad - batch.group_offsets[_groups_of(batch, bad)]
    overflows = {
        row: _overflow(index, plan.parameters)
        for row, index in zip(bad.tolist(), indices.tolist(), strict=True)
    }
    apply_policy(batch, plan.parameters, details, results)
    items = cut(batch, details, results)
    common, of_batches = common_details(plan), batch_details(batch, plan.parameters)
    offsets = batch.group_offsets.tolist()
    outcomes: list[Outcome] = []
    for group, failure in enumerate(_first_of_groups(batch, overflows)):
        if failure is not None:
            outcomes.append(GroupFailure(failure))
            continue
        own = items[offsets[group] : offsets[group + 1]]
        recorded = {**common, "members": len(own), **details[group], **of_batches[group]}
        outcomes.append(GroupResult(items=tuple(own), details=recorded))
    return outcomes


def _compute_tokens(
    batch: Batch, plan: Plan, settings: Settings, rewards_B: Floats, details: GroupDetails
) -> tuple[Results, NDArray[np.bool_]]:
    """The stages over tokens; also which experiences have unusable results, shape [B]."""
    parameters = plan.parameters
    bad_B = ~np.isfinite(rewards_B)
    rewards_B = np.where(bad_B, 0.0, rewards_B)
    stages, tokens = _token_stage(batch, plan, settings, rewards_B)
    if isinstance(parameters, AdvantageParameters) and _normalises(parameters):
        means_B = stages.sums(tokens.advantages) / np.maximum(batch.num_valid, 1)
        bad_B |= ~(np.abs(means_B) <= np.finfo(np.float32).max)
        if bad_B.any():
            # The statistics of their neighbours go on without their groups.
            batch = _without_tokens(batch, np.unique(_groups_of(batch, np.flatnonzero(bad_B))))
            stages, tokens = _token_stage(batch, plan, settings, rewards_B)
    advantages = tokens.advantages
    if isinstance(parameters, AdvantageParameters):
        advantages = normalise_advantages(stages, advantages, batch, parameters, details)
        advantages = clip_advantages(stages, advantages, batch, parameters, details)
        advantages = normalise_across_batch(stages, advantages, batch, parameters, details)
    results = stages.fetch(advantages, None if tokens.returns is advantages else tokens.returns)
    for result in results:
        bad_B[bad_tokens(result, batch.mask, batch.offsets)] = True
    return results, bad_B


def _token_stage(
    batch: Batch, plan: Plan, settings: Settings, rewards_B: Floats
) -> tuple[TokenStages, TokenAdvantages]:
    tokens = settings.functions.tokens
    rounds_once = tokens in _SINGLE_LOOPS and not _has_later_stages(plan.parameters)
    stages = token_stages(
        batch,
        device=settings.device,
        threads=settings.threads,
        precision="float32" if rounds_once else "float64",
    )
    return stages, tokens(stages, rewards_B, batch, plan.parameters)


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


def _without_tokens(batch: Batch, groups: NDArray[np.int64]) -> Batch:
    """The batch where no experience of some groups has a valid token."""
    is_chosen_G = np.isin(np.arange(len(batch.group_offsets) - 1), groups)
    is_chosen_B = np.repeat(is_chosen_G, np.diff(batch.group_offsets))
    is_chosen_D = np.repeat(is_chosen_B, np.diff(batch.offsets))
    return dataclasses.replace(
        batch,
        mask=np.where(is_chosen_D, np.uint8(0), batch.mask),
        num_valid=np.where(is_chosen_B, 0, batch.num_valid),
    )


def _overflow(index: int, parameters: BatchParameters) -> str:
    shared = " with the statistics of its batch" if parameters.uses_batch else ""
    return (
        f"experience {index} of the group: the result is beyond float32{shared}; push rewards, "
        "values and log-probabilities of usual size"
    )
