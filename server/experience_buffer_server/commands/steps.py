"""`experience-buffer steps | departures`: what training steps consumed, and what left without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from experience_buffer_server.commands.looking import BufferName, Looking, Number, looks

if TYPE_CHECKING:
    from rich.console import RenderableType

    from experience_buffer import Departures, Distribution, StepInfo


@looks
def steps(
    look: Looking,
    step: Annotated[
        int | None, typer.Argument(help="Show only this one.", show_default="the newest")
    ] = None,
    buffer: BufferName = "",
    consumer: Annotated[
        str,
        typer.Option("--consumer", "-c", help="Only those of this consumer.", show_default="all"),
    ] = "",
    number: Number = 20,
) -> None:
    """List what each training step has consumed, the newest first: how much, how stale, how good.

    Exit status 1: there is no such step.
    """
    name = look.buffer(buffer)
    found = look.client.list_steps(consumer, buffer=name, step=step, limit=min(number, 1000))
    if look.as_json:
        look.json(found)
    elif step is not None:
        look.say(*(line for each in found for line in _one(each)))
    elif found:
        look.say(listed(found))
    if not found and not look.as_json:
        look.say("no step has been acknowledged" if step is None else f"nothing of step {step}")
    if step is not None and not found:
        raise typer.Exit(1)


@looks
def departures(
    look: Looking,
    buffer: BufferName = "",
    reason: Annotated[
        str, typer.Option(help="Only what left for this reason.", show_default="all")
    ] = "",
    unused: Annotated[
        bool, typer.Option("--unused", help="Only what nobody has trained on.")
    ] = False,
    number: Number = 20,
) -> None:
    """Show what left lately, and why: how many for each reason, and the newest ones.

    With --json: one line, as list_departures has it.
    """
    name = look.buffer(buffer)
    found = look.client.list_departures(
        reason, buffer=name, unused_only=unused, limit=min(number, 1000)
    )
    if look.as_json:
        look.json([found])
    else:
        look.say(*_left(found))


def listed(found: tuple[StepInfo, ...]) -> RenderableType:
    """A table of steps."""
    from experience_buffer_server.commands.terminal import ago, number, spark, table

    return table(
        ">step", "consumer", ">experiences", ">groups", ">reward", "rewards", ">no variance",
        ">behind", ">age",
        rows=[
            (
                *(each.step, each.consumer, each.num_experiences, each.num_groups),
                *(number(each.rewards.mean), spark(_counted(each.rewards))),
                _flat_share(each),
                *(number(each.mean_staleness), ago(each.last_ack_time)),
            )
            for each in found
        ],
    )  # fmt: skip


def _flat_share(step: StepInfo) -> str:
    """Part of the groups that teach nothing."""
    if not step.num_compared_groups:
        return ""
    return f"{step.num_zero_variance_groups / step.num_compared_groups:.0%}"


def _one(step: StepInfo) -> Iterator[RenderableType]:
    from rich.text import Text

    from experience_buffer import _show
    from experience_buffer_server.commands.terminal import ago, clean, number

    yield Text(f"step {step.step:,} of consumer {clean(step.consumer)}", style="bold")
    said = [
        _show.counted(step.num_experiences, "experience"),
        _show.counted(step.num_groups, "group"),
        _show.counted(step.num_leases, "lease"),
        _show.counted(step.response_tokens, "response token"),
    ]
    if step.last_ack_time is not None:
        said.append(f"acknowledged {ago(step.last_ack_time)} ago")
    yield Text(" · ".join(said))
    if step.mean_staleness is not None:
        yield f"versions behind: {number(step.mean_staleness)} in the mean, {step.max_staleness} at most"
    if share := _flat_share(step):
        yield f"groups without variance: {share} of {step.num_compared_groups:,}"
    yield from _spread("rewards", step.rewards)
    yield from _spread("advantages", step.advantages)
    if step.is_partial:
        yield "some of it was acknowledged before the server started, and isn't counted here"
    if step.is_retained:
        yield "a rewind would make it available again"
    if step.groups:
        shown = ", ".join(map(clean, step.groups))
        yield Text(f"groups: {shown}{', …' if step.num_groups > len(step.groups) else ''}")


def _counted(values: Distribution) -> list[float | None]:
    """The bins; one with nothing in it is a gap."""
    return [each or None for each in values.counts]


def _spread(name: str, values: Distribution) -> Iterator[str]:
    from experience_buffer_server.commands.terminal import number, spark

    if values.mean is not None:
        yield (
            f"{name}: mean {number(values.mean)}, std {number(values.std)}, {number(values.min)} "
            f"{spark(_counted(values), most=40)} {number(values.max)}"
        )


def _left(found: Departures) -> Iterator[RenderableType]:
    from experience_buffer_server.commands.terminal import ago, spark, table

    if not found.counts:
        yield "nothing has left"
        return
    yield table(
        "!reason", ">left", "lately",
        rows=[(each.reason, each.total, spark(each.recent, most=40)) for each in found.counts],
    )  # fmt: skip
    if not found.departures:
        return
    yield ""
    yield table(
        "!uid", "reason", ">reward", "trained", ">step", ">ago", "archived", "~notes",
        rows=[
            (
                *(each.uid, each.reason.replace("_", " "), each.reward, each.is_trained),
                next((ack.step for ack in each.acked_by if ack.step is not None), None),
                *(ago(each.time), each.is_archived, each.message),
            )
            for each in found.departures
        ],
    )  # fmt: skip
