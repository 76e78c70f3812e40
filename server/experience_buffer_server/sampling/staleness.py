"""Whether a unit is fresh enough for a consumer now. What becomes of a stale one is the caller's.

The lag of a unit is the published policy version minus its lowest version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Age", "Verdict", "Window", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a consumer takes as fresh; None: unbounded."""

    max_lag: int | None = None
    """Published version minus the lowest version of the unit."""
    max_version_span: int | None = None
    """Highest minus lowest version within the unit."""
    max_age_seconds: float | None = None
    """Since the oldest member was pushed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Age:
    """How old one unit is, a single experience or a whole group."""

    min_version: int | None
    """Lowest policy version of its members; None: unknown."""
    max_version: int | None
    """Highest policy version of its members; None: unknown."""
    push_time: float
    """When its oldest member was pushed; seconds since the Unix epoch."""


class Verdict(NamedTuple):
    """What `judge` found."""

    kind: Literal["fresh", "stale", "future"]
    reason: str = ""
    """For people, with the numbers; empty when fresh."""
    label: Literal["", "lag", "span", "age", "future"] = ""
    """For metrics and filters; empty when fresh."""


_FRESH = Verdict("fresh")


def judge(
    age: Age, window: Window | None, *, published: int | None, now: float, hold_future: bool
) -> Verdict:
    """Judge one unit; all bounds are inclusive.

    A unit is of the future where it has a version above the published one, as after a trainer went
    back to an earlier checkpoint. Unknown versions are neither of the future nor stale by lag or
    span; their age in seconds counts all the same.

    Args:
        age: Of the unit.
        window: What is fresh; None: everything.
        published: The policy version that the trainer published last; None: none was.
        now: Seconds since the Unix epoch.
        hold_future: Units of the future are told apart, whatever their age; otherwise they are
            judged by the window alone.

    Returns:
        The first that holds of: future; stale by lag, by span, by age; fresh.
    """
    low, high = age.min_version, age.max_version
    if hold_future and published is not None and high is not None and high > published:
        return Verdict(
            "future", f"version {high} is newer than the published version {published}", "future"
        )
    if window is None:
        return _FRESH
    if window.max_lag is not None and low is not None and published is not None:
        lag = published - low
        if lag > window.max_lag:
            return Verdict("stale", f"lag {lag} exceeds max_lag {window.max_lag}", "lag")
    if window.max_version_span is not None and low is not None and high is not None:
        span = high - low
        if span > window.max_version_span:
            limit = f"max_version_span {window.max_version_span}"
            return Verdict("stale", f"versions {low} to {high} exceed {limit}", "span")
    if window.max_age_seconds is not None and now - age.push_time > window.max_age_seconds:
        seconds = round(now - age.push_time, 3)
        limit = f"max_age_seconds {window.max_age_seconds}"
        return Verdict("stale", f"age {seconds} s exceeds {limit}", "age")
    return _FRESH
