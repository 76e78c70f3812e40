"""What a run of `growth` found: medians, what growing costs of each, and whether that may be.

Pure: from the raw lines to the lines of tables.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

MAX_COST = 0.15
"""Part of any figure that growing from 10 thousand to 1 million experiences may cost."""
RATE = "experiences/s"
MEGABYTES = "MB"
MET, MISSED, UNDECIDED = "met", "**MISSED**", "undecided"
BASE_BYTES, BYTES_PER_EXPERIENCE = 300e6, 600.0
"""Memory that a server may have beyond the page cache, all its processes together."""
_DOUBT = 0.05
"""Chance that what a figure really costs is outside the interval that is given for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One raw figure."""

    contest: str
    """What differs between the shapes that are compared."""
    shape: str
    figure: str
    unit: str
    value: float
    population: int = 0
    """Experiences stored, where memory was measured."""

    def line(self) -> dict[str, str | float]:
        """As it is written."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Cost:
    """Which part of a figure growing costs: of a rate what it falls, of a time what it rises.

    The median of the turns' own, each of which compares two measurements within seconds: what the
    machine does besides changes slower than that.
    """

    median: float
    low: float
    high: float
    """It is between these with a chance of 95 %, whatever the distribution (a sign test's interval)."""

    @classmethod
    def of(cls, small: Sequence[float], large: Sequence[float], unit: str) -> Cost:
        """From the values of the small one and of the large one, turn by turn."""
        costs = sorted(map(_cost, small, large, [unit] * len(small)))
        place = _outermost(len(costs))
        if place is None:
            return cls(statistics.median(costs), -math.inf, math.inf)
        return cls(statistics.median(costs), costs[place], costs[-1 - place])

    @property
    def interval(self) -> str:
        """In words."""
        if math.isinf(self.high):
            return "too few turns"
        return f"{self.low:+.0%} and {self.high:+.0%}"

    def verdict(self, goal: float) -> str:
        """Whether it is below the goal, or that the turns don't tell."""
        if self.high < goal:
            return MET
        return MISSED if self.low >= goal else UNDECIDED


def _cost(small: float, large: float, unit: str) -> float:
    if not small:
        return 0.0
    change = large / small - 1.0
    return -change if unit == RATE else change


def _outermost(count: int) -> int | None:
    """The place of the lowest of so many sorted values that may well be above the true median.

    So many or fewer of them are below it with a chance of at most half of `_DOUBT`: each is on either
    side like a coin. None: there are too few to tell.
    """
    chance, place = 0.0, None
    for number in range(count):
        chance += math.comb(count, number) / 2.0**count
        if chance > _DOUBT / 2:
            break
        place = number
    return place


class Figures:
    """All raw figures of a run."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    def names(self, contest: str) -> list[tuple[str, str]]:
        """Figures with their units."""
        names = dict.fromkeys((r.figure, r.unit) for r in self._records if r.contest == contest)
        return [(figure, unit) for figure, unit in names if unit != MEGABYTES]

    def values(self, contest: str, shape: str, figure: str) -> list[float]:
        """Those of one shape, turn by turn."""
        key = (contest, shape, figure)
        return [r.value for r in self._records if (r.contest, r.shape, r.figure) == key]

    def cost(self, contest: str, shapes: Sequence[str], figure: str, unit: str) -> Cost:
        """What the last shape costs beside the first one."""
        small, large = (self.values(contest, shape, figure) for shape in (shapes[0], shapes[-1]))
        return Cost.of(small, large, unit)

    def memory(self) -> list[Record]:
        """What the servers' processes held beyond the page cache."""
        return [record for record in self._records if record.unit == MEGABYTES]


def max_memory_bytes(population: int) -> float:
    """What a server with so many experiences may hold beyond the page cache."""
    return BASE_BYTES + BYTES_PER_EXPERIENCE * population


def table(
    figures: Figures, contest: str, shapes: Sequence[str], *, max_cost: float | None = None
) -> Iterator[str]:
    """Medians of one contest, by shape, and what the last one costs beside the first one.

    Args:
        figures: All of them.
        contest: Which.
        shapes: From the smallest to the largest.
        max_cost: The goal; None: there is none.
    """
    columns = [contest, *shapes]
    if len(shapes) > 1:
        columns += ["costs", "between"]
    if max_cost is not None:
        columns.append(f"below {max_cost:.0%}")
    yield f"\n| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for figure, unit in figures.names(contest):
        cells = [f"{figure}, {unit}"]
        cells += [_shown(statistics.median(figures.values(contest, s, figure))) for s in shapes]
        if len(shapes) > 1:
            cost = figures.cost(contest, shapes, figure, unit)
            cells += [f"{cost.median:+.0%}", cost.interval]
            if max_cost is not None:
                cells.append(cost.verdict(max_cost))
        yield f"| {' | '.join(cells)} |"


def undecided(figures: Figures, contest: str, shapes: Sequence[str], max_cost: float) -> list[str]:
    """The figures of which the turns so far don't tell whether they meet the goal."""
    return [
        figure
        for figure, unit in figures.names(contest)
        if figures.cost(contest, shapes, figure, unit).verdict(max_cost) == UNDECIDED
    ]


def memory_table(figures: Figures) -> Iterator[str]:
    """What each server held, and what it may hold."""
    yield "\n| beyond the page cache, MB | measured | goal | |\n|---|---|---|---|"
    for record in figures.memory():
        limit = max_memory_bytes(record.population) / 1e6
        yield (
            f"| {record.contest} {record.shape}, {record.figure} | {record.value:.0f} | "
            f"{limit:.0f} | {_memory_verdict(record)} |"
        )


def verdicts(figures: Figures, contest: str, shapes: Sequence[str]) -> Iterator[str]:
    """The goals, a line each: what growing costs, and memory."""
    costs = {
        figure: figures.cost(contest, shapes, figure, unit)
        for figure, unit in figures.names(contest)
    }
    if costs and len(shapes) > 1:
        found = [cost.verdict(MAX_COST) for cost in costs.values()]
        worst = max(costs, key=lambda figure: costs[figure].high)
        yield (
            f"\nGrowing from {shapes[0]} to {shapes[-1]} experiences costs less than {MAX_COST:.0%} "
            f"of any figure: {_worst(found)} ({found.count(MET)} of {len(found)}; the most: {worst}, "
            f"{costs[worst].median:+.0%}, at most {costs[worst].high:+.0%})"
        )
    records = figures.memory()
    if records:
        room = {
            record: max_memory_bytes(record.population) - record.value * 1e6 for record in records
        }
        least = min(records, key=room.__getitem__)
        yield (
            f"Memory under {BASE_BYTES / 1e6:.0f} MB plus {BYTES_PER_EXPERIENCE:.0f} bytes per "
            f"experience: {_worst(list(map(_memory_verdict, records)))} (the least room: "
            f"{least.contest} {least.shape}, {least.figure}: {least.value:.0f} MB)"
        )


def _worst(found: Sequence[str]) -> str:
    return next((verdict for verdict in (MISSED, UNDECIDED) if verdict in found), MET)


def _memory_verdict(record: Record) -> str:
    return MET if record.value * 1e6 < max_memory_bytes(record.population) else MISSED


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
