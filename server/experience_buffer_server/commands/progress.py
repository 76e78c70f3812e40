"""A bar for what takes long: on a terminal, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(title: str) -> Iterator[Callable[[float | None, int], None]]:
    """Show how far it is: what is called with the share that is done, None if unknown, and a count."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from experience_buffer_server.commands import terminal

    console = terminal.console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]:,}"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(terminal.clean(title), total=None, count=0)
        yield lambda share, count: progress.update(
            task, completed=share or 0.0, total=None if share is None else 1.0, count=count
        )
