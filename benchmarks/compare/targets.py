"""What is to be reached, whether it is, and what the floor reaches: ratios of medians of one run.

The floor is a server of gRPC and LMDB with nothing between them (`adapters/floor_server`): where it
misses a target, what is between them isn't what keeps it from being met.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.compare.figures import Figures, Spread
from benchmarks.workload import IMAGE, SIZES

_OURS = "ours"
_FLOOR = "floor"
_FLOOR_MODE = "stream"


@dataclass(frozen=True, slots=True)
class Target:
    """One comparison."""

    name: str
    size: str
    value: float
    """Ours, or ours divided by the other's."""
    bound: float
    at_least: bool = True
    detail: str = ""
    floor: float | None = None
    """The floor's value; None where it wasn't measured, or says nothing."""

    @property
    def is_met(self) -> bool:
        """Whether the bound is kept."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def judge(figures: Figures) -> Iterator[Target]:
    """All targets for which the run has the figures."""
    for size in SIZES:
        yield from _ingest(figures, size)
    for size in SIZES:
        yield from _sampling(figures, size)
    yield from _latency(figures)
    for size in SIZES:
        yield from _mixed(figures, size)
    yield from _images(figures)


def _ingest(figures: Figures, size: str) -> Iterator[Target]:
    for other, bound in (("reverb", 1.3), ("redis", 1.3), ("redis-always", 2.0)):
        if other == "redis" and size != "L":
            continue
        ours, floor = _both(figures, "ingest4", size)
        for mode in figures.modes(other, "ingest4"):
            theirs = figures.rate(other, mode, "ingest4", size)
            if ours and theirs:
                name = f"durable ingest, 4 writers, over {other} ({mode})"
                yield _ratio(name, size, ours[1], theirs, bound, ours[0], floor=floor)


def _sampling(figures: Figures, size: str) -> Iterator[Target]:
    for mode, other, bound in (("packed", "reverb", 2.0), ("trxp", "transferqueue", 3.0)):
        ours = figures.rate(_OURS, mode, "sample", size)
        floor = figures.rate(_FLOOR, _FLOOR_MODE, "sample", size)
        for their_mode in figures.modes(other, "sample"):
            theirs = figures.rate(other, their_mode, "sample", size)
            if ours and theirs:
                name = f"sampling, {mode}, over {other} ({their_mode})"
                yield _ratio(name, size, ours, theirs, bound, floor=floor)


def _latency(figures: Figures) -> Iterator[Target]:
    p50 = figures.milliseconds(_OURS, "push", "insert1", 50)
    p99 = figures.milliseconds(_OURS, "push", "insert1", 99)
    fsync = figures.limit("fsync 4 KB p50")
    floors = [figures.milliseconds(_FLOOR, _FLOOR_MODE, "insert1", percent) for percent in (50, 99)]
    floor, slowest = (found.median if found else None for found in floors)
    if p50 and p99 and fsync:
        above = p50.median - fsync.median
        detail = f"{p50.median:.2f} ms, fsync {fsync.median:.2f} ms"
        least = floor - fsync.median if floor else None
        name = "one durable insert, p50, ms above fsync"
        yield Target(name, "M", above, 1.0, False, detail, least)
        ratio = p99.median / p50.median
        detail = f"{p99.median:.2f} ms"
        least = slowest / floor if slowest and floor else None
        yield Target("one durable insert, p99 over p50", "M", ratio, 3.0, False, detail, least)
    of_floor = figures.milliseconds(_FLOOR, _FLOOR_MODE, "fetch1", 50)
    for mode in figures.modes(_OURS, "fetch1"):
        batch = figures.milliseconds(_OURS, mode, "fetch1", 50)
        if batch:
            least = of_floor.median if of_floor else None
            name = f"a batch of 64, {mode}, p50, ms"
            yield Target(name, "M", batch.median, 3.0, False, floor=least)


def _mixed(figures: Figures, size: str) -> Iterator[Target]:
    for mixed, solo in (("mixed-ingest4", "ingest4"), ("mixed-sample", "sample")):
        for mode in figures.modes(_OURS, mixed):
            both = figures.rate(_OURS, mode, mixed, size)
            alone = figures.rate(_OURS, mode, solo, size)
            if both and alone:
                name = f"mixed, {mode}, of its own solo figure"
                yield _ratio(name, size, both, alone, 0.5)


def _images(figures: Figures) -> Iterator[Target]:
    ours, floor = _both(figures, "ingest1", IMAGE.name)
    sink = figures.rate("echo", "sink", "ingest1", IMAGE.name)
    if ours and sink:
        name = "8 MB experiences pushed, of bare gRPC"
        yield _ratio(name, IMAGE.name, ours[1], sink, 0.6, ours[0], floor=floor)
    reading, reading_floor = _both(figures, "sample", IMAGE.name)
    source = figures.rate("echo", "source", "sample", IMAGE.name)
    if reading and source:
        name = "8 MB experiences sampled, of bare gRPC"
        yield _ratio(name, IMAGE.name, reading[1], source, 0.6, reading[0], floor=reading_floor)
    both = figures.rate("echo", "both", "ingest1", IMAGE.name)
    if ours and reading and both:
        value = _there_and_back(ours[1], reading[1]) / both.median
        least = None
        if floor and reading_floor:
            least = _there_and_back(floor, reading_floor) / both.median
        name = "8 MB there and back, of a bare gRPC echo"
        yield Target(name, IMAGE.name, value, 0.6, floor=least)


def _there_and_back(pushed: Spread, sampled: Spread) -> float:
    """Experiences per second, where each is pushed and then sampled."""
    return 1 / (1 / pushed.median + 1 / sampled.median)


def _both(
    figures: Figures, case: str, size: str
) -> tuple[tuple[str, Spread] | None, Spread | None]:
    """Our fastest mode, and the floor's rate."""
    return figures.best(_OURS, case, size), figures.rate(_FLOOR, _FLOOR_MODE, case, size)


def _ratio(
    name: str,
    size: str,
    ours: Spread,
    theirs: Spread,
    bound: float,
    mode: str = "",
    *,
    floor: Spread | None = None,
) -> Target:
    detail = f"{ours.median:,.0f}/s over {theirs.median:,.0f}/s" + (f", {mode}" if mode else "")
    least = None if floor is None else _over(floor, theirs)
    return Target(name, size, _over(ours, theirs), bound, True, detail, least)


def _over(rate: Spread, other: Spread) -> float:
    return rate.median / other.median if other.median else math.inf
