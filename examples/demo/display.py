"""What a person sees while the demo runs: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo.history import History
from examples.demo.trainer import Update


class Display:
    """Prints lines, and on a terminal keeps a progress bar below them; a context manager."""

    def __init__(self, *, num_updates: int) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
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
        self._bar = self._progress.add_task("", total=num_updates, figures="")

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

    def show(self, update: Update, history: History) -> None:
        """Move the bar; print a line for an update whose accuracy was measured."""
        reward = "" if update.reward is None else f"reward {update.reward:.2f}   "
        figures = f"{reward}accuracy {history.last_accuracy:6.1%}"
        self._progress.update(self._bar, completed=update.version, figures=figures)
        if update.accuracy is not None:
            seconds = update.time - history.start_time
            waiting = history.depths[-1].waiting if history.depths else 0
            staleness = "" if update.staleness is None else f"   staleness {update.staleness:.1f}"
            self.say(
                f"{seconds:6.1f} s   update {update.version:4d}   {figures}   "
                f"buffer {waiting:4d}{staleness}"
            )
