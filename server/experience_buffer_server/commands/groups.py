"""`experience-buffer groups`: which groups are stuck, and on what; or one with its members."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Final

import typer

from experience_buffer_server.commands.looking import BufferName, Looking, Number, looks

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from experience_buffer import GroupInfo, GroupMember

_MOST_MARKS: Final = 24
_HALF_BAR: Final = 5
_STUCK: Final = ("open", "waiting_for_fields", "held", "quarantined")


@looks
def groups(
    look: Looking,
    group: Annotated[str, typer.Argument(help="Show only this one, with its members.")] = "",
    buffer: BufferName = "",
    state: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these: open, waiting_for_fields, computing, ready, leased, held, quarantined, "
            "retained; may be repeated.",
            show_default="all",
        ),
    ] = None,
    prefix: Annotated[str, typer.Option(help="Only those whose key begins so.")] = "",
    order: Annotated[str, typer.Option(help="stuck, oldest, newest or key.")] = "stuck",
    number: Number = 50,
) -> None:
    """List groups, those that are stuck first: who is there, who is missing, and why they wait.

    Exit status 1: there is no such group.
    """
    name = look.buffer(buffer)
    if group:
        one = look.client.get_group(group, buffer=name)
        if look.as_json:
            look.json([one])
        else:
            look.say(*_one(look.console, one))
        return
    pages = look.client.list_groups(
        buffer=name,
        state=state or None,  # type: ignore[arg-type]  # The client says which there are.
        prefix=prefix,
        order=order,  # type: ignore[arg-type]
        page_size=min(number + 1, 1000),
    )
    if look.as_json:
        look.json(islice(pages, number))
        return
    found = list(islice(pages, number + 1))
    if not found:
        look.say("no groups" + (" in this state" if state else ""))
        return
    look.say(listed(look.console, found[:number]))
    if len(found) > number:
        look.say("... and more: -n shows so many")


def listed(console: Console, found: list[GroupInfo]) -> RenderableType:
    """A table of groups."""
    from experience_buffer import _show
    from experience_buffer_server.commands.terminal import noted, until

    return noted(
        console,
        "!group", "state", "members", ">has", "missing", ">age", "deadline", "~why it waits",
        rows=[
            (
                *(each.group, each.state.replace("_", " "), marks(each)),
                f"{each.num_members:,}/{each.group_size or '?'}",
                *(_missing(each), _show.duration(each.age_seconds)),
                "" if each.closed else until(each.deadline_time),
                each.waits_for,
            )
            for each in found
        ],
        styles=["" if each.state in _STUCK or each.waits_for else "dim" for each in found],
    )  # fmt: skip


def marks(group: GroupInfo) -> Text:
    """The members as a row of marks, coloured by reward: present, failed (x), missing (·)."""
    from rich.text import Text

    from experience_buffer_server.commands import colours

    shown = Text()
    for member in group.members[:_MOST_MARKS]:
        failed = member.state == "tombstone"
        shown.append("x" if failed else "■", _mark_style(member) if not failed else "red")
    shown.append("·" * min(group.num_missing or 0, max(_MOST_MARKS - len(shown), 0)))
    if len(group.members) > _MOST_MARKS:
        shown.append("…")
    return shown if shown else Text("", colours.PLAIN)


def _mark_style(member: GroupMember) -> str:
    from experience_buffer_server.commands import colours

    # A mark has a colour of its own, where a token has it as its background.
    return colours.diverging(member.reward).rpartition(" on ")[2]


def _missing(group: GroupInfo) -> str:
    if group.missing_runs:
        shown = ", ".join(map(str, group.missing_runs[:4]))
        return f"run {shown}" + (", …" if len(group.missing_runs) > 4 else "")
    return f"{group.num_missing:,}" if group.num_missing else ""


def _one(console: Console, group: GroupInfo) -> Iterator[RenderableType]:
    from rich.text import Text

    from experience_buffer import _show
    from experience_buffer_server.commands.computation import computed
    from experience_buffer_server.commands.terminal import clean, number, until

    yield Text(clean(group.group, most_chars=1000), style="bold")
    size = group.group_size or "unknown"
    said = [
        group.state.replace("_", " "),
        f"{group.num_members:,} of {size} members",
        f"age {_show.duration(group.age_seconds)}",
        _show.size(group.num_bytes),
    ]
    if group.mean_reward is not None:
        said.append(f"mean reward {number(group.mean_reward)}")
    if group.staleness is not None:
        said.append(f"{_show.counted(group.staleness, 'version')} behind")
    if group.deadline_time is not None and not group.closed:
        said.append(f"deadline {until(group.deadline_time)}: {group.on_deadline}")
    yield Text(" · ".join(said))
    if missing := _missing(group):
        yield Text(f"missing: {missing}", style="yellow")
    if group.waits_for:
        yield Text(f"waits: {clean(group.waits_for, most_chars=2000)}", style="yellow")
    if group.computation is not None:
        first = next((each for each in group.members if each.advantage is not None), None)
        masked = sum("masked" in each.flags or "zero_mask" in each.flags for each in group.members)
        yield Text(
            computed(
                group.computation,
                reward=first.reward if first else None,
                advantage=first.advantage if first else None,
                num_masked=masked,
            )
        )
    for place in group.places:
        lease = f", lease {place.lease_id}" if place.lease_id else ""
        step = "" if place.step is None else f", step {place.step:,}"
        yield Text(f"{clean(place.consumer)}: {place.state.replace('_', ' ')}{lease}{step}")
    yield ""
    yield _members(console, group)


def _members(console: Console, group: GroupInfo) -> RenderableType:
    from experience_buffer_server.commands.terminal import Cell, noted, versions

    has_steps = any(each.step for each in group.members)
    largest = max((abs(each.advantage or 0.0) for each in group.members), default=0.0)
    rows: list[list[Cell]] = []
    for each in group.members:
        row: list[Cell] = [each.run, each.step] if has_steps else [each.run]
        row += [each.uid, each.state.replace("_", " "), each.reward, each.advantage]
        row += [bar(each.advantage, largest), each.response_tokens]
        row.append(versions(each.min_policy_version, each.max_policy_version))
        row.append(", ".join([*each.flags, *([each.message] if each.message else [])]))
        rows.append(row)
    first = (">run", ">step") if has_steps else (">run",)
    return noted(
        console,
        *(*first, "!uid", "state", ">reward", ">advantage", "!", ">tokens", ">version", "~notes"),
        rows=rows,
    )


def bar(value: float | None, largest: float) -> Text:
    """A value as a bar from a common zero in the middle."""
    from rich.text import Text

    from experience_buffer_server.commands import colours

    if value is None:
        return Text("")
    length = round(abs(value) / largest * _HALF_BAR) if largest else 0
    style = colours.diverging(value).rpartition(" on ")[2]
    left = "█" * length if value < 0 else ""
    right = "█" * length if value > 0 else ""
    shown = Text(left.rjust(_HALF_BAR), style)
    shown.append("│", "dim")
    shown.append(right.ljust(_HALF_BAR), style)
    return shown
