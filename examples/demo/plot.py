"""The curves of a run as a PNG. Nothing here opens a window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from examples.demo.history import History, Kill
from examples.demo.settings import DemoSettings

# Told apart also by those who see no difference between red and green.
BLUE, ORANGE, GREY, RED, VIOLET = "#2b6cb0", "#dd6b20", "#718096", "#c53030", "#6b46c1"
KILLS = {
    "server": (RED, "server killed, until it serves again"),
    "trainer": (VIOLET, "both ranks killed, until they have their checkpoint"),
}
MEAN_UPDATES = 15
"""Width of the window of a mean, centred on each update."""
BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 3, "frameon": False}
"""Where a legend covers no data."""


def write_plot(history: History, path: Path, *, settings: DemoSettings) -> None:
    """Write what `draw` draws as a PNG; an older one at `path` is replaced."""
    draw(history, settings=settings).savefig(path, format="png")


def draw(history: History, *, settings: DemoSettings) -> Figure:
    """Draw reward, accuracy, staleness and buffer depth over the seconds of training.

    Args:
        history: At least the untrained policy.
        settings: With target and bound.
    """
    figure = Figure(figsize=(11, 8), layout="constrained", dpi=120)
    (reward, accuracy), (staleness, depth) = figure.subplots(2, 2)
    _draw_reward(reward, history)
    _draw_accuracy(accuracy, history, settings.target_accuracy)
    _draw_staleness(staleness, history, settings.max_staleness)
    _draw_depth(depth, history)
    for axes in (reward, accuracy, staleness, depth):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        # What is drawn at the end isn't cut.
        axes.set_xlim(0, 1.02 * max(history.seconds, 1e-3))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("seconds of training")
        axes.legend(**BELOW, fontsize=9, handlelength=1.5, columnspacing=1.2)
        marks = _draw_kills(axes, history)
    # The same in all four.
    figure.legend(handles=marks, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(
        f"Reversing digits by reinforcement alone: {history.version} policy updates in "
        f"{history.seconds:.0f} s"
    )
    return figure


def _draw_reward(axes: Any, history: History) -> None:
    times, rewards = _series(history, "reward")
    axes.plot(times, rewards, color=GREY, alpha=0.6, linewidth=0.8, label="each update")
    label = f"mean of the {MEAN_UPDATES} around it"
    axes.plot(times, _centred_mean(rewards), color=BLUE, label=label)
    axes.set_ylim(top=1.02)
    axes.set_title("Reward of the rollouts")
    axes.set_ylabel("share of digits right")


def _draw_accuracy(axes: Any, history: History, target: float) -> None:
    times, accuracies = _series(history, "accuracy")
    axes.plot(times, accuracies, color=BLUE, marker="o", markersize=3, label="while training")
    axes.axhline(target, color=ORANGE, linestyle=":", label=f"target {target:.0%}")
    verdict = history.verdict
    if verdict is not None:
        label = f"at the end, {verdict.num_problems:,} others: {verdict.accuracy:.1%}"
        place = {"zorder": 3, "clip_on": False, "linestyle": "none", "label": label}
        look = {"color": ORANGE, "marker": "*", "markersize": 13}
        axes.plot([history.seconds], [verdict.accuracy], **place, **look)
    axes.set_ylim(top=1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title("Problems that no worker ever posed")
    axes.set_ylabel("solved, all six digits right")


def _draw_staleness(axes: Any, history: History, bound: int) -> None:
    times, mean = _series(history, "staleness")
    _, largest = _series(history, "max_staleness")
    dots = {"linestyle": "none", "marker": ".", "markersize": 4, "zorder": 3, "clip_on": False}
    axes.plot(times, largest, color=GREY, label="most of each batch", **dots)
    label = f"mean of {MEAN_UPDATES} batches"
    axes.plot(times, _centred_mean(mean), color=BLUE, label=label)
    axes.axhline(bound, color=ORANGE, linestyle=":", label=f"bound {bound}")
    found = [value for value in largest if not math.isnan(value)]
    axes.set_ylim(top=max([*found, bound]) + 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Staleness: how far the sampling policy is behind")
    axes.set_ylabel("policy versions")


def _draw_depth(axes: Any, history: History) -> None:
    depths, away = history.depths, [kill for kill in history.kills if kill.what == "server"]
    times, waiting = _gapped([(d.time, d.waiting) for d in depths], history, away)
    _, stored = _gapped([(d.time, d.waiting + d.retained) for d in depths], history, away)
    label = "trained, kept until a checkpoint"
    axes.fill_between(times, waiting, stored, color=GREY, alpha=0.35, linewidth=0, label=label)
    axes.fill_between(times, waiting, color=BLUE, alpha=0.7, linewidth=0, label="to be trained")
    axes.set_title("What is in the buffer")
    axes.set_ylabel("experiences")


def _draw_kills(axes: Any, history: History) -> list[Any]:
    """Mark them; what a legend needs for that."""
    marks = []
    for kill in history.kills:
        begin = kill.time - history.start_time
        color, label = KILLS[kill.what]
        end = begin + (kill.recovery_seconds or 0.0)
        marks.append(axes.axvspan(begin, end, color=color, alpha=0.2, linewidth=0, label=label))
        axes.axvline(begin, color=color, linestyle="--", linewidth=1)
    return marks


def _series(history: History, name: str) -> tuple[list[float], list[float]]:
    """Times since the start, and the values of an attribute of the updates that have it."""
    points = [
        (update.time, value)
        for update in history.updates
        if (value := getattr(update, name)) is not None
    ]
    return _gapped(points, history, history.kills)


def _gapped(
    points: Sequence[tuple[float, float]], history: History, kills: Sequence[Kill]
) -> tuple[list[float], list[float]]:
    """Times since the start, and values; a NaN, which isn't drawn, where a kill lies between two."""
    times: list[float] = []
    values: list[float] = []
    for before, (time, value) in zip([None, *points], points, strict=False):
        if before is not None and any(before[0] < kill.time < time for kill in kills):
            times.append(before[0] - history.start_time)
            values.append(math.nan)
        times.append(time - history.start_time)
        values.append(float(value))
    return times, values


def _centred_mean(values: list[float]) -> list[float]:
    """Of each value and those on both sides of it; of fewer at the ends and at a NaN."""
    reach = MEAN_UPDATES // 2
    means = []
    for index, value in enumerate(values):
        around = values[max(index - reach, 0) : index + reach + 1]
        known = [each for each in around if not math.isnan(each)]
        means.append(math.nan if math.isnan(value) else sum(known) / len(known))
    return means
