"""What `experience-buffer top` draws: a screen of a server's state, for any width and height. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.styled import Styled
from rich.table import Table
from rich.text import Text

from experience_buffer import _show, advise
from experience_buffer_server.commands.status import sentences
from experience_buffer_server.commands.terminal import Cell, clean, local, number, spark, table

if TYPE_CHECKING:
    from experience_buffer import BufferStats, Stats, Trends

_RATE_POINTS: Final = 3
"""Points of the trends that a rate is over: the last quarter of a minute."""
_SENTENCE_LINES: Final = 3
_LEAST_SENTENCES: Final = 2


@dataclass
class Screen:
    """What is known of a server, and since when it isn't known any more.

    Attributes:
        address: Where it is.
        stats: Its statistics as they were read last; None before the first time.
        trends: Of each buffer, by name.
        read_time: When they were read, seconds since the Unix epoch.
        lost: Why they can't be read now; empty while they can.
        every: Seconds between two looks.
    """

    address: str
    stats: Stats | None = None
    trends: Mapping[str, Trends] = field(default_factory=dict)
    read_time: float = 0.0
    lost: str = ""
    every: float = 2.0

    def draw(self, width: int, height: int, now: float) -> RenderableType:
        """Draw it.

        Args:
            width: Columns of the terminal.
            height: Its lines; the sentences give way first, then the lower buffers.
            now: Seconds since the Unix epoch.
        """
        style = "dim" if self.lost else ""
        lines: list[RenderableType] = [*self._head(width, now)]
        if self.stats is not None:
            lines += self._body(self.stats, width, height - len(lines) - 1)
        foot = Text("q quit  space look now", style="dim", no_wrap=True, overflow="ellipsis")
        return Group(*(_styled(each, style) for each in lines), foot)

    def _head(self, width: int, now: float) -> Iterator[Text]:
        at = Text(clean(self.address), style="bold", no_wrap=True, overflow="ellipsis")
        if self.stats is not None:
            up = _show.duration(self.stats.uptime_seconds)
            at.append(f"  server {clean(self.stats.server_version)}, up {up}", "")
        clock = local(now)
        at.append(" " * max(width - at.cell_len - len(clock), 1) + clock, "dim")
        yield at
        if not self.lost:
            disk = "" if self.stats is None or self.stats.disk is None else str(self.stats.disk)
            yield Text(disk, no_wrap=True, overflow="ellipsis")
            return
        since = _show.duration(max(now - self.read_time, 0.0))
        shown = f"lost since {since}, at {local(self.read_time)}" if self.read_time else "no server"
        yield Text(
            f"{shown}: {clean(self.lost)}", style="bold red", no_wrap=True, overflow="ellipsis"
        )

    def _body(self, stats: Stats, width: int, height: int) -> list[RenderableType]:
        num_consumers = sum(len(each.consumers) for each in stats.buffers)
        needed = len(stats.buffers) + num_consumers + 4
        found = advise(stats)
        most = max((height - needed) // _SENTENCE_LINES, _LEAST_SENTENCES)
        said: list[RenderableType] = list(sentences(found[:most]))
        if not any(each.waits for each in found):
            said.append(Text("Nothing waits.", style="green"))
        if len(found) > most:
            said.append(Text(f"... {len(found) - most} more: see experience-buffer why"))
        return [*said, Text(""), self._buffers(stats, width), Text(""), consumers(stats, width)]

    def _buffers(self, stats: Stats, width: int) -> Table:
        columns = _fitting(_BUFFER_COLUMNS, width)
        cells = [_cells(each, self.trends.get(each.name)) for each in stats.buffers]
        return table(*columns, rows=[[each[name] for name in columns] for each in cells])


def consumers(stats: Stats, width: int) -> Table:
    """A table of the consumers, as far as the width goes."""
    columns = _fitting(_CONSUMER_COLUMNS, width)
    rows: list[list[Cell]] = []
    for buffer in stats.buffers:
        for each in buffer.consumers:
            cells: dict[str, Cell] = {
                "!consumer": f"{buffer.name}/{each.name}",
                ">ready": each.num_ready_units,
                ">leased": each.num_leased_units,
                ">acked": each.num_acked_units,
                ">step": each.last_step,
                ">again": each.num_redelivered_units,
                ">quarantined": each.num_quarantined_units,
                "waits": _waits(each.num_waiting, each.waiting_seconds),
            }
            rows.append([cells[name] for name in columns])
    return table(*columns, rows=rows)


_BUFFER_COLUMNS: Final = {
    "!buffer": 14, ">stored": 10, ">pushed/s": 8, ">trained/s": 9, ">open": 6, ">size": 9,
    ">reward": 6, "pushed": 24, "rewards": 24, ">behind": 6, ">policy": 8, ">full in": 10,
}  # fmt: skip
_CONSUMER_COLUMNS: Final = {
    "!consumer": 22, "waits": 9, ">ready": 8, ">leased": 8, ">acked": 10, ">step": 8, ">again": 7,
    ">quarantined": 11,
}  # fmt: skip
"""Columns with about what they take, the most wanted first."""
_GAP: Final = 2


def _fitting(columns: Mapping[str, int], width: int) -> list[str]:
    """As many columns as fit, the first two in any case."""
    shown: list[str] = []
    for name, room in columns.items():
        if len(shown) >= 2 and room + _GAP > width:
            break
        shown.append(name)
        width -= room + _GAP
    return shown


def _rate(trends: Trends | None, what: str) -> str:
    points = [] if trends is None else trends.points[-_RATE_POINTS:]
    seconds = sum(each.seconds for each in points)
    return f"{sum(getattr(each, what) for each in points) / seconds:,.1f}" if seconds else ""


def _course(trends: Trends | None, what: str) -> str:
    return "" if trends is None else spark([getattr(each, what) for each in trends.points])


def _last(trends: Trends | None, what: str) -> str:
    """The newest that is known."""
    values = [] if trends is None else [getattr(each, what) for each in trends.points]
    return number(next((each for each in reversed(values) if each is not None), None))


def _full_in(buffer: BufferStats) -> str:
    return "" if buffer.full_in_seconds is None else _show.duration(buffer.full_in_seconds)


def _waits(count: int, seconds: float | None) -> Text:
    if not count:
        return Text("")
    return Text(_show.duration(seconds) if seconds is not None else "waits", style="yellow")


def _cells(buffer: BufferStats, trends: Trends | None) -> dict[str, Cell]:
    return {
        "!buffer": buffer.name,
        ">stored": buffer.num_items,
        ">pushed/s": _rate(trends, "num_pushed"),
        ">trained/s": _rate(trends, "num_trained"),
        ">open": buffer.num_open_groups,
        ">size": _show.size(buffer.num_bytes),
        ">reward": _last(trends, "mean_reward"),
        "pushed": _course(trends, "num_pushed"),
        "rewards": _course(trends, "mean_reward"),
        ">behind": _last(trends, "mean_staleness"),
        ">policy": buffer.policy_version,
        ">full in": _full_in(buffer),
    }


def _styled(line: RenderableType, style: str) -> RenderableType:
    """A line as it is, or greyed."""
    return Styled(line, style) if style else line


def names_of(stats: Stats, most: int) -> Sequence[str]:
    """The buffers whose trends are read: the first ones, so that a look costs the same."""
    return [each.name for each in stats.buffers[:most]]
