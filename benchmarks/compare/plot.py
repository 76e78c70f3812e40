"""The plot of a run: what each system moves, at each size, with the spread."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.compare.figures import DURABLE, TITLES, Figures
from benchmarks.workload import SIZES

_CASES = (("Ingest, four writers", "ingest4"), ("Sampling, one reader", "sample"))
_OURS, _DURABLE, _OTHER = "#1b6ca8", "#7a7a7a", "#c9c9c9"


def draw(figures: Figures, path: Path) -> None:
    """Draw a panel per case and size; bars are medians, whiskers the lowest and the highest."""
    grid, rows = pyplot.subplots(
        len(_CASES), len(SIZES), figsize=(13, 8.5), layout="constrained", squeeze=False
    )
    for panels, (title, case) in zip(rows, _CASES, strict=True):
        for panel, size in zip(panels, SIZES, strict=True):
            _panel(panel, figures, case, size)
            panel.set_title(f"{title}: {size}", fontsize=10, loc="left")
    header = figures.header
    grid.suptitle(
        f"Thousand experiences per second, {header['cores']} cores, {figures.repetitions} "
        "repetitions in turns. Blue: this project; dark grey: durable when acknowledged",
        fontsize=11,
    )
    grid.savefig(path, dpi=110)
    pyplot.close(grid)


def _panel(panel: Axes, figures: Figures, case: str, size: str) -> None:
    found = [
        (system, mode, rate)
        for system, mode in figures.cases(case)
        if (rate := figures.rate(system, mode, case, size)) is not None
    ]
    found.sort(key=lambda entry: entry[2].median)
    heights = range(len(found))
    medians = [rate.median / 1e3 for _, _, rate in found]
    below = [(rate.median - min(rate.values)) / 1e3 for _, _, rate in found]
    above = [(max(rate.values) - rate.median) / 1e3 for _, _, rate in found]
    colours = [
        _OURS if system.startswith("ours") else _DURABLE if system in DURABLE else _OTHER
        for system, _, _ in found
    ]
    panel.barh(heights, medians, color=colours, xerr=(below, above), error_kw={"lw": 0.8})
    panel.set_yticks(
        heights, [f"{TITLES[system]} ({mode})" for system, mode, _ in found], fontsize=8
    )
    top = max([high + wide for high, wide in zip(medians, above, strict=True)], default=1.0)
    for height, median, wide in zip(heights, medians, above, strict=True):
        panel.text(median + wide + 0.015 * top, height, f"{median:.3g}", va="center", fontsize=8)
    panel.set_xlim(0, 1.15 * top)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(axis="x", labelsize=8)
