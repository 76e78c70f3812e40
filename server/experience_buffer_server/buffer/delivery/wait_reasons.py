"""What keeps a consumer's batch from going, as a label for metrics and in words for people."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.sampling.limiter import can_sample

WaitLabel = Literal["", "ready", "window", "min_size", "min_diff"]


class Wait(NamedTuple):
    """Why a batch can't go now; nothing keeps it where the label is empty."""

    label: str
    words: str


def wait_of(consumer: Consumer, batch_size: int, *, max_leased: int) -> Wait:
    """What keeps a batch of this many units from going; not whether they are fresh enough.

    Args:
        consumer: Whose batch.
        batch_size: Its units.
        max_leased: The server's bound on experiences leased at once.
    """
    settings = consumer.settings
    enough = 1 if settings.with_replacement else batch_size
    if len(consumer.ready) < enough:
        return Wait("ready", _never_ready(consumer, batch_size))
    if settings.limiter is not None:
        answer = can_sample(settings.limiter.plan, consumer.counts(), batch_size)
        if not answer.ok:
            return Wait(answer.label, answer.reason)
    return _window(consumer, batch_size, max_leased)


def window_of(consumer: Consumer, max_leased: int) -> float:
    """Most experiences that may be leased to a consumer at once."""
    return min(consumer.settings.max_leased_experiences or math.inf, max_leased)


def _never_ready(consumer: Consumer, batch_size: int) -> str:
    """Why so many units may never be ready at once: pushes stop before, by the limiter."""
    limiter = consumer.settings.limiter
    problems = [] if limiter is None else limiter.plan.problems(batch_size)
    return f"batches of {batch_size} may never be: {problems[0]}" if problems else ""


def _window(consumer: Consumer, batch_size: int, max_leased: int) -> Wait:
    """Whether more may be leased; at least one experience per unit will be."""
    settings = consumer.settings
    bound = window_of(consumer, max_leased)
    num_units, leased, num_bytes = consumer.window_use
    unfit_size, cut_by = consumer.unfit
    did_not_fit = num_units > 0 and 0 < unfit_size <= batch_size
    if batch_size > bound:
        return Wait(
            "window",
            f"a batch of {batch_size} can't be leased while max_leased_experiences is {bound:g}; "
            "ask for fewer",
        )
    if leased + batch_size > bound or (did_not_fit and cut_by == "experiences"):
        return Wait("window", words_of_window(consumer, "experiences", max_leased))
    most = settings.max_leased_bytes
    if most and ((leased and num_bytes >= most) or (did_not_fit and cut_by == "bytes")):
        return Wait("window", words_of_window(consumer, "bytes", max_leased))
    return Wait("", "")


def words_of_window(consumer: Consumer, cut_by: str, max_leased: int) -> str:
    """Why a batch has no room beside what is leased.

    Args:
        consumer: Whose batch.
        cut_by: What it has too many of: "experiences" or "bytes".
        max_leased: The server's bound on experiences leased at once.
    """
    _, leased, num_bytes = consumer.window_use
    bound, most = window_of(consumer, max_leased), consumer.settings.max_leased_bytes
    if cut_by == "bytes":
        return f"{num_bytes} bytes are leased and max_leased_bytes is {most}; acknowledge some"
    return (
        f"{leased} experiences are leased and max_leased_experiences is {bound:g}; acknowledge some"
    )


def words_beyond(bound: float) -> str:
    """Why a batch doesn't go, or not as a whole, even where nothing is leased."""
    return (
        f"a batch of that size has more experiences than max_leased_experiences, {bound:g}, "
        "allows; ask for fewer"
    )


def explain(consumer: Consumer, batch_size: int, wait: Wait, buffer_waits: str) -> str:
    """What a call waits for, in words.

    Args:
        consumer: Whose call.
        batch_size: Units that it asked for.
        wait: What keeps the batch from going.
        buffer_waits: What keeps experiences of the buffer from being sampled at all.
    """
    words = [f"{len(consumer.ready)} ready of {batch_size} {consumer.settings.unit}s"]
    if wait.words:
        words.append(wait.words)
    if consumer.num_leased:
        words.append(f"{consumer.num_leased} leased and not acknowledged")
    if consumer.held:
        newest = min(consumer.held.values())
        words.append(f"{len(consumer.held)} held until policy version {newest} is published")
    if consumer.totals.stale:
        words.append(f"{consumer.totals.stale} were too stale and left out")
    if consumer.quarantined:
        words.append(
            f"{len(consumer.quarantined)} quarantined after too many deliveries; see "
            "ReleaseQuarantined"
        )
    if consumer.timeline.num_retained:
        words.append(f"{consumer.timeline.num_retained} acknowledged and kept for a rewind")
    if buffer_waits:
        words.append(buffer_waits)
    if len(words) == 1 and not len(consumer.ready):
        words.append("nothing is stored that this consumer hasn't consumed")
    return "; ".join(words)
