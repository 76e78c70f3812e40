"""How far inserting and sampling may run apart: Reverb's rate limiter, and a bound in bytes.

One number is kept within a window, the difference `inserts * samples_per_insert - samples`:
inserting raises it, sampling lowers it. The counts come from the caller, who derives them from the
items it has, so that nothing can drift; nothing here has state, and a plan may be replaced live.

Source: Cassirer et al. 2021 (arXiv:2102.04736), Reverb's rate limiter.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, inf, isfinite
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class LimiterPlan:
    """The settings of a limiter; ask `problem` before using one."""

    min_size: int = 1
    """Items that have to be stored before any is sampled; up to them inserting is free."""
    samples_per_insert: float = 1.0
    """How often an item is to be sampled on average."""
    min_diff: float = -inf
    """Least difference that sampling may leave."""
    max_diff: float = inf
    """Greatest difference that inserting may leave."""
    max_ahead_bytes: int = 0
    """Payload bytes inserted and not yet sampled; 0: unbounded. Inserting isn't held back by it
    while not even one sample could go. A batch has to fit in it, or it never fills."""

    def problem(self, batch_size: int = 1) -> str:
        """Say what is impossible, with the numbers and a cure; empty if nothing is.

        A plan is impossible if sampling a batch and inserting one item can come to wait for each
        other for good, starting empty, whatever was inserted, sampled (up to a batch at once) and
        evicted (with `refund`) on the way. With p / q = `samples_per_insert`, the difference is
        always a multiple of 1 / q, so both wait with `min_size` stored if such a multiple is

            less than min_diff + batch_size, and more than max_diff - p / q.

        There is none if the window holds at least `p + batch_size * q` multiples. With less than
        `min_size` stored, one insert at a time is free.

        Args:
            batch_size: Items in the largest batch that a consumer samples.
        """
        if self.min_diff > self.max_diff:
            return (
                f"no difference is between min_diff {self.min_diff} and max_diff {self.max_diff}; "
                "swap them, or leave out one"
            )
        if not isfinite(self.min_diff):
            return ""
        ratio = _exact(self.samples_per_insert)
        lowest = ceil(_exact(self.min_diff) * ratio.denominator)
        num_needed = ratio.numerator + batch_size * ratio.denominator
        enough = Fraction(lowest + num_needed - 1, ratio.denominator)
        if enough <= _bound(self.max_diff):
            return ""
        return (
            f"between min_diff {_text(self.min_diff)} and max_diff {_text(self.max_diff)}, with "
            f"batches of {batch_size}, both can wait for each other for good; raise max_diff to "
            f"{_text(enough)}, or lower min_diff as much"
        )

    def first_sample(self) -> int:
        """How many items have to be inserted before any can be sampled."""
        if not isfinite(self.min_diff):
            return self.min_size
        least = (_exact(self.min_diff) + 1) / _exact(self.samples_per_insert)
        return max(self.min_size, ceil(least))


@dataclass(frozen=True, slots=True)
class Counts:
    """What happened so far, in items (units where whole groups are sampled), less refunds."""

    inserts: int
    deletes: int
    """Of those inserted; the others are stored."""
    samples: int
    """An item that was sampled twice counts twice."""
    ahead_bytes: int = 0
    """Payload bytes of the stored items that were never sampled."""
    used_up: int = 0
    """Of the stored items, those that were sampled as often as they may be, and are kept for others
    or for a rewind: inserting is free as if they had gone."""


class Answer(NamedTuple):
    """Whether it may go, and if not, what it waits for."""

    ok: bool
    reason: str = ""
    """For people, with the numbers; empty when ok."""
    label: Literal["", "min_size", "min_diff", "max_diff", "ahead_bytes"] = ""
    """The setting that holds it back, for metrics; empty when ok."""
    can_wait: bool = True
    """It may go later as it is; else it has to be split."""


_OK = Answer(True)


def can_sample(plan: LimiterPlan, counts: Counts, n: int) -> Answer:
    """Say whether a batch of `n` items may be sampled now, as far as the plan is concerned."""
    size = counts.inserts - counts.deletes
    if size < plan.min_size:
        return Answer(False, f"{size} stored of min_size {plan.min_size}", "min_size")
    allowed = _difference(plan, counts) - _bound(plan.min_diff)
    if n > allowed:
        return Answer(
            False,
            f"samples_per_insert {_text(plan.samples_per_insert)} allows "
            f"{max(floor(allowed), 0)} more samples, a batch needs {n}",
            "min_diff",
        )
    return _OK


def can_insert(plan: LimiterPlan, counts: Counts, n: int, num_bytes: int = 0) -> Answer:
    """Say whether `n` items with a payload of `num_bytes` in all may be inserted now, at once.

    Where waiting can't help, the reason says to split the insert. A single item that exceeds
    `max_ahead_bytes` alone goes when nothing else is ahead.
    """
    free = plan.min_size - (counts.inserts - counts.deletes - counts.used_up)
    if n <= free:
        return _OK
    room = _bound(plan.max_diff) - _difference(plan, counts)
    if n * _exact(plan.samples_per_insert) > room:
        fits = max(free, floor(room / _exact(plan.samples_per_insert)), 0)
        reason, can_wait = _why_not(plan, counts, n, fits)
        return Answer(False, reason, "max_diff", can_wait)
    limit, ahead = plan.max_ahead_bytes, counts.ahead_bytes
    if not limit or ahead + num_bytes <= limit or (n == 1 and not ahead):
        return _OK
    if not can_sample(plan, counts, 1).ok:
        # Nothing that is ahead could be sampled, to make room.
        return _OK
    if n > 1 and num_bytes > limit:
        reason = f"an insert of {num_bytes} bytes exceeds max_ahead_bytes {limit} alone; split it"
        return Answer(False, reason, "ahead_bytes", can_wait=False)
    reason = f"{ahead} bytes are not sampled yet, {num_bytes} more exceed max_ahead_bytes {limit}"
    return Answer(False, reason, "ahead_bytes")


def largest_insert(plan: LimiterPlan) -> float:
    """How many items can go at once, in the best of cases; infinite where nothing bounds it.

    The best of cases: nothing is stored, or as much as allowed has been sampled.
    """
    if not isfinite(plan.max_diff - plan.min_diff):
        return inf
    ratio = _exact(plan.samples_per_insert)
    lowest = min(ceil(_exact(plan.min_diff) * ratio.denominator), 0)
    highest = floor(_exact(plan.max_diff) * ratio.denominator)
    return max(plan.min_size, (highest - lowest) // ratio.numerator)


def refund(plan: LimiterPlan, *, times_sampled: int) -> tuple[int, int]:
    """What an item leaves in the counts that goes before it was fully used.

    An item that was evicted, dropped or has expired takes its insert and its samples with it, as
    if it had never been: nobody has to make up for samples of it that are still due. One that was
    sampled more often than its share stays, or others would be sampled as often once more.

    Returns:
        `(inserts, samples)` to keep counting, and as many deletes as inserts.
    """
    if times_sampled <= _exact(plan.samples_per_insert):
        return 0, 0
    return 1, times_sampled


def _why_not(plan: LimiterPlan, counts: Counts, n: int, fits: int) -> tuple[str, bool]:
    """Why `n` can't be inserted now, and whether waiting may help."""
    largest = largest_insert(plan)
    if n > largest:
        return (
            f"an insert of {n} can't go: at most {_text(largest)} fit at once between min_diff "
            f"{_text(plan.min_diff)} and max_diff {_text(plan.max_diff)}; split it"
        ), False
    ratio = f"samples_per_insert {_text(plan.samples_per_insert)}"
    if not can_sample(plan, counts, 1).ok:
        reason = f"{ratio} allows {fits} of {n} inserts before anything can be sampled; split it"
        return reason, False
    return f"{ratio} allows {fits} more inserts until more is sampled, {n} are wanted", True


def _difference(plan: LimiterPlan, counts: Counts) -> Fraction:
    return counts.inserts * _exact(plan.samples_per_insert) - counts.samples


def _bound(value: float) -> Fraction | float:
    return _exact(value) if isfinite(value) else value


@lru_cache(maxsize=1024)
def _exact(value: float) -> Fraction:
    """The number as people write it: 0.1 is 1/10, so that 10 inserts at 0.1 make a whole sample."""
    return Fraction(str(value))


def _text(value: Fraction | float) -> str:
    return str(int(value)) if isfinite(value) and value == int(value) else f"{float(value):.6g}"
