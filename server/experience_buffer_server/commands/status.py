"""`experience-buffer status | why`: how a server is, and what somebody waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import typer

from experience_buffer_server.commands.looking import BufferName, Looking, looks

if TYPE_CHECKING:
    from rich.console import RenderableType

    from experience_buffer import Advice, Stats

_MARKS: Final = {"critical": "!!", "warning": "! ", "info": "· "}
_STYLES: Final = {"critical": "bold red", "warning": "yellow", "info": ""}
_MOST_CHARS: Final = 2000


@looks
def status(look: Looking) -> None:
    """Show on one screen how a server is: what needs a person, buffers, consumers, disk.

    With --json: the statistics, as get_stats has them; `why --json` has the sentences.
    """
    stats = look.client.get_stats()
    if look.as_json:
        look.json([stats])
        return
    look.say(*screen(stats, look.options.address))


@looks
def why(look: Looking, buffer: BufferName = "") -> None:
    """Say what each consumer waits for, and what to do about it.

    Exit status 0: nobody waits; 1: somebody does.
    """
    from experience_buffer import advise

    stats = look.client.get_stats(buffer)
    found = advise(stats)
    if look.as_json:
        look.json(found)
    else:
        look.say(*sentences(found), *_others(stats))
    raise typer.Exit(1 if any(each.waits for each in found) else 0)


def screen(stats: Stats, address: str) -> Iterator[RenderableType]:
    """What one screen shows of a server's statistics: the sentences first."""
    from rich.text import Text

    from experience_buffer import _show, advise

    up = _show.duration(stats.uptime_seconds)
    yield Text(f"{address}: server {stats.server_version}, up {up}", style="bold")
    if stats.disk is not None:
        yield Text(str(stats.disk))
    yield ""
    found = advise(stats)
    yield from sentences(found)
    if not any(each.waits for each in found):
        yield Text("Nothing waits.", style="green")
    yield ""
    if not stats.buffers:
        yield Text("There is no buffer yet: a client makes one with create_buffer.")
        return
    yield from tables(stats)


def sentences(found: Iterable[Advice]) -> Iterator[RenderableType]:
    """What needs a person: what it is, what to do, and what to type."""
    from rich.padding import Padding
    from rich.text import Text

    from experience_buffer_server.commands.terminal import clean

    for each in found:
        text = Text(_MARKS[each.severity], style=_STYLES[each.severity])
        text.append(clean(each.text, most_chars=_MOST_CHARS), style=_STYLES[each.severity])
        yield text
        if each.cure:
            yield Padding(
                Text(clean(each.cure, most_chars=_MOST_CHARS)), (0, 0, 0, 4), expand=False
            )
        if each.command:
            # In one piece, whatever the width: it is there to be copied.
            yield Padding(
                Text(f"$ {clean(each.command)}", style="cyan"), (0, 0, 0, 4), expand=False
            )


def tables(stats: Stats) -> Iterator[RenderableType]:
    """A table of the buffers, and one of their consumers."""
    from experience_buffer import _show
    from experience_buffer_server.commands.terminal import table

    yield table(
        "!buffer", ">experiences", ">size", ">open", ">computing", ">quarantined", ">policy",
        rows=[
            (
                *(each.name, each.num_items, _show.size(each.num_bytes), each.num_open_groups),
                *(each.num_computing_groups, each.num_quarantined_groups, each.policy_version),
            )
            for each in stats.buffers
        ],
    )  # fmt: skip
    yield ""
    yield table(
        "!buffer", "!consumer", "unit", ">ready", ">leased", ">acked", ">again", ">waits", ">step",
        rows=[
            (
                *(buffer.name, each.name, each.unit, each.num_ready_units, each.num_leased_units),
                *(each.num_acked_units, each.num_redelivered_units, each.num_waiting),
                each.last_step,
            )
            for buffer in stats.buffers
            for each in buffer.consumers
        ],
    )  # fmt: skip


def _others(stats: Stats) -> Iterator[RenderableType]:
    """The consumers that don't wait, and what they would wait for."""
    from rich.text import Text

    from experience_buffer import _show
    from experience_buffer_server.commands.terminal import clean

    for buffer in stats.buffers:
        for each in buffer.consumers:
            if each.num_waiting:
                continue
            ready = _show.counted(each.num_ready_units, each.unit)
            said = f"waits for nothing: {ready} ready, {each.num_leased_units:,} leased"
            yield Text(f"  consumer {clean(each.name)} of {clean(buffer.name)} {said}")
            if each.waiting_for:
                size = _show.counted(each.asked_batch_size or 1, each.unit)
                words = clean(each.waiting_for, most_chars=_MOST_CHARS)
                yield Text(f"    a batch of {size} would wait: {words}", style="dim")
