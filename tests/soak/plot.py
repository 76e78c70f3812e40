"""The picture of a soak: small multiples over time, the kills as marks. Nothing opens a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from matplotlib.figure import Figure

from tests.soak.run import Outcome
from tests.soak.verdict import MEBI, Call, percentile
from tests.soak.watch import Sample

T = TypeVar("T", Sample, Call)

BLUE, ORANGE, GREEN, GREY, RED = "#2b6cb0", "#dd6b20", "#2f855a", "#a0aec0", "#c53030"
_COLOURS: Final = {"server": BLUE, "writer": ORANGE, "compute": GREEN}
_CALL_COLOURS: Final = {"push": BLUE, "sample": ORANGE, "ack": GREEN}
BIN_SECONDS: Final = 10.0
_HEADROOM: Final = 1.25


def write_plot(run: Outcome, path: Path, *, title: str) -> None:
    """Draw a run as a PNG; an older one is replaced."""
    figure = Figure(figsize=(13, 7.5), layout="constrained", dpi=110)
    grid = figure.subplots(2, 3, sharex=True)
    panels = (_memory, _descriptors, _disk, _latency, _depths, _rates)
    for axes, draw in zip(grid.flat, panels, strict=True):
        draw(axes, run)
        _frame(axes, run)
    for axes in grid[1]:
        axes.set_xlabel("minutes (grey: warm-up; red marks: a client is killed)")
    figure.suptitle(title)
    figure.savefig(path, format="png")


def _memory(axes: Any, run: Outcome) -> None:
    _lines(axes, run, lambda one, name: one.processes[name].memory_bytes / 1e6)
    axes.set_title("Memory beyond the page cache, MB")


def _descriptors(axes: Any, run: Outcome) -> None:
    _lines(axes, run, lambda one, name: one.processes[name].num_descriptors)
    _lines(axes, run, lambda one, name: one.processes[name].num_threads, style=":")
    axes.plot([], [], color=GREY, linestyle=":", label="threads")
    axes.set_title("Descriptors, and threads")


def _lines(
    axes: Any, run: Outcome, value: Callable[[Sample, str], float], style: str = "-"
) -> None:
    for name, colour in _COLOURS.items():
        values = [value(one, name) if name in one.processes else None for one in run.watch.samples]
        label = name if style == "-" else None
        axes.plot(run.minutes, values, color=colour, linestyle=style, linewidth=1.2, label=label)


def _disk(axes: Any, run: Outcome) -> None:
    file = [sample.file_bytes / MEBI for sample in run.watch.samples]
    payload = [sample.payload_bytes / MEBI for sample in run.watch.samples]
    axes.fill_between(run.minutes, payload, file, color=GREY, alpha=0.2, linewidth=0)
    axes.plot(run.minutes, file, color=GREY, linewidth=1.2, label="the store's file")
    axes.plot(run.minutes, payload, color=BLUE, linewidth=1.0, label="payloads in it")
    axes.set_title("Disk, MiB")


def _latency(axes: Any, run: Outcome) -> None:
    starts = _bins(run)
    for kind, colour in _CALL_COLOURS.items():
        calls = [call for call in run.calls if call.kind == kind]
        for percent, style in ((50, ":"), (99, "-")):
            values = [
                1e3 * percentile([call.seconds for call in _within(calls, start)], percent)
                for start in starts
            ]
            label = f"{kind} p99" if percent == 99 else None
            axes.plot(
                _middles(run), values, color=colour, linestyle=style, linewidth=1.2, label=label
            )
    slowest = [1e3 * sample.slowest_fsync_seconds for sample in run.watch.samples]
    axes.plot(run.minutes, slowest, ".", color=GREY, markersize=2, label="bare fsync, slowest")
    axes.set_yscale("log")
    axes.set_title("Latency, ms per 10 s (dotted: p50)")


def _depths(axes: Any, run: Outcome) -> None:
    names = {"for the logger": ORANGE, "for the trainer": BLUE, "open groups": GREEN, "leases": RED}
    for name, colour in names.items():
        most = [
            max((one.depths[name] for one in _within(run.watch.samples, start)), default=0)
            for start in _bins(run)
        ]
        axes.plot(_middles(run), most, color=colour, linewidth=1.2, label=name)
    axes.set_yscale("symlog", linthresh=10)
    axes.set_title("The queue: most that waits, per 10 s")


def _rates(axes: Any, run: Outcome) -> None:
    starts = _bins(run)
    for kind, colour in _CALL_COLOURS.items():
        calls = [call for call in run.calls if call.kind == kind]
        values = [len(_within(calls, start)) / BIN_SECONDS for start in starts]
        axes.plot(_middles(run), values, color=colour, linewidth=1.2, label=kind)
    axes.set_title("Calls per second")


def _frame(axes: Any, run: Outcome) -> None:
    """What all panels have: no clutter, the warm-up in grey, a mark per kill, a legend."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, max(run.minute(run.end), 1e-3))
    if axes.get_yscale() != "log":
        axes.set_ylim(0, _HEADROOM * axes.get_ylim()[1])
    else:
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** (_HEADROOM - 1))
    axes.axvspan(0, run.minute(run.warm), color=GREY, alpha=0.12, linewidth=0)
    minutes = [run.minute(kill.time) for kill in run.kills]
    # Horizontally in minutes, vertically in shares of the axes.
    place = {"transform": axes.get_xaxis_transform(), "clip_on": False}
    axes.plot(minutes, [0.0] * len(minutes), "|", color=RED, markersize=7, alpha=0.7, **place)
    axes.legend(loc="upper left", frameon=False, ncols=2, fontsize=8)


def _bins(run: Outcome) -> list[float]:
    """Where each span of `BIN_SECONDS` begins; only whole ones, or one of a very short run."""
    count = max(int((run.end - run.start) / BIN_SECONDS), 1)
    return [run.start + number * BIN_SECONDS for number in range(count)]


def _middles(run: Outcome) -> list[float]:
    return [run.minute(start + BIN_SECONDS / 2) for start in _bins(run)]


def _within(timed: Sequence[T], start: float) -> list[T]:
    return [one for one in timed if 0 <= one.time - start < BIN_SECONDS]
