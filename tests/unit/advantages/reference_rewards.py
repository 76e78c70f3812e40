"""Stages over scalar rewards and the estimators' scores again, in plain Python.

Written from docs/advantages.md, one reward at a time, with rationals where sums must be exact. Shares
nothing with the code under test.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One experience, as lists: what `ExperienceInput` holds as bytes."""

    reward: float
    mask: list[bool]
    token_rewards: list[float] | None = None
    values: list[float] | None = None
    bootstrap: float = 0.0
    """0 unless the experience was truncated and a value after the last token was given."""
    logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    teacher_logprobs: list[float] | None = None
    baseline: float = 0.0
    state: str = ""
    run: str = ""
    step: int = 0
    num_turns: int | None = None


@dataclass(slots=True)
class Score:
    """What became of one experience's scalar reward, and how far rounding may have moved it."""

    x: float
    error: float = 0.0

    def moved(self, x: float, error: float) -> Score:
        return Score(x, error + 4e-16 * abs(x))


Group = Sequence[Member]


def mean_of(numbers: Sequence[float]) -> float:
    return float(sum(map(Fraction, numbers)) / len(numbers))


def std_of(numbers: Sequence[float], ddof: int) -> float:
    """About the mean; 0 for fewer than two numbers."""
    if len(numbers) < 2:
        return 0.0
    exact = [Fraction(number) for number in numbers]
    mean = sum(exact) / len(exact)
    return math.sqrt(sum((x - mean) ** 2 for x in exact) / (len(exact) - ddof))


def runs_of(group: Group) -> list[list[int]]:
    """Members of each run by ascending step; no run: a run of its own."""
    runs: dict[object, list[int]] = {}
    for m, member in enumerate(group):
        runs.setdefault(member.run or m, []).append(m)
    return [sorted(run, key=lambda m: group[m].step) for run in runs.values()]


def voter(run: Sequence[int], p: Any) -> int:
    """The member whose reward is its run's vote."""
    return run[0] if p.turn_rewards == "steps" else run[-1]


def turns(member: Member) -> int:
    if member.num_turns is not None:
        return member.num_turns
    starts = sum(
        valid and (t == 0 or not member.mask[t - 1]) for t, valid in enumerate(member.mask)
    )
    return max(starts, 1)


def token_sum(member: Member) -> float:
    if member.token_rewards is None:
        return 0.0
    own = zip(member.token_rewards, member.mask, strict=True)
    return math.fsum(r for r, valid in own if valid)


def shaped(group: Group, p: Any) -> list[Score]:
    """Stages 1 and 2: bias, scale, turns, overlong.

    With token-level rewards there is no scalar: only what is to be added to them.
    """
    scores = []
    for member in group:
        bias = -p.reward_bias if p.reward_bias_sign == "subtract" else p.reward_bias
        r = (member.reward + bias) * p.reward_scale if member.token_rewards is None else 0.0
        if p.turn_rewards == "concatenated":
            r *= p.turn_discount ** (turns(member) - 1)
        scores.append(Score(r, 1e-15 * abs(r)))
    if p.turn_rewards == "steps":
        for run in runs_of(group):
            for now, later in zip(reversed(run[:-1]), reversed(run), strict=False):
                following = scores[later].x + token_sum(group[later])
                r = scores[now].x + p.turn_discount * following
                error = scores[now].error + scores[later].error + 1e-15 * abs(following)
                scores[now] = scores[now].moved(r, error)
    if p.overlong_penalty:
        for member, score in zip(group, scores, strict=True):
            if member.token_rewards is not None:
                continue
            over = sum(member.mask) - (p.max_response_tokens - p.overlong_buffer)
            score.x += min(-over / p.overlong_buffer * p.overlong_penalty, 0.0)
    return scores


def grpo(x: float, own: int, votes: Sequence[float], p: Any) -> float:
    eps: float = p.eps
    if len(votes) == 1:
        return x / (1 + eps)
    std = std_of(votes, 1)
    # Where runs don't differ, a step that isn't a vote isn't measured by eps alone.
    return (x - mean_of(votes)) / (std + eps) if std else 0.0


