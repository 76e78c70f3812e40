"""What is to be reached, and whether it is: ratios of medians of one run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.compare.figures import Figures, Spread
from benchmarks.workload import IMAGE, SIZES

_OURS = "ours"


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
        ours = figures.best(_OURS, "ingest4", size)
        for mode in figures.modes(other, "ingest4"):
            theirs = figures.rate(other, mode, "ingest4", size)
            if ours and theirs:
                name = f"durable ingest, 4 writers, over {other} ({mode})"
                yield _ratio(name, size, ours[1], theirs, bound, ours[0])


def _sampling(figures: Figures, size: str) -> Iterator[Target]:
    for mode, other, bound in (("packed", "reverb", 2.0), ("trxp", "transferqueue", 3.0)):
        ours = figures.rate(_OURS, mode, "sample", size)
        for their_mode in figures.modes(other, "sample"):
            theirs = figures.rate(other, their_mode, "sample", size)
            if ours and theirs:
                name = f"sampling, {mode}, over {other} ({their_mode})"
                yield _ratio(name, size, ours, theirs, bound)


def _latency(figures: Figures) -> Iterator[Target]:
    p50 = figures.milliseconds(_OURS, "push", "insert1", 50)
    p99 = figures.milliseconds(_OURS, "push", "insert1", 99)
    fsync = figures.limit("fsync 4 KB p50")
    if p50 and p99 and fsync:
        above = p50.median - fsync.median
        detail = f"{p50.median:.2f} ms, fsync {fsync.median:.2f} ms"
        yield Target("one durable insert, p50, ms above fsync", "M", above, 1.0, False, detail)
        ratio = p99.median / p50.median
        detail = f"{p99.median:.2f} ms"
        yield Target("one durable insert, p99 over p50", "M", ratio, 3.0, False, detail)
    for mode in figures.modes(_OURS, "fetch1"):
        batch = figures.milliseconds(_OURS, mode, "fetch1", 50)
        if batch:
            yield Target(f"a batch of 64, {mode}, p50, ms", "M", batch.median, 3.0, False)


def _mixed(figures: Figures, size: str) -> Iterator[Target]:
    for mixed, solo in (("mixed-ingest4", "ingest4"), ("mixed-sample", "sample")):
        for mode in figures.modes(_OURS, mixed):
            both = figures.rate(_OURS, mode, mixed, size)
            alone = figures.rate(_OURS, mode, solo, size)
            if both and alone:
                yield _ratio(f"mixed, {mode}, of its own solo figure", size, both, alone, 0.5)


def _images(figures: Figures) -> Iterator[Target]:
    ours = figures.best(_OURS, "ingest1", IMAGE.name)
    sink = figures.rate("echo", "sink", "ingest1", IMAGE.name)
    if ours and sink:
        name = "8 MB experiences pushed, of bare gRPC"
        yield _ratio(name, IMAGE.name, ours[1], sink, 0.6, ours[0])
    reading = figures.best(_OURS, "sample", IMAGE.name)
    source = figures.rate("echo", "source", "sample", IMAGE.name)
    if reading and source:
        name = "8 MB experiences sampled, of bare gRPC"
        yield _ratio(name, IMAGE.name, reading[1], source, 0.6, reading[0])
    both = figures.rate("echo", "both", "ingest1", IMAGE.name)
    if ours and reading and both:
        seconds = 1 / ours[1].median + 1 / reading[1].median
        value = 1 / seconds / both.median
        yield Target("8 MB there and back, of a bare gRPC echo", IMAGE.name, value, 0.6)


def _ratio(
    name: str, size: str, ours: Spread, theirs: Spread, bound: float, mode: str = ""
) -> Target:
    detail = f"{ours.median:,.0f}/s over {theirs.median:,.0f}/s" + (f", {mode}" if mode else "")
    ratio = ours.median / theirs.median if theirs.median else math.inf
    return Target(name, size, ratio, bound, True, detail)
