"""The past of one experience, as `show` prints it: what happened when, by whom, and how it left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from experience_buffer import StoredExperience
    from experience_buffer.history import HistoryEvent

_MOST_EVENTS: Final = 100


def told(console: Console, found: StoredExperience) -> Iterator[RenderableType]:
    """What is known of its past, oldest first; of one in the archive how it left, first of all.

    Args:
        console: Where it will be printed.
        found: As `get` returned it.
    """
    from rich.text import Text

    from experience_buffer_server.commands.terminal import ago, clean, noted

    if found.history:
        yield Text("history", style="bold")
        rows = [
            (
                _when(each),
                ago(each.time),
                each.kind.replace("_", " "),
                _by(each),
                each.message,
            )
            for each in found.history[-_MOST_EVENTS:]
        ]
        yield noted(console, "when", ">ago", "what", "by whom", "~more", rows=rows)
        if (left_out := len(found.history) - _MOST_EVENTS) > 0:
            yield f"... {left_out:,} earlier"
    for later in found.later:
        reward = "" if later.reward is None else f"reward {later.reward:g} "
        said = clean(f"{reward}{later.info or ''}", most_chars=2000)
        yield Text(f"found {ago(later.time)} ago, after it had left: {said}")


def left(found: StoredExperience) -> Iterator[RenderableType]:
    """How it left, where it comes from the archive."""
    from rich.text import Text

    from experience_buffer_server.commands.terminal import ago, clean

    departure = found.departure
    if departure is None:
        return
    words = f": {clean(departure.message, most_chars=2000)}" if departure.message else ""
    reason = clean(departure.reason.replace("_", " "))
    yield Text(f"left {ago(departure.time)} ago, {reason}{words}", style="yellow")
    for ack in departure.acked_by:
        step = "" if ack.step is None else f" at step {ack.step:,}"
        yield Text(f"{clean(ack.consumer)} has trained on it{step}")


def _when(event: HistoryEvent) -> str:
    from experience_buffer_server.commands.terminal import local

    return "" if event.time is None else local(event.time)


def _by(event: HistoryEvent) -> str:
    """Consumer, holder, step, lease: what there is of them."""
    from experience_buffer_server.commands.terminal import until

    parts = [event.consumer, event.who]
    if event.step is not None:
        parts.append(f"step {event.step:,}")
    if event.lease_id:
        parts.append(f"lease {event.lease_id}")
    if event.until_time is not None:
        parts.append(f"expires {until(event.until_time)}")
    return ", ".join(part for part in parts if part)
