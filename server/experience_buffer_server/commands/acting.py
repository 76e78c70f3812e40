"""`experience-buffer seal | drop | delete | release`: what operators do to groups and experiences.

Each says first what will happen, and asks on a terminal; `--yes` does without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from experience_buffer_server.commands.looking import BufferName, Looking, Yes, looks

if TYPE_CHECKING:
    from experience_buffer import Client

_MOST_COUNTED: Final = 100_000
"""Experiences that are counted before the question is asked."""

Group: TypeAlias = Annotated[
    str, typer.Argument(help='The group\'s key, such as "0/7" where tasks are grouped.')
]


@looks
def seal(
    look: Looking,
    group: Group,
    buffer: BufferName = "",
    size: Annotated[
        int, typer.Option(min=0, help="Members that make it whole; 0: those that are there.")
    ] = 0,
    yes: Yes = False,
) -> None:
    """Say that a group gets no more members: it is delivered with those that it has."""
    name = look.buffer(buffer)
    has = look.client.get_group(group, buffer=name)
    members = f"{size or has.num_members} members, of which {has.num_members} are there"
    look.confirm(
        f"This seals group {_named(group)} of {_named(name)} at {members}: what comes later is "
        "refused, or opens a new group.",
        yes=yes,
    )
    done = look.client.seal_group(group, buffer=name, group_size=size)
    if look.as_json:
        look.json([done])
    else:
        look.say(f"sealed {_named(group)}: {done.num_members} of {done.group_size} members")


@looks
def drop(
    look: Looking,
    group: Group,
    buffer: BufferName = "",
    reason: Annotated[str, typer.Option(help="Why: it is kept with what left.")] = "",
    yes: Yes = False,
) -> None:
    """Discard a group whose task was aborted, with all its members."""
    name = look.buffer(buffer)
    look.confirm(
        f"This drops group {_named(group)} of {_named(name)} with all its members, and refuses those "
        "that come later: nobody will train on them.",
        yes=yes,
    )
    count = look.client.drop_group(group, buffer=name, reason=reason)
    _say_count(look, "num_dropped", count, f"dropped {_named(group)}")


@looks
def delete(
    look: Looking,
    uids: Annotated[list[str] | None, typer.Argument(help="Which; or the options below.")] = None,
    buffer: BufferName = "",
    task: Annotated[str, typer.Option(help='Those of this task, "batch/task".')] = "",
    run: Annotated[str, typer.Option(help='Those of this run, "batch/task/run".')] = "",
    state: Annotated[str, typer.Option(help="Those in this state, such as quarantined.")] = "",
    yes: Yes = False,
) -> None:
    """Remove experiences that nobody holds a lease on: by uid, or by task, run or state.

    Exit status 1: some were left, because they are leased or aren't there.
    """
    name = look.buffer(buffer)
    where: dict[str, Any] = {"tid": task, "rid": run, "state": state or None}
    where = {key: value for key, value in where.items() if value}
    if bool(uids) == bool(where):
        raise typer.BadParameter("give uids, or --task, --run or --state, and not both")
    which = f"{len(uids)} experiences" if uids else _counted(look.client, name, where, yes=yes)
    look.confirm(f"This deletes {which} of {_named(name)} for good.", yes=yes)
    done = look.client.delete(uids or None, buffer=name, **where)
    if look.as_json:
        look.json([done])
    else:
        look.say(f"deleted {done.num_deleted:,}")
        _say_left(look, "held by a consumer", done.leased_uids)
        _say_left(look, "not there", done.unknown_uids)
    if done.leased_uids or done.unknown_uids:
        raise typer.Exit(1)


@looks
def release(
    look: Looking,
    uids: Annotated[list[str] | None, typer.Argument(help="Which; or --all.")] = None,
    buffer: BufferName = "",
    consumer: Annotated[
        str, typer.Option("--consumer", "-c", help="The consumer that gets them again.")
    ] = "trainer",
    everything: Annotated[
        bool, typer.Option("--all", help="All that are quarantined for this consumer.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Offer to a consumer again what came back from it too often and is quarantined."""
    name = look.buffer(buffer)
    if bool(uids) == everything:
        raise typer.BadParameter("give uids, or --all, and not both")
    which = f"{len(uids)} experiences" if uids else "everything that is quarantined"
    look.confirm(
        f"This offers {which} of {_named(name)} to {_named(consumer)} again: what keeps killing its "
        "trainer will do so again.",
        yes=yes,
    )
    count = look.client.release_quarantined(uids or None, buffer=name, consumer=consumer)
    _say_count(look, "num_units", count, "offered again", what="unit")


def _named(text: str) -> str:
    from experience_buffer_server.commands.terminal import clean

    return clean(text)


def _counted(client: Client, buffer: str, where: dict[str, Any], *, yes: bool) -> str:
    """How many these are, in words; they aren't counted where nobody is asked."""
    if yes:
        return ""
    from itertools import islice

    found = islice(client.list(buffer=buffer, page_size=1000, **where), _MOST_COUNTED + 1)
    count = sum(1 for _ in found)
    many = f"more than {_MOST_COUNTED:,}" if count > _MOST_COUNTED else f"{count:,}"
    return f"{many} experiences"


def _say_count(
    look: Looking, key: str, count: int, words: str, *, what: str = "experience"
) -> None:
    from experience_buffer import _show

    if look.as_json:
        look.json([{key: count}])
    else:
        look.say(f"{words}: {_show.counted(count, what)}")


def _say_left(look: Looking, why: str, uids: Sequence[str]) -> None:
    for uid in uids:
        look.say(f"  left, {why}: {_named(uid)}")