def rloo(x: float, own: int, votes: Sequence[float], p: Any) -> float:
    others = [vote for i, vote in enumerate(votes) if i != own]
    return x - mean_of(others) if others else x


def minus_mean(x: float, own: int, votes: Sequence[float], p: Any) -> float:
    return x - mean_of(votes) if len(votes) > 1 else x


def opmd(x: float, own: int, votes: Sequence[float], p: Any) -> float:
    if len(votes) == 1 or p.baseline == "mean":
        return minus_mean(x, own, votes, p)
    top = max(votes)
    total = math.fsum(math.exp((vote - top) / p.tau) for vote in votes)
    tau: float = p.tau
    return x - (top + tau * (math.log(total) - math.log(len(votes))))


def asymre(x: float, own: int, votes: Sequence[float], p: Any) -> float:
    shift: float = p.shift
    return x - (mean_of(votes) + shift) if len(votes) > 1 else x


AGAINST_VOTES: dict[str, Callable[[float, int, Sequence[float], Any], float]] = {
    "grpo": grpo,
    "group_norm": grpo,
    "step_wise_grpo": grpo,
    "rloo": rloo,
    "dr_grpo": minus_mean,
    "reinforce_baseline": minus_mean,
    "opmd": opmd,
    "asymre": asymre,
}


def compared(estimator: str, group: Group, scores: list[Score], p: Any) -> list[Score]:
    """Stage 3 for the estimators that compare one vote per run."""
    runs = runs_of(group)
    votes = [scores[voter(run, p)] for run in runs]
    rewards = [vote.x for vote in votes]
    divisor = std_of(rewards, 1) + p.eps if hasattr(p, "eps") and len(votes) > 1 else 1.0
    error = sum(vote.error for vote in votes) + 1e-15 * max(map(abs, rewards), default=0.0)
    result = list(scores)
    for own, run in enumerate(runs):
        for m in run:
            x = scores[m].x if p.turn_rewards == "steps" else rewards[own]
            shared = len(run) if getattr(p, "divide_by_steps", False) else 1
            score = AGAINST_VOTES[estimator](x, own, rewards, p) / shared
            result[m] = Score(score, (error + scores[m].error) * (1 + abs(score)) / divisor)
    return result


def gigpo(group: Group, scores: list[Score], p: Any) -> list[Score]:
    """Episode advantage plus w times the advantage among steps from the same state."""
    runs = runs_of(group)
    episodes = [math.fsum(scores[m].x for m in run) for run in runs]
    returns = [score.x for score in scores]
    if p.turn_rewards == "steps":
        # The rewards are returns already.
        episodes = [returns[run[0]] for run in runs]
    for run in runs if p.turn_rewards != "steps" else ():
        later = 0.0
        for m in reversed(run):
            later = returns[m] = scores[m].x + p.step_discount * later
    anchors: dict[str, list[int]] = {}
    for m, member in enumerate(group):
        anchors.setdefault(member.state, []).append(m)

    def centred(x: float, numbers: list[float]) -> tuple[float, float]:
        divisor = std_of(numbers, 1) + p.eps if p.use_std else 1.0
        return (x - mean_of(numbers)) / divisor, divisor

    largest = math.fsum(abs(score.x) for score in scores)
    result = list(scores)
    for episode, run in zip(episodes, runs, strict=True):
        for m in run:
            if len(runs) == 1:
                score, least = episode / (1 + p.eps if p.use_std else 1.0), 1.0
            else:
                score, least = centred(episode, episodes)
            anchored = [returns[other] for other in anchors[group[m].state]]
            if len(anchored) > 1:
                step, divisor = centred(returns[m], anchored)
                score, least = score + p.step_weight * step, min(least, divisor)
            result[m] = Score(score, 2e-15 * largest * (1 + abs(score)) / least)
    return result


