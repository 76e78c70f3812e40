"""`experience-buffer list | tail`: stored experiences by what is in them, and new ones as they come."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from experience_buffer_server.commands import at_rest
from experience_buffer_server.commands.looking import BufferName, Looking, Number, looks

if TYPE_CHECKING:
    from rich.console import RenderableType

    from experience_buffer import Client, ExperienceSummary

_MOST_AT_ONCE: Final = 1000
"""New experiences that one look of `tail` shows; of more it says that it left some out."""
_PAGE: Final = 200

Task: TypeAlias = Annotated[str, typer.Option(help='Of this task, "batch/task".')]
Run: TypeAlias = Annotated[str, typer.Option(help='Of this run, "batch/task/run".')]
State: TypeAlias = Annotated[
    str,
    typer.Option(
        help="In this state: waiting_for_group, waiting_for_fields, computing, held, ready, leased, "
        "retained, quarantined or tombstone; with --consumer: for that one."
    ),
]
Range: TypeAlias = Annotated[str, typer.Option(metavar="LOW:HIGH", help="Reward between these.")]


def _range(help: str) -> Any:
    return typer.Option(metavar="LOW:HIGH", help=f"{help}; one of both may be left out.")


@looks
def list_all(
    look: Looking,
    buffer: BufferName = "",
    task: Task = "",
    run: Run = "",
    prefix: Annotated[str, typer.Option(help="Whose uid begins so.")] = "",
    text: Annotated[str, typer.Option(help="Whose uid holds this text.")] = "",
    state: State = "",
    consumer: Annotated[
        str, typer.Option("--consumer", "-c", help="For which --state and --step hold.")
    ] = "",
    step: Annotated[int | None, typer.Option(help="Acknowledged with this training step.")] = None,
    reward: Annotated[str, _range("Reward")] = "",
    tokens: Annotated[str, _range("Response tokens")] = "",
    version: Annotated[str, _range("Policy versions")] = "",
    staleness: Annotated[str, _range("Policy versions behind")] = "",
    truncated: Annotated[
        bool | None, typer.Option("--truncated/--whole", help="Whether the response was cut off.")
    ] = None,
    flag: Annotated[
        list[str] | None,
        typer.Option(
            help="singleton, zero_variance, zero_mask, bootstrapped or masked; may be repeated."
        ),
    ] = None,
    newest: Annotated[bool, typer.Option("--newest", help="The newest first.")] = False,
    archived: Annotated[
        bool, typer.Option("--archived", help="What has left and is archived, the newest first.")
    ] = False,
    reason: Annotated[str, typer.Option(help="With --archived: what left for this reason.")] = "",
    data: at_rest.Data = None,
    number: Number = 50,
) -> None:
    """List stored experiences, oldest first: all that is given has to hold.

    With --json: a line for each, as many as -n says.
    """
    where: dict[str, Any] = {
        **{"tid": task, "rid": run, "uid_prefix": prefix, "text": text, "consumer": consumer},
        **{"state": state or None, "step": step, "truncated": truncated, "flags": flag or ()},
        "departure_reason": reason,
        "reward": range_of(reward, "--reward"),
        "response_tokens": range_of(tokens, "--tokens"),
        "policy_version": range_of(version, "--version"),
        "staleness": range_of(staleness, "--staleness"),
    }
    where = {key: value for key, value in where.items() if value not in (None, "", ())}
    if data is not None:
        if newest or archived:
            raise typer.BadParameter("with --data they come as they are stored, oldest first")
        with at_rest.stored(look, data, buffer, where, with_payloads=False) as scan:
            _say(look, (each.summary for each in scan), number, is_some=bool(where))
        return
    name = look.buffer(buffer)
    pages = look.client.list(
        buffer=name,
        newest_first=newest,
        archived=archived,
        page_size=min(number + 1, 1000),
        **where,
    )
    _say(look, pages, number, is_some=bool(where))


def _say(look: Looking, pages: Iterable[ExperienceSummary], number: int, *, is_some: bool) -> None:
    """Print as many as are asked for, and say whether there are more."""
    if look.as_json:
        look.json(islice(pages, number))
        return
    found = list(islice(pages, number + 1))
    if not found:
        look.say("nothing" + (" that fits" if is_some else " is stored"))
        return
    look.say(listed(found[:number]))
    if len(found) > number:
        look.say("... and more: -n shows so many")


@looks
def tail(
    look: Looking,
    buffer: BufferName = "",
    task: Task = "",
    reward: Annotated[str, _range("Reward")] = "",
    number: Annotated[
        int, typer.Option("--number", "-n", min=0, help="How many that are there are shown first.")
    ] = 10,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Show new experiences as they come, until Ctrl-C.

    What comes and leaves between two looks isn't seen; of a flood the newest thousand are shown.
    With --json: a line for each.
    """
    where: dict[str, Any] = {"tid": task, "reward": range_of(reward, "--reward")}
    where = {key: value for key, value in where.items() if value}
    name = look.buffer(buffer)
    with suppress(KeyboardInterrupt):
        newest = look.client.list(buffer=name, newest_first=True, page_size=max(number, 1), **where)
        found = list(islice(newest, max(number, 1)))[::-1]
        seen = Seen(found)
        _put(look, found[len(found) - number :] if number else [])
        while True:
            time.sleep(every)
            fresh, is_cut = seen.fresh(look.client, name, where)
            if is_cut:
                typer.echo(f"... more than {_MOST_AT_ONCE:,} came: some are left out", err=True)
            _put(look, fresh)


