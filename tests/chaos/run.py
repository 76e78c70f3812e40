"""A run of the crash matrix: the points in epochs, each with a store of its own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chaos.epoch import Durability, Epoch
from tests.chaos.points import Point
from tests.chaos.report import Report


def run(
    points: Sequence[Point],
    *,
    folder: Path,
    library: Path,
    seed: int,
    epoch_kills: int,
    sabotage: str = "",
    say: Callable[[str], object] = lambda text: None,
) -> Report:
    """Go through the points in epochs; a sound epoch's files are removed."""
    total = Report()
    for number, start in enumerate(range(0, len(points), epoch_kills)):
        began = time.monotonic()
        place = folder / f"epoch-{number}"
        part = list(points[start : start + epoch_kills])
        durability: Durability = "interval" if number % 4 == 3 else "commit"
        if durability == "interval":
            part = [point.without_syncs() for point in part]
        epoch = Epoch(place, library, seed + number, durability=durability, sabotage=sabotage)
        report = epoch.run(part)
        total.add(report, where=f"epoch {number} (seed {seed + number})")
        say(
            f"epoch {number} ({durability}): {sum(report.kills.values())} kills, "
            f"{report.counts.acked_experiences} experiences, {report.counts.deliveries} deliveries, "
            f"{len(report.problems)} problems, {time.monotonic() - began:.0f} s"
        )
        if not report.problems:
            shutil.rmtree(place)
        elif sabotage:
            break
    return total
