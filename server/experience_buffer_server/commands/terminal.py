"""How commands write on a terminal: texts that can't move its cursor, tables, times and sizes.

What rollouts have written goes through `clean` before it is printed, and never through rich's markup.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from experience_buffer import _show

WIDE: Final = 10_000
"""Characters in a line that no table reaches."""
_MOST_CHARS: Final = 200
Cell = str | int | float | bool | Text | None


def console(*, stderr: bool = False) -> Console:
    """A console that takes texts as they are; into a file or a pipe its lines go whole."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr,
        width=None if stream.isatty() else WIDE,
        markup=False,
        highlight=False,
        emoji=False,
    )


def clean(text: str, *, most_chars: int = _MOST_CHARS, lines: bool = False) -> str:
    """A text that does nothing to a terminal: control and direction characters are written out.

    Args:
        text: From anywhere.
        most_chars: The rest is left out, before anything else is done with it.
        lines: Whether ends of lines and tabs stay; else they become spaces.
    """
    text = _show.cut(text, most_chars)
    if not lines:
        return _show.printable(" ".join(text.split()))
    return "\n".join(_show.printable(each.expandtabs(4)) for each in text.splitlines())


def table(*columns: str, rows: Iterable[Sequence[Cell]], styles: Sequence[str] = ()) -> Table:
    """A table whose numbers stand to the right, cut to the terminal's width.

    Args:
        columns: Headings; one that begins with ">" is of a column of numbers, one that begins with
            "!" is never cut.
        rows: Cells; texts are cleaned here.
        styles: A style for each row, as far as there are.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        right = column.startswith(">")
        made.add_column(
            column.lstrip(">!"),
            justify="right" if right else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=len(column.lstrip(">!")) if right or column.startswith("!") else None,
        )
    for number, row in enumerate(rows):
        made.add_row(*map(cell, row), style=styles[number] if number < len(styles) else "")
    return made


def cell(value: Cell) -> Text:
    """A cell of a table: None is empty, numbers have commas."""
    if isinstance(value, Text):
        return value
    if value is None:
        return Text("")
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    if isinstance(value, int):
        return Text(f"{value:,}")
    if isinstance(value, float):
        return Text(f"{value:.4g}")
    return Text(clean(value))


def ago(then: float | None, now: float | None = None) -> str:
    """How long ago an instant is, in seconds since the Unix epoch: "41 s", "3 min 5 s"."""
    if then is None:
        return ""
    return _show.duration(max((time.time() if now is None else now) - then, 0.0))


def until(then: float | None, now: float | None = None) -> str:
    """How far off an instant is: "in 41 s", "41 s over"."""
    if then is None:
        return ""
    seconds = then - (time.time() if now is None else now)
    return f"in {_show.duration(seconds)}" if seconds >= 0 else f"{_show.duration(-seconds)} over"


def local(then: float) -> str:
    """An instant by this machine's clock: "14:03:27", with the date where it isn't today's."""
    at, today = time.localtime(then), time.localtime()
    return time.strftime("%H:%M:%S" if at[:3] == today[:3] else "%Y-%m-%d %H:%M:%S", at)
