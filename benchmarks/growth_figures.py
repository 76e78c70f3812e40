"""What a run of `growth` found: medians, what growing costs of each, and whether that may be.

Pure: from the raw lines to the lines of tables.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

MAX_COST = 0.15
"""Part of any figure that growing from 10 thousand to 1 million experiences may cost."""
RATE = "experiences/s"
MEGABYTES = "MB"
BASE_BYTES, BYTES_PER_EXPERIENCE = 300e6, 600.0
"""Memory that a server may have beyond the page cache, all its processes together."""


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


class Figures:
    """All raw figures of a run."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    def names(self, contest: str) -> list[tuple[str, str]]:
        """Figures with their units."""
        names = dict.fromkeys((r.figure, r.unit) for r in self._records if r.contest == contest)
        return [(figure, unit) for figure, unit in names if unit != MEGABYTES]

    def median(self, contest: str, shape: str, figure: str, unit: str) -> float:
        """The one in the middle.

        Raises:
            statistics.StatisticsError: It wasn't measured.
        """
        key = (contest, shape, figure, unit)
        return statistics.median(
            r.value for r in self._records if (r.contest, r.shape, r.figure, r.unit) == key
        )

    def memory(self) -> list[Record]:
        """What the servers' processes held beyond the page cache."""
        return [record for record in self._records if record.unit == MEGABYTES]


def cost(small: float, large: float, unit: str) -> float:
    """Which part of a figure growing costs: of a rate what it falls, of a time what it rises."""
    if not small:
        return 0.0
    change = large / small - 1.0
    return -change if unit == RATE else change


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
        columns.append("costs")
    if max_cost is not None:
        columns.append("goal")
    yield f"\n| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for figure, unit in figures.names(contest):
        values = [figures.median(contest, shape, figure, unit) for shape in shapes]
        loss = cost(values[0], values[-1], unit)
        cells = [f"{figure}, {unit}", *map(_shown, values)]
        if len(shapes) > 1:
            cells.append(f"{loss:+.0%}")
        if max_cost is not None:
            cells.append(_verdict(loss < max_cost))
        yield f"| {' | '.join(cells)} |"


def memory_table(figures: Figures) -> Iterator[str]:
    """What each server held, and what it may hold."""
    yield "\n| beyond the page cache, MB | measured | goal | |\n|---|---|---|---|"
    for record in figures.memory():
        limit = max_memory_bytes(record.population) / 1e6
        yield (
            f"| {record.contest} {record.shape}, {record.figure} | {record.value:.0f} | "
            f"{limit:.0f} | {_verdict(record.value < limit)} |"
        )


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "**MISSED**"
