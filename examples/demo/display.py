"""What a person sees while the demo runs: rows of a table, and on a terminal a progress bar below."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.theme import Theme

from examples.demo.history import History, Update
from examples.demo.settings import DemoSettings

LEGEND: Final = (
    "update: policy versions made so far, each from one batch",
    "reward: share of digits that the rollouts of the batch got right",
    "solved: share of held-out problems that the policy solves, all six digits",
    "waiting: experiences in the buffer that the trainer has still to learn from",
    "staleness: versions by which the policy that sampled is behind, mean and most",
)
LOOK: Final = Theme(
    {
        "bar.back": "dim",
        "bar.complete": "cyan",
        "bar.finished": "cyan",
        "progress.download": "default",
        "progress.elapsed": "default",
    }
)
"""Readable on dark and on light ground."""
HEADER: Final = "    time   update   reward   solved   waiting   staleness"


class Display:
    """Prints lines, and on a terminal keeps a progress bar below them; a context manager.

    Args:
        settings: The run's.
    """

    def __init__(self, settings: DemoSettings) -> None:
        self._settings = settings
        self._console = Console(highlight=False, soft_wrap=True, theme=LOOK)
        self._progress = Progress(
            TextColumn("update"),
            MofNCompleteColumn(),
            # All of it fits into 80 columns.
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._bar = self._progress.add_task("", total=settings.num_updates, figures="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, markup=False)

    def explain(self) -> None:
        """Print what the columns of `show` are."""
        for line in (*LEGEND, "", HEADER):
            self.say(line)

    def show(self, update: Update, history: History) -> None:
        """Move the bar; print a row for an update whose accuracy was measured."""
        reward = "" if update.reward is None else f"{update.reward:.2f}"
        figures = f"reward {reward or '-'}   solved {history.last_accuracy:.1%}"
        self._progress.update(self._bar, completed=update.version, figures=figures)
        if update.accuracy is not None:
            seconds = f"{update.time - history.start_time:.1f} s"
            waiting = f"{history.depths[-1].waiting:,}" if history.depths else ""
            mean = "" if update.staleness is None else f"{update.staleness:.1f}"
            most = "" if update.max_staleness is None else f"{update.max_staleness}"
            row = (
                f"{seconds:>8}   {update.version:6d}   {reward:>6}   {update.accuracy:6.1%}   "
                f"{waiting:>7}   {mean:>6} {most:>2}"
            )
            self.say(row.rstrip())

    def finish(self, history: History) -> None:
        """Fill the bar: it is enough."""
        self._progress.update(self._bar, total=history.version, completed=history.version)
