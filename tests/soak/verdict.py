"""Is it flat? Pure arithmetic over what was seen; nothing here reads a file or a clock."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.soak.watch import Sample

MEBI: Final = 1024 * 1024
CALLS: Final = ("push", "sample", "ack")
_STEP_BYTES: Final = 16 * MEBI
"""The store sets aside disk space in steps of as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What still counts as flat."""

    memory_per_minute: float = 1e6
    """Bytes that a process may grow by, per minute."""
    num_descriptors: int = 3
    """Descriptors, or threads, that there may be more at the end: clients come and go."""
    file_growth: float = _STEP_BYTES
    """Bytes that the store's file may grow by after the warm-up."""
    latency_ratio: float = 1.5
    """p99 of the last minute over that of the first."""


@dataclass(frozen=True, slots=True)
class Line:
    what: str
    found: str
    limit: str
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    kind: str
    time: float
    """When it was answered, by `time.monotonic`."""
    seconds: float


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points: up to 29 % of them may be outliers.

    Args:
        points: (x, y); those with equal x aren't paired.

    Returns:
        The slope, y per x; 0 with fewer than two different x.

    Source: Theil 1950; Sen 1968.
    """
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for place, earlier in enumerate(points)
        for later in points[place + 1 :]
        if later[0] != earlier[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent don't exceed; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(math.ceil(len(values) * percent / 100) - 1, 0)]


def judge(
    samples: Sequence[Sample],
    calls: Sequence[Call],
    *,
    begin: float,
    end: float,
    window: float,
    limits: Limits,
) -> list[Line]:
    """Judge what a server took between two times, the warm-up being over.

    Args:
        samples: In order of time.
        calls: Of the clients.
        begin: Where the warm-up ends, by `time.monotonic`.
        end: Where the load ends.
        window: Seconds at both ends that are compared: a minute, or less of a short soak.
        limits: What counts as flat.
    """
    seen = [sample for sample in samples if begin <= sample.time <= end]
    if len(seen) < 4:
        return [Line("samples", f"{len(seen)}", "4", False)]
    first = [sample for sample in seen if sample.time < begin + window]
    last = [sample for sample in seen if sample.time > end - window]
    lines = []
    for name in ("server", "writer", "compute"):
        lines += _judge_process(name, seen, first, last, limits)
    lines.append(_judge_file(seen, limits))
    lines += [_judge_calls(kind, calls, begin, end, window, limits) for kind in CALLS]
    lines.append(_compare_disk(first, last))
    return lines


def _judge_process(
    name: str,
    seen: Sequence[Sample],
    first: Sequence[Sample],
    last: Sequence[Sample],
    limits: Limits,
) -> list[Line]:
    if any(name not in sample.processes for sample in seen):
        return [Line(f"{name}: alive", "it was gone", "always", False)]
    slope = 60 * theil_sen([(one.time, one.processes[name].memory_bytes) for one in seen])
    most = limits.memory_per_minute
    found, limit = f"{slope / 1e6:+.2f} MB", f"{most / 1e6:.2f} MB"
    lines = [Line(f"{name}: memory per minute", found, limit, slope < most)]
    counts: Mapping[str, Callable[[Sample], int]] = {
        "descriptors": lambda one: one.processes[name].num_descriptors,
        "threads": lambda one: one.processes[name].num_threads,
    }
    for what, count in counts.items():
        before, after = statistics.median(map(count, first)), statistics.median(map(count, last))
        found, limit = f"{before:g} → {after:g}", f"+{limits.num_descriptors}"
        lines.append(
            Line(f"{name}: {what}", found, limit, after - before <= limits.num_descriptors)
        )
    return lines


def _judge_file(seen: Sequence[Sample], limits: Limits) -> Line:
    growth = seen[-1].file_bytes - seen[0].file_bytes
    found, limit = f"{growth / MEBI:.0f} MiB", f"{limits.file_growth / MEBI:.0f} MiB"
    return Line("disk: growth of the store's file", found, limit, growth <= limits.file_growth)


def _compare_disk(first: Sequence[Sample], last: Sequence[Sample]) -> Line:
    """What the machine did meanwhile: no verdict on the server, but on the comparison above."""
    before, after = (
        percentile([one.slowest_fsync_seconds for one in part], 90) for part in (first, last)
    )
    found = f"{after / before:.2f} ({1e3 * before:.1f} → {1e3 * after:.1f} ms)"
    return Line("for comparison: bare fsync, p90 of each second's slowest", found, "", True)


def _judge_calls(
    kind: str, calls: Sequence[Call], begin: float, end: float, window: float, limits: Limits
) -> Line:
    of_kind = [call for call in calls if call.kind == kind]
    first = [call.seconds for call in of_kind if begin <= call.time < begin + window]
    last = [call.seconds for call in of_kind if end - window < call.time <= end]
    before, after = percentile(first, 99), percentile(last, 99)
    ratio = after / before if before else math.inf
    found = f"{ratio:.2f} ({1e3 * before:.1f} → {1e3 * after:.1f} ms)"
    # Of none at all it is NaN, and fails.
    ok = ratio <= limits.latency_ratio
    return Line(
        f"{kind}: p99 at the end over p99 at the start", found, f"{limits.latency_ratio:g}", ok
    )
