"""Whether a unit is fresh enough for a consumer now. What becomes of a stale one is the caller's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

UNKNOWN_VERSION: Final = 2**63
"""Above every policy version: what a unit waits for while its own isn't known."""

Reason = Literal["", "lag", "span", "age"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Age:
    """How old one unit is, a single experience or a whole group."""

    min_version: int | None
    """Lowest policy version of its members; None: unknown."""
    max_version: int | None
    """Highest policy version of its members; None: unknown."""
    push_time: float
    """When its oldest member was pushed; seconds since the Unix epoch."""


def why_stale(
    age: Age,
    *,
    max_lag: int | None = None,
    max_version_span: int | None = None,
    max_age_seconds: float | None = None,
    published: int | None,
    now: float,
) -> Reason:
    """Say which bound a unit exceeds, the first in their order; empty: it is fresh.

    Unknown versions are not stale by lag or span; their age in seconds counts all the same.

    Args:
        age: Of the unit.
        max_lag: Most that its lowest version may be behind the published one; None: any, as below.
        max_version_span: Most between its lowest and its highest version.
        max_age_seconds: Most since its oldest member was pushed.
        published: The policy version that the trainer published last; None: none was.
        now: Seconds since the Unix epoch.
    """
    low, high = age.min_version, age.max_version
    if low is not None:
        if max_lag is not None and published is not None and published - low > max_lag:
            return "lag"
        if max_version_span is not None and high is not None and high - low > max_version_span:
            return "span"
    if max_age_seconds is not None and now - age.push_time > max_age_seconds:
        return "age"
    return ""