def float32(x: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", x))[0]
    return rounded


def divergence(logprob: float, reference: float, p: Any) -> tuple[float, float]:
    """KL of one token by float32 arithmetic, and how much another exp may differ."""
    x = float32(float32(logprob) - float32(reference))
    error = 0.0
    kl = x
    if p.kl_estimator == "k2":
        kl = float32(float32(x * x) / 2)
    elif p.kl_estimator == "k3":
        ratio = float32(math.exp(-x))
        kl = float32(float32(ratio - 1.0) + x)
        error = 2.5e-7 * (ratio + abs(x) + 1)
    if p.kl_clip:
        kl = max(-p.kl_clip, min(p.kl_clip, kl))
    return kl, error


def token_rewards(member: Member, score: float, p: Any) -> tuple[list[float], float]:
    """Stage 6: the score on the last valid token, or token-level rewards; minus b KL."""
    row = [0.0] * len(member.mask)
    valid = [t for t, is_valid in enumerate(member.mask) if is_valid]
    error = 0.0
    if member.token_rewards is not None:
        for t in valid:
            row[t] = member.token_rewards[t]
    if valid:
        row[valid[-1]] += score
    if p.kl_coef:
        assert member.logprobs is not None
        assert member.ref_logprobs is not None
        for t in valid:
            kl, slack = divergence(member.logprobs[t], member.ref_logprobs[t], p)
            row[t] -= p.kl_coef * kl
            error += p.kl_coef * slack
    return row, error


def zero_variance(group: Group, p: Any) -> bool:
    """Whether all votes, as they were pushed, are equal: what shaping adds tells nothing apart."""
    pushed = [m.reward if m.token_rewards is None else token_sum(m) for m in group]
    if p.turn_rewards == "steps":
        plain = shaped(group, dataclasses.replace(p, overlong_penalty=0.0))
        pushed = [s.x + token_sum(m) for s, m in zip(plain, group, strict=True)]
    votes = [pushed[voter(run, p)] for run in runs_of(group)]
    return len(votes) > 1 and min(votes) == max(votes)


def cpgd(groups: Sequence[Group], scores: list[list[Score]], p: Any) -> list[list[Score]]:
    """One statistics batch."""
    sums = [
        [Score(s.x + token_sum(m), s.error) for m, s in zip(group, part, strict=True)]
        for group, part in zip(groups, scores, strict=True)
    ]
    votes = [
        own[voter(run, p)].x for g, own in zip(groups, sums, strict=True) for run in runs_of(g)
    ]
    moved = max((s.error for own in sums for s in own), default=0.0)
    mean, divisor = mean_of(votes) if votes else 0.0, 1.0
    if p.weight == "std":
        # As with grpo: where nothing differs, eps alone measures nothing.
        std = std_of(votes, 0)
        divisor = std + p.eps if std else math.inf
    flat = [zero_variance(group, p) for group in groups]
    filled = [group_is_flat for group, group_is_flat in zip(groups, flat, strict=True) if group]
    varied = filled.count(False)
    result = []
    for group_is_flat, own in zip(flat, sums, strict=True):
        factor = 1.0
        if p.weight == "clip_filter" and varied and not group_is_flat:
            factor = min(len(filled) / varied, p.max_weight)
        error = (moved + 1e-13 * max(map(abs, votes), default=0.0)) * factor / divisor
        numbers = [(s.x - mean) / divisor * factor for s in own]
        result.append([Score(x, error * (2 + abs(x))) for x in numbers])
    return result


def running(
    groups: Sequence[Group], scores: list[list[Score]], history: list[float], p: Any
) -> None:
    """Stage 4 for one unit: its votes are counted, then all of it is normalised; in place."""
    for group, own in zip(groups, scores, strict=True):
        voters = [voter(run, p) for run in runs_of(group)]
        history.extend(own[m].x for m in voters if group[m].token_rewards is None)
    error = max((s.error for own in scores for s in own), default=0.0)
    error += 1e-13 * max(map(abs, history), default=0.0)
    std = std_of(history, 1) or 1.0
    mean = mean_of(history) if p.running_norm == "mean_std" and history else 0.0
    for group, own in zip(groups, scores, strict=True):
        for m, score in enumerate(own):
            if group[m].token_rewards is not None:
                continue
            x = (score.x - mean) / std
            own[m] = score.moved(x, error * (2 + abs(x)) / std)
