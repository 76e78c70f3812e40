"""The curves of a run as a PNG. Nothing here opens a window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from examples.demo.history import History

BLUE, ORANGE, GREY, RED = "#2b6cb0", "#dd6b20", "#a0aec0", "#c53030"
SMOOTHING_WEIGHT = 0.15
"""Weight of the newest value in the running mean of the reward."""
HEADROOM = 1.3
"""Leaves room for the legend above a curve that is everywhere."""


def write_plot(history: History, path: Path, *, target_accuracy: float) -> None:
    """Draw reward, accuracy, staleness and buffer depth over the seconds of training.

    Args:
        history: At least the untrained policy and one update.
        path: The PNG to write; an older one is replaced.
        target_accuracy: Drawn as a line, 0 to 1.
    """
    figure = Figure(figsize=(11, 7), layout="constrained", dpi=120)
    (reward, accuracy), (staleness, depth) = figure.subplots(2, 2, sharex=True)
    _draw_reward(reward, history)
    _draw_accuracy(accuracy, history, target_accuracy)
    _draw_staleness(staleness, history)
    _draw_depth(depth, history)
    for axes in (reward, accuracy, staleness, depth):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, max(history.seconds, 1e-3))
        axes.set_ylim(bottom=0)
        _draw_kills(axes, history)
    for axes in (staleness, depth):
        axes.set_xlabel("seconds of training")
    figure.suptitle(
        f"Reversing digits by reinforcement alone: {history.version} policy updates in "
        f"{history.seconds:.0f} s"
    )
    figure.savefig(path, format="png")


def _draw_reward(axes: Any, history: History) -> None:
    times, rewards = _series(history, "reward")
    axes.plot(times, rewards, color=GREY, linewidth=0.8, label="per update")
    axes.plot(times, _smooth(rewards), color=BLUE, label="running mean")
    axes.set_ylim(top=1.02)
    axes.set_title("Reward of the rollouts (share of digits right)")
    axes.legend(loc="center right", frameon=False)


def _draw_accuracy(axes: Any, history: History, target: float) -> None:
    times, accuracies = _series(history, "accuracy")
    axes.plot(times, accuracies, color=BLUE, marker="o", markersize=3)
    axes.axhline(target, color=ORANGE, linestyle=":", label=f"target {target:.0%}")
    axes.set_ylim(top=1.02)
    axes.set_title("Accuracy on held-out problems (all six digits right)")
    axes.legend(loc="center right", frameon=False)


def _draw_staleness(axes: Any, history: History) -> None:
    times, mean = _series(history, "staleness")
    _, largest = _series(history, "max_staleness")
    axes.plot(times, largest, color=GREY, linewidth=0.8, label="largest")
    axes.plot(times, mean, color=BLUE, label="mean of the batch")
    axes.set_ylim(top=HEADROOM * max([*largest, 1.0]))
    axes.set_title("Staleness (policy versions behind)")
    axes.legend(loc="upper left", frameon=False, ncols=2)


def _draw_depth(axes: Any, history: History) -> None:
    times = [depth.time - history.start_time for depth in history.depths]
    waiting = [depth.waiting for depth in history.depths]
    stored = [depth.waiting + depth.retained for depth in history.depths]
    axes.fill_between(times, waiting, stored, color=GREY, alpha=0.35, linewidth=0)
    axes.plot(times, stored, color=GREY, linewidth=0.8, label="trained, kept for a rewind")
    axes.plot(times, waiting, color=BLUE, label="for training")
    axes.set_ylim(top=HEADROOM * max([*stored, 1]))
    axes.set_title("Experiences in the buffer")
    axes.legend(loc="upper left", frameon=False, ncols=2)


def _draw_kills(axes: Any, history: History) -> None:
    # Horizontally in seconds, vertically in shares of the axes.
    place = axes.get_xaxis_transform()
    for kill in history.kills:
        killed = kill.time - history.start_time
        axes.axvspan(killed, killed + (kill.recovery_seconds or 0.0), color=RED, alpha=0.15)
        axes.axvline(killed, color=RED, linestyle="--", linewidth=1)
        text = f" {kill.what} killed"
        label = axes.text(killed, 0.02, text, color=RED, fontsize=9, transform=place)
        label.set_in_layout(False)


def _series(history: History, name: str) -> tuple[list[float], list[float]]:
    """Times since the start, and the values of an attribute of the updates that have it."""
    points = [
        (update.time - history.start_time, float(value))
        for update in history.updates
        if (value := getattr(update, name)) is not None
    ]
    return [time for time, _ in points], [value for _, value in points]


def _smooth(values: list[float]) -> list[float]:
    smoothed: list[float] = []
    for value in values:
        last = smoothed[-1] if smoothed else value
        smoothed.append(last + SMOOTHING_WEIGHT * (value - last))
    return smoothed
