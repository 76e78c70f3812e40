"""`experience-buffer leases`: who holds what, since when, until when."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from experience_buffer_server.commands.looking import BufferName, Looking, Number, looks

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from experience_buffer import LeaseInfo


@looks
def leases(
    look: Looking,
    lease: Annotated[int, typer.Argument(min=0, help="Show only this one, with its units.")] = 0,
    buffer: BufferName = "",
    consumer: Annotated[
        str,
        typer.Option("--consumer", "-c", help="Only those of this consumer.", show_default="all"),
    ] = "",
    number: Number = 50,
) -> None:
    """List open leases, oldest first: who holds what, since when, until when, how often delivered.

    Exit status 1: there is no such lease.
    """
    name = look.buffer(buffer)
    pages = look.client.list_leases(
        buffer=name, consumer=consumer, lease_id=lease, page_size=min(number + 1, 1000)
    )
    if look.as_json:
        look.json(islice(pages, number))
        return
    found = list(islice(pages, number + 1))
    if lease:
        if not found:
            look.say(f"there is no open lease {lease}")
            raise typer.Exit(1)
        look.say(*_one(found[0]))
        return
    if not found:
        look.say("nobody holds a lease")
        return
    look.say(listed(look.console, found[:number]))
    if len(found) > number:
        look.say("... and more: -n shows so many")


def listed(console: Console, found: list[LeaseInfo]) -> RenderableType:
    """A table of leases."""
    from experience_buffer import _show
    from experience_buffer_server.commands.terminal import noted

    return noted(
        console,
        "!lease", "consumer", ">units", ">held for", ">expires", ">tries", ">size",
        "~held by",
        rows=[
            (
                *(str(each.id), each.consumer, each.num_units),
                "" if each.age_seconds is None else _show.duration(each.age_seconds),
                _left(each),
                *(each.max_deliveries, _show.size(each.num_bytes), each.held_by),
            )
            for each in found
        ],
    )  # fmt: skip


def _left(lease: LeaseInfo) -> str:
    from experience_buffer import _show

    if lease.is_ending:
        return "acknowledged"
    return f"in {_show.duration(max(lease.expires_in_seconds, 0.0))}"


def _one(lease: LeaseInfo) -> Iterator[RenderableType]:
    from rich.text import Text

    from experience_buffer import _show
    from experience_buffer_server.commands.terminal import clean, table

    yield Text(f"lease {lease.id} of consumer {clean(lease.consumer)}", style="bold")
    held = "" if lease.age_seconds is None else f" for {_show.duration(lease.age_seconds)}"
    yield Text(f"held by {clean(lease.held_by, most_chars=1000)}{held}; expires {_left(lease)}")
    units = _show.counted(lease.num_units, lease.unit)
    how = "on a stream, whose end gives it back" if lease.on_stream else "by a call"
    yield f"{units}, {_show.counted(lease.num_experiences, 'experience')}, delivered {how}"
    yield ""
    if lease.parts:
        yield table(
            ">rank", ">units", "acked", ">step", "~held by",
            rows=[
                (each.rank, each.num_units, each.is_acked, each.step, each.holder or each.address)
                for each in lease.parts
            ],
        )  # fmt: skip
        yield ""
    yield table(
        "!unit", ">experiences", ">tries", ">rank", "notes",
        rows=[
            (
                *(each.key, each.num_experiences, each.num_deliveries, each.rank),
                ", ".join(
                    word for word, is_so in (("stale", each.is_stale), ("gone", each.is_gone)) if is_so
                ),
            )
            for each in lease.units
        ],
    )  # fmt: skip
