"""How commands write on a terminal: texts that can't move its cursor, tables, times and sizes.

What rollouts have written goes through `clean` before it is printed, and never through rich's markup.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from experience_buffer import _show

WIDE: Final = 10_000
"""Characters in a line that no table reaches."""
_MOST_CHARS: Final = 200
_WIDE_ENOUGH: Final = 140
"""From this many columns on, words stand beside numbers."""
_LEAST_WIDTH: Final = 6
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
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
        columns: Headings; one that begins with ">" is of a column of numbers, with "!" of one that is
            never cut, with "~" of one whose texts take several lines where they must.
        rows: Cells; texts are cleaned here.
        styles: A style for each row, as far as there are.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    cells = [list(map(cell, row)) for row in rows]
    for number, column in enumerate(columns):
        kind, heading = (column[0], column[1:]) if column[0] in ">!~" else ("", column)
        widest = max([len(heading), *(row[number].cell_len for row in cells)])
        made.add_column(
            heading,
            justify="right" if kind == ">" else "left",
            no_wrap=kind != "~",
            overflow="fold" if kind == "~" else "ellipsis",
            # Below its width rich would cut it as soon as another column is too wide.
            min_width=widest if kind in (">", "!") else min(widest, _LEAST_WIDTH),
        )
    for number, row in enumerate(cells):
        made.add_row(*row, style=styles[number] if number < len(styles) else "")
    return made


def noted(
    console: Console,
    *columns: str,
    rows: Sequence[Sequence[Cell]],
    styles: Sequence[str] = (),
) -> RenderableType:
    """A table whose last column is in words: on a narrow terminal they stand below their rows.

    Args:
        console: Where it will be printed.
        columns: As of `table`; the last one is of the words.
        rows: As of `table`.
        styles: As of `table`.
    """
    if console.width >= _WIDE_ENOUGH:
        return table(*columns, rows=rows, styles=styles)
    short = [[cell(each) for each in row[:-1]] for row in rows]
    kinds = [heading[0] if heading[0] in ">!~" else "" for heading in columns[:-1]]
    headings = [heading[len(kind) :] for heading, kind in zip(columns, kinds, strict=False)]
    widths = [
        max([len(heading), *(row[number].cell_len for row in short)])
        for number, heading in enumerate(headings)
    ]

    def line(cells: Sequence[Text], style: str) -> Text:
        made = Text(style=style, no_wrap=True, overflow="ellipsis")
        for each, width, kind in zip(cells, widths, kinds, strict=True):
            gap = " " * (width - each.cell_len)
            made.append(gap if kind == ">" else "")
            made.append_text(each)
            made.append(("" if kind == ">" else gap) + "  ")
        made.rstrip()
        return made

    lines: list[RenderableType] = [line([Text(each) for each in headings], "bold")]
    for number, (shown, row) in enumerate(zip(short, rows, strict=True)):
        style = styles[number] if number < len(styles) else ""
        lines.append(line(shown, style))
        if words := cell(row[-1]):
            lines.append(Padding(words, (0, 0, 0, 4), style=style, expand=False))
    return Group(*lines)


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


def spark(values: Sequence[float | None], *, most: int = 24) -> str:
    """Values as a row of blocks, the largest the highest; what isn't known is a gap.

    Args:
        values: In their order.
        most: How many blocks there are at most; neighbours are joined to their mean.
    """
    if len(values) > most:
        bounds = [round(number * len(values) / most) for number in range(most + 1)]
        values = [_mean(values[low:high]) for low, high in itertools.pairwise(bounds)]
    known = [each for each in values if each is not None]
    if not known:
        return ""
    low, high = min(0.0, *known), max(known)
    steps = len(_BLOCKS) - 1
    return "".join(
        " " if each is None else _BLOCKS[round((each - low) / (high - low or 1.0) * steps)]
        for each in values
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) / len(known) if known else None


def number(value: float | None, digits: int = 3) -> str:
    """A number in a few digits; nothing for none."""
    return "" if value is None else f"{value:.{digits}g}"


def versions(low: int | None, high: int | None) -> str:
    """Policy versions: "12", or "10 to 12"."""
    if low is None:
        return ""
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
