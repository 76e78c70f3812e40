"""The whole computation again, one token at a time in plain Python float64.

What the packed one must agree with. Shares nothing with the code under test; the formulas are those of
docs/advantages.md. Beside each result stands how far rounding may have moved it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from experience_buffer_server.advantages.plan.specs import Plan

from . import reference_rewards as rewards
from .reference_rewards import Group, Member, Score


@dataclass(slots=True)
class Row:
    """One experience: a number per token, 0 where masked."""

    mask: list[bool]
    advantages: list[float]
    returns: list[float]
    advantages_error: float
    returns_error: float

    def valid(self) -> list[int]:
        return [t for t, valid in enumerate(self.mask) if valid]


def returns(row: list[float], mask: list[bool], *, gamma: float, mode: str) -> list[float]:
    """R_t, from the last token to the first; 0 where masked."""
    result = [0.0] * len(mask)
    later = 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            later = row[t] + gamma * later
            result[t] = later
        elif mode == "count":
            later = gamma * later
    return result


def gae(row: list[float], member: Member, p: Any) -> tuple[list[float], list[float]]:
    """A_t and R_t, from the last valid token to the first; 0 where masked."""
    values, mask = member.values, member.mask
    assert values is not None
    advantages, result = [0.0] * len(mask), [0.0] * len(mask)
    later, next_value, seen = 0.0, member.bootstrap, False
    for t in reversed(range(len(mask))):
        if mask[t]:
            seen = True
            later = row[t] + p.gamma * next_value - values[t] + p.gamma * p.lam * later
            next_value = values[t]
            advantages[t], result[t] = later, later + values[t]
        elif p.mask_mode == "count" and seen:
            later = p.gamma * next_value + p.gamma * p.lam * later
            next_value = 0.0
    return advantages, result


def without_token_rewards(group: Group) -> list[Member]:
    return [dataclasses.replace(member, token_rewards=None) for member in group]


def token_stage(estimator: str, member: Member, score: Score, p: Any) -> Row:
    """Stages 6 and 7."""
    mask = member.mask
    if estimator == "on_policy_distill":
        assert member.teacher_logprobs is not None
        assert member.logprobs is not None
        gaps = [
            p.coefficient * (teacher - student) if valid else 0.0
            for teacher, student, valid in zip(
                member.teacher_logprobs, member.logprobs, mask, strict=True
            )
        ]
        return Row(mask, gaps, list(gaps), 0.0, 0.0)
    if estimator == "cpgd":
        spread = [score.x if valid else 0.0 for valid in mask]
        return Row(mask, spread, list(spread), score.error, score.error)
    if estimator == "gigpo" or estimator in rewards.AGAINST_VOTES:
        (member,) = without_token_rewards([member])
    row, error = rewards.token_rewards(member, score.x, p)
    error += score.error
    if estimator == "gae":
        advantages, result = gae(row, member, p)
    else:
        result = returns(row, mask, gamma=p.gamma, mode=p.mask_mode)
        advantages = list(result)
    if estimator == "remax":
        advantages = [x - member.baseline if m else 0.0 for x, m in zip(result, mask, strict=True)]
    size = max((abs(x) for x in (*advantages, *result)), default=0.0)
    error += 1e-13 * size
    return Row(mask, advantages, result, error, error)


Places = Sequence[tuple[Hashable, Hashable]]


def units(places: Places, level: str) -> dict[Hashable, list[int]]:
    """The elements of each group or batch, under ("group", g) or ("batch", b)."""
    result: dict[Hashable, list[int]] = {}
    for e, (group, batch) in enumerate(places):
        if level != "none":
            result.setdefault((level, group if level == "group" else batch), []).append(e)
    return result


def normalised(
    elements: list[float], places: Places, targets: list[tuple[float, int]], **how: Any
) -> tuple[list[float], list[float]]:
    """`(x - mean) / (std + eps)`; mean and std over the elements of a level.

    Args:
        elements: What the statistics are taken over.
        places: Group and batch of each element.
        targets: Numbers to normalise, each with the element that stands for it.
        how: `mean` and `std` (none, group, batch), `leave_one_out`, `ddof`, `eps`; `alone`: the
            groups of one run, which have nothing to compare with at their own level.

    Returns:
        The normalised numbers, and what each was divided by.
    """
    centres, divisors = [0.0] * len(elements), [1.0] * len(elements)
    for place, own in units(places, how["mean"]).items():
        total, n = math.fsum(elements[e] for e in own), len(own)
        for e in own:
            if not how["leave_one_out"]:
                centres[e] = total / n
            elif n > 1 and place not in how["alone"]:
                centres[e] = (total - elements[e]) / (n - 1)
    for place, own in units(places, how["std"]).items():
        squares = math.fsum((elements[e] - centres[e]) ** 2 for e in own)
        std = 1.0
        if how["ddof"] == 0 or (len(own) > 1 and place not in how["alone"]):
            std = math.sqrt(squares / (len(own) - how["ddof"]))
        for e in own:
            divisors[e] = std + how["eps"]
    numbers = [(x - centres[e]) / divisors[e] for x, e in targets]
    return numbers, [divisors[e] for _, e in targets]


def alone(groups: Sequence[Group]) -> set[Hashable]:
    return {("group", g) for g, group in enumerate(groups) if len(rewards.runs_of(group)) == 1}


def norm(p: Any, stage: str) -> dict[str, Any]:
    """How rewards or advantages are normalised."""
    names = ("mean", "std", "leave_one_out", "ddof", "eps")
    return {name: getattr(p, f"{stage}_norm_{name}") for name in names}


def normalise_rewards(
    groups: Sequence[Group], scores: list[list[Score]], batches: Sequence[int], p: Any
) -> None:
    """Over one vote per run, in place."""
    elements: list[float] = []
    places, targets, where = [], [], []
    for g, group in enumerate(groups):
        for run in rewards.runs_of(group):
            if group[run[0]].token_rewards is not None:
                continue
            targets += [(scores[g][m].x, len(elements)) for m in run]
            where += [(g, m) for m in run]
            elements.append(scores[g][rewards.voter(run, p)].x)
            places.append((g, batches[g]))
    numbers, divisors = normalised(
        elements, places, targets, alone=alone(groups), **norm(p, "reward")
    )
    largest = max((abs(x) for x, _ in targets), default=0.0)
    error = max((s.error for own in scores for s in own), default=0.0) + 1e-14 * largest
    for (g, m), x, divisor in zip(where, numbers, divisors, strict=True):
        scores[g][m] = Score(x, error * (2 + abs(x)) / divisor)


def normalise_tokens(rows: list[list[Row]], batches: Sequence[int], **how: Any) -> None:
    """Over every valid token, in place."""
    slots = [(g, m, t) for g, own in enumerate(rows) for m, r in enumerate(own) for t in r.valid()]
    elements = [rows[g][m].advantages[t] for g, m, t in slots]
    places = [(g, batches[g]) for g, _, _ in slots]
    numbers, divisors = normalised(
        elements, places, [(x, e) for e, x in enumerate(elements)], **how
    )
    largest = max(map(abs, elements), default=0.0)
    error = max((r.advantages_error for own in rows for r in own), default=0.0) + 1e-14 * largest
    moved: dict[tuple[int, int], float] = {}
    for (g, m, t), x, divisor in zip(slots, numbers, divisors, strict=True):
        rows[g][m].advantages[t] = x
        moved[g, m] = max(moved.get((g, m), 0.0), error * (2 + abs(x)) / divisor)
    for (g, m), total in moved.items():
        rows[g][m].advantages_error = total


def cross_batch(rows: list[list[Row]], batches: Sequence[int], *, mean_only: bool) -> None:
    """Stage 10, in place."""
    for batch in set(batches):
        own = [row for g, group in enumerate(rows) if batches[g] == batch for row in group]
        numbers = [row.advantages[t] for row in own for t in row.valid()]
        if not numbers:
            continue
        mean = math.fsum(numbers) / len(numbers)
        variance = math.fsum((x - mean) ** 2 for x in numbers) / len(numbers)
        divisor = 1.0 if mean_only else math.sqrt(max(variance, 1e-8))
        error = max(row.advantages_error for row in own) + 1e-14 * max(map(abs, numbers))
        for row in own:
            for t in row.valid():
                row.advantages[t] = (row.advantages[t] - mean) / divisor
            largest = max(map(abs, row.advantages), default=0.0)
            row.advantages_error = error * (2 + largest) / divisor


def score_stages(
    estimator: str, groups: Sequence[Group], batches: Sequence[int], history: list[float], p: Any
) -> list[list[Score]]:
    """Stages 1 to 5 and the reward normalisation."""
    if not hasattr(p, "reward_clip"):
        return [[Score(0.0) for _ in group] for group in groups]
    scores = [rewards.shaped(group, p) for group in groups]
    units = [[g for g in range(len(groups)) if batches[g] == b] for b in sorted(set(batches))]
    if estimator == "cpgd":
        for unit in units:
            part = rewards.cpgd([groups[g] for g in unit], [scores[g] for g in unit], p)
            for g, own in zip(unit, part, strict=True):
                scores[g] = own
        groups = [without_token_rewards(group) for group in groups]
    elif estimator == "gigpo":
        scores = [rewards.gigpo(g, own, p) for g, own in zip(groups, scores, strict=True)]
    elif estimator in rewards.AGAINST_VOTES:
        scores = [
            rewards.compared(estimator, g, own, p) for g, own in zip(groups, scores, strict=True)
        ]
    if p.running_norm != "none":
        for unit in units if p.uses_batch else [[g] for g in range(len(groups))]:
            rewards.running([groups[g] for g in unit], [scores[g] for g in unit], history, p)
    if p.reward_clip:
        for group, own in zip(groups, scores, strict=True):
            for member, score in zip(group, own, strict=True):
                if member.token_rewards is None:
                    score.x = max(-p.reward_clip, min(p.reward_clip, score.x))
    if (p.reward_norm_mean, p.reward_norm_std) != ("none", "none"):
        normalise_rewards(groups, scores, batches, p)
    return scores


def compute(
    estimator: str,
    groups: Sequence[Group],
    *,
    plan: Plan,
    batches: Sequence[int] | None = None,
    history: list[float] | None = None,
) -> list[list[Row]]:
    """Rows of each group's members; `history` holds every vote counted so far and grows."""
    p: Any = plan.parameters
    if plan.scope == "item":
        # Whatever else its run holds may be elsewhere: each experience votes for itself.
        groups = [[dataclasses.replace(m, run="") for m in group] for group in groups]
    batches = [0] * len(groups) if batches is None else batches
    scores = score_stages(estimator, groups, batches, [] if history is None else history, p)
    rows = [
        [token_stage(estimator, m, s, p) for m, s in zip(group, own, strict=True)]
        for group, own in zip(groups, scores, strict=True)
    ]
    if (p.advantage_norm_mean, p.advantage_norm_std) != ("none", "none"):
        normalise_tokens(rows, batches, alone=alone(groups), **norm(p, "advantage"))
    if p.advantage_clip:
        for row in (row for own in rows for row in own):
            row.advantages = [
                max(-p.advantage_clip, min(p.advantage_clip, x)) for x in row.advantages
            ]
    if p.cross_batch != "none":
        cross_batch(rows, batches, mean_only=p.cross_batch == "mean")
    return rows