class Seen:
    """What `tail` has shown: how far it has come."""

    def __init__(self, found: Iterable[ExperienceSummary]) -> None:
        self._uids: dict[str, None] = {}
        self._since = 0.0
        self._note(found)

    def fresh(
        self, client: Client, buffer: str, where: dict[str, Any]
    ) -> tuple[list[ExperienceSummary], bool]:
        """What has come since, oldest first, and whether there was more than is shown.

        It looks at the newest ones only, so that it costs the same however much is stored.
        """
        found: list[ExperienceSummary] = []
        for each in client.list(buffer=buffer, newest_first=True, page_size=_PAGE, **where):
            if each.push_time < self._since or each.uid in self._uids:
                break
            if len(found) == _MOST_AT_ONCE:
                self._note(reversed(found))
                return found[::-1], True
            found.append(each)
        found.reverse()
        self._note(found)
        return found, False

    def _note(self, found: Iterable[ExperienceSummary]) -> None:
        for each in found:
            self._uids[each.uid] = None
            self._since = max(self._since, each.push_time)
        for uid in list(islice(self._uids, max(len(self._uids) - 2 * _MOST_AT_ONCE, 0))):
            del self._uids[uid]


def range_of(text: str, option: str) -> tuple[float | None, float | None] | None:
    """Two ends of "LOW:HIGH"; one number is both.

    Raises:
        typer.BadParameter: It isn't that.
    """
    if not text:
        return None
    low, colon, high = text.partition(":")
    try:
        ends = [_number(each) if each else None for each in (low, high if colon else low)]
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is no range: give LOW:HIGH, LOW: or :HIGH", param_hint=option
        ) from error
    first, second = ends
    if first is None and second is None:
        raise typer.BadParameter("give at least one end: LOW: or :HIGH", param_hint=option)
    return first, second


def _number(text: str) -> float:
    """A whole number where it is written as one: of versions and tokens nothing else is taken."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def listed(found: list[ExperienceSummary]) -> RenderableType:
    """A table of experiences."""
    from experience_buffer_server.commands.terminal import ago, table, versions

    return table(
        "!uid", "state", ">reward", ">tokens", ">version", ">behind", ">age", "~notes",
        rows=[
            (
                *(each.uid, each.state.replace("_", " "), each.reward, each.response_tokens),
                versions(each.min_policy_version, each.max_policy_version),
                *(each.staleness, ago(each.push_time)),
                _notes(each),
            )
            for each in found
        ],
    )  # fmt: skip


def _notes(found: ExperienceSummary) -> str:
    from experience_buffer_server.commands.terminal import ago

    left = ""
    if found.departure_reason:
        left = f"left {ago(found.departure_time)} ago: {found.departure_reason.replace('_', ' ')}"
    cut = "truncated" if found.truncated else ""
    return ", ".join(filter(None, (left, cut, found.message)))


def _put(look: Looking, found: list[ExperienceSummary]) -> None:
    """Lines of `tail`: no table, whose columns would change with each look."""
    if look.as_json:
        look.json(found)
        return
    from rich.text import Text

    from experience_buffer_server.commands.colours import diverging
    from experience_buffer_server.commands.terminal import clean, local, number

    for each in found:
        line = Text(f"{local(each.push_time)}  {clean(each.uid)}  ")
        line.append(
            f"{number(each.reward) or '-':>8}", diverging(each.reward).rpartition(" on ")[2]
        )
        line.append(f"  {each.response_tokens:>7,} tokens  {each.state.replace('_', ' ')}")
        if each.message:
            line.append(f"  {clean(each.message)}", "yellow")
        line.no_wrap, line.overflow = True, "ellipsis"
        look.say(line)
