"""`python -m benchmarks.compare.report FOLDER`: tables and a plot of what a run found.

`report.md` and `report.png` go beside its `raw.jsonl`. Figures are medians; after each, half of the
distance between the lowest and the highest.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.compare import plot
from benchmarks.compare.figures import DURABLE, TITLES, Figures, Spread
from benchmarks.compare.targets import judge
from benchmarks.workload import IMAGE, SIZES

_RATES = (
    ("Ingest, one writer", "ingest1"),
    ("Ingest, four writers", "ingest4"),
    ("Ingest, four writers, where what was stored before has been sampled", "reused4"),
    ("Sampling, one reader, batches of 64", "sample"),
    ("Mixed: four writers", "mixed-ingest4"),
    ("Mixed: the reader", "mixed-sample"),
)
_IMAGE_CASES = ("ingest1", "sample", "reused1")


def main() -> None:
    """Report on a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("bench-output/compare"))
    make(parser.parse_args().folder)


def make(folder: Path) -> None:
    """Write the tables and the plot, and print the tables."""
    figures = Figures(folder)
    text = "\n".join(_lines(figures)) + "\n"
    (folder / "report.md").write_text(text)
    print(text)
    plot.draw(figures, folder / "report.png")
    print(f"{folder / 'report.md'}, {folder / 'report.png'}")


def _lines(figures: Figures) -> Iterator[str]:
    yield _header(figures)
    for title, case in _RATES:
        yield from _rates(figures, title, case)
    yield from _latencies(figures)
    yield from _images(figures)
    yield from _cpu(figures)
    yield "\n## The machine's limits\n\n| | |\n|---|---|"
    for name, unit, spread in figures.limits():
        yield f"| {name} | {_shown(spread)} {unit} |"
    yield "\n## Targets\n\n| | size | ratio or ms | target | | floor |\n" + "|---" * 6 + "|"
    for target in judge(figures):
        bound = f"{'>=' if target.at_least else '<='} {target.bound:g}"
        verdict = "met" if target.is_met else "**MISSED**"
        detail = f" ({target.detail})" if target.detail else ""
        yield (
            f"| {target.name}{detail} | {target.size} | {target.value:.2f} | {bound} | {verdict} "
            f"| {'-' if target.floor is None else f'{target.floor:.2f}'} |"
        )
    for error in figures.errors:
        text = error["text"].splitlines()[0]
        yield f"\n{error['system']} failed at {error['size']}: {text}"


def _header(figures: Figures) -> str:
    header, loads = figures.header, figures.loads
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    return (
        f"{header['time']}: {header['cores']} cores, {header['machine']}, "
        f"{header['memory_bytes'] / 2**30:.0f} GiB, Linux {header['kernel']}; {versions}. "
        f"Load average {min(loads):.1f} to {max(loads):.1f}. {figures.repetitions} repetitions, "
        "medians, systems in turns."
    )


def _rates(figures: Figures, title: str, case: str) -> Iterator[str]:
    yield f"\n## {title}\n\n| experiences/s | durable | S | M | L |\n|---|---|---|---|---|"
    for system, mode in figures.cases(case):
        cells = [_shown(figures.rate(system, mode, case, size)) for size in SIZES]
        if set(cells) != {"-"}:
            yield f"| {_name(system, mode)} | {_durable(system)} | {' | '.join(cells)} |"


def _latencies(figures: Figures) -> Iterator[str]:
    for title, case in (("One insert (M)", "insert1"), ("One batch of 64 (M)", "fetch1")):
        yield f"\n## {title}\n\n| ms | durable | p50 | p99 |\n|---|---|---|---|"
        for system, mode in figures.cases(case):
            cells = [
                _shown(figures.milliseconds(system, mode, case, percent)) for percent in (50, 99)
            ]
            yield f"| {_name(system, mode)} | {_durable(system)} | {' | '.join(cells)} |"


def _images(figures: Figures) -> Iterator[str]:
    yield "\n## Experiences of 8 MiB\n"
    yield "| MB/s | durable | pushed | sampled | pushed again |\n|---|---|---|---|---|"
    cases = dict.fromkeys([*figures.cases("ingest1"), *figures.cases("sample")])
    megabytes = IMAGE.num_bytes / 1e6
    for system, mode in cases:
        rates = [figures.rate(system, mode, case, IMAGE.name) for case in _IMAGE_CASES]
        if any(rates):
            cells = [
                _shown(Spread(tuple(value * megabytes for value in rate.values)) if rate else None)
                for rate in rates
            ]
            yield f"| {_name(system, mode)} | {_durable(system)} | {' | '.join(cells)} |"


def _cpu(figures: Figures) -> Iterator[str]:
    yield (
        "\n## CPU time\n\nMicroseconds per experience, four writers or one reader; client, then "
        "the server's processes.\n\n| | S | M | L |\n|---|---|---|---|"
    )
    for case in ("ingest4", "reused4", "sample"):
        for system, mode in figures.cases(case):
            cells = []
            for size in SIZES:
                used = figures.cpu(system, mode, case, size)
                cells.append(" + ".join(f"{value:.0f}" for value in used.values()) or "-")
            if set(cells) != {"-"}:
                yield f"| {case}, {_name(system, mode)} | {' | '.join(cells)} |"


def _name(system: str, mode: str) -> str:
    return f"{TITLES[system]} ({mode})"


def _durable(system: str) -> str:
    return "yes" if system in DURABLE else "no"


def _shown(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    digits = f"{spread.median:,.0f}" if spread.median >= 100 else f"{spread.median:.3g}"
    return f"{digits} ±{spread.spread:.0%}" if len(spread.values) > 1 else digits


if __name__ == "__main__":
    main()
