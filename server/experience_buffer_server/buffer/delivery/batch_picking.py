"""Choosing a batch of a consumer's ready units: as many as asked, fresh enough, within its bounds.

And what keeps a batch from going, as a label for metrics and in words for people.

Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.entries import Entry, age_of, value_of
from experience_buffer_server.sampling.choice import Choice
from experience_buffer_server.sampling.limiter import can_sample
from experience_buffer_server.sampling.staleness import UNKNOWN_VERSION, Reason, why_stale
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.settings.consumer import ConsumerSettings, StalenessSettings

_ENVELOPE_BYTES = 192
"""What travels with an experience besides payload, uid and group key, at most."""
_COMPUTED_BYTES = 320
"""Most that the computed tensors take besides their values: their entries in the tensor table."""
_COMPUTED_BYTES_PER_TOKEN = 4 + 4 + 1
"""Advantage, return, and a mask where none was pushed."""

CutBy = Literal["", "message", "experiences", "bytes"]

WaitLabel = Literal[
    "", "empty", "incomplete", "computing", "held", "window", "min_size", "min_diff"
]
Lack = Literal["empty", "incomplete", "computing", "held"]
"""What a batch lacks units for."""


class Wait(NamedTuple):
    """Why a batch can't go now; nothing keeps it where the label is empty."""

    label: str
    words: str


def wait_of(state: BufferState, consumer: Consumer, batch_size: int) -> Wait:
    """What keeps a batch of so many units from going; not whether they are fresh enough."""
    settings = consumer.settings
    limiter = None if settings.limiter is None else settings.limiter.plan
    enough = 1 if settings.with_replacement else batch_size
    if len(consumer.ready) < enough:
        # So many may never be ready at once: pushes stop before, for lack of room or by the limiter.
        problem = _lack_of_room(state, consumer, batch_size)
        if not problem and limiter is not None:
            problem = limiter.problem(batch_size)
        never = f"batches of {batch_size} may never be: {problem}" if problem else ""
        return Wait(_lack_of(state, consumer, enough - len(consumer.ready)), never)
    if limiter is not None:
        answer = can_sample(limiter, consumer.counts(), batch_size)
        if not answer.ok:
            return Wait(answer.label, answer.reason)
    return _window(state, consumer, batch_size)


def _lack_of(state: BufferState, consumer: Consumer, num_missing: int) -> Lack:
    """What units that are missing wait for: what is nearest to being ready and would be enough.

    So many as are being computed, then with those that are held, then with those that are incomplete;
    "empty" where all that is there isn't enough.
    """
    settings, contents = state.settings, state.contents
    of_groups = consumer.settings.unit == "group" or settings.needs_groups
    # Of groups each has several, for a consumer that gets them one by one.
    size = 1 if consumer.settings.unit == "group" or not of_groups else max(settings.group_size, 1)
    num_missing -= state.num_jobs * size
    if num_missing <= 0:
        return "computing"
    num_missing -= len(consumer.held)
    if num_missing <= 0:
        return "held"
    num_lacking = len(contents.lacking)
    if consumer.settings.unit == "group":
        num_lacking = -(-num_lacking // max(settings.group_size, 1))
    num_missing -= num_lacking + (len(contents.groups.open_groups) * size if of_groups else 0)
    return "incomplete" if num_missing <= 0 else "empty"


def _lack_of_room(state: BufferState, consumer: Consumer, batch_size: int) -> str:
    """Why a buffer may never hold so many of a consumer's units; empty where it can."""
    settings = state.settings
    size = settings.group_size if consumer.settings.unit == "group" else 1
    most = settings.max_items // max(size, 1)
    if not settings.max_items or batch_size <= most:
        return ""
    units = f"{most} groups of {size}" if size > 1 else f"{most} {consumer.settings.unit}s"
    return (
        f"max_items = {settings.max_items} has room for {units}; ask for fewer, or raise max_items"
    )


def window_of(state: BufferState, consumer: Consumer) -> float:
    """Most experiences that may be leased to a consumer at once."""
    own = consumer.settings.max_leased_experiences or math.inf
    return min(own, state.limits.max_leased_experiences)


def _window(state: BufferState, consumer: Consumer, batch_size: int) -> Wait:
    """Whether more may be leased; at least one experience per unit will be."""
    bound = window_of(state, consumer)
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
        return Wait("window", words_of_window(state, consumer, "experiences"))
    most = consumer.settings.max_leased_bytes
    if most and ((leased and num_bytes >= most) or (did_not_fit and cut_by == "bytes")):
        return Wait("window", words_of_window(state, consumer, "bytes"))
    return Wait("", "")


def words_of_window(state: BufferState, consumer: Consumer, cut_by: str) -> str:
    """Why a batch has no room beside what is leased: for its "experiences" or its "bytes"."""
    _, leased, num_bytes = consumer.window_use
    if cut_by == "bytes":
        most = consumer.settings.max_leased_bytes
        return f"{num_bytes} bytes are leased and max_leased_bytes is {most}; acknowledge some"
    bound = window_of(state, consumer)
    return (
        f"{leased} experiences are leased and max_leased_experiences is {bound:g}; acknowledge some"
    )


def words_beyond(state: BufferState, consumer: Consumer) -> str:
    """Why a batch doesn't go, or not as a whole, even where nothing is leased."""
    return (
        "a batch of that size has more experiences than max_leased_experiences, "
        f"{window_of(state, consumer):g}, allows; ask for fewer"
    )


@dataclass(slots=True)
class Picked:
    """What a try for a batch brought."""

    units: list[Unit] = field(default_factory=list)
    """Out of the ready units now; repeats where units are drawn with replacement."""
    stale: list[tuple[int, Reason]] = field(default_factory=list)
    """Units taken out because they are too stale, to be dropped or passed over, and why they are."""
    cut_by: CutBy = ""
    """What ended the batch early: the size of a message, or a bound of what is leased at once."""
    num_bytes: int = 0
    message_bytes: int = 0
    """Most that they take in a message."""
    num_experiences: int = 0


@dataclass(slots=True, kw_only=True)
class _Room:
    """What a batch may take up."""

    message_bytes: int
    num_experiences: float
    num_bytes: float
    takes_any_first: bool
    """Nothing is leased: one unit may go, however large it is."""

    def excess(self, picked: Picked, unit: Unit) -> CutBy:
        """Which bound the batch would exceed with one more unit."""
        if picked.units:
            if picked.message_bytes + unit.message_bytes > self.message_bytes:
                return "message"
        elif self.takes_any_first:
            return ""
        if picked.num_experiences + len(unit.seqs) > self.num_experiences:
            return "experiences"
        return "bytes" if picked.num_bytes + unit.num_bytes > self.num_bytes else ""


def pick(
    state: BufferState, consumer: Consumer, batch_size: int, max_bytes: int, now: float
) -> Picked:
    """Take up to `batch_size` units, in the consumer's order, with at most `max_bytes`.

    The first unit may exceed `max_bytes`, and the consumer's window if nothing else is leased.
    """
    picked = Picked()
    room = _room(state, consumer, max_bytes)
    drawn: dict[int, Unit] = {}
    ready, replace = consumer.ready, consumer.settings.with_replacement
    while len(picked.units) < batch_size and ready:
        choice = ready.choose()
        unit = drawn.get(choice.key) or _look(state, consumer, choice, picked, now)
        if unit is None:
            continue
        picked.cut_by = room.excess(picked, unit)
        if picked.cut_by:
            break
        if not replace:
            ready.remove(unit.key)
        drawn[unit.key] = unit
        picked.units.append(unit)
        picked.num_bytes += unit.num_bytes
        picked.message_bytes += unit.message_bytes
        picked.num_experiences += len(unit.seqs)
    for key, unit in drawn.items():
        if replace:
            ready.remove(key)
        consumer.out[key] = unit
    for unit in picked.units:
        consumer.tally.sampled(unit.key)
    return picked


def put_back(state: BufferState, consumer: Consumer, units: Sequence[Unit]) -> None:
    """Return units that were taken to their old places, but for those that are gone."""
    for unit, count in Counter(units).items():
        if consumer.out.get(unit.key) is not unit:
            continue  # Somebody else's by now.
        del consumer.out[unit.key]
        consumer.tally.sampled(unit.key, -count)
        if not unit.gone and not consumer.closed:
            restock(state, consumer, unit.key)


def restock(state: BufferState, consumer: Consumer, key: int) -> None:
    """Make a unit ready, if any of it is left that the consumer is to get."""
    entries = state.contents.members_of(consumer.settings, key)
    if key in consumer.quarantined or not entries:
        return
    if all(consumer.name in entry.acked for entry in entries):
        consumer.finished.add(key)
        return
    consumer.ready.add(key, value_of(consumer.settings.selector, entries))


def is_fresh(state: BufferState, consumer: Consumer, units: Sequence[Unit], now: float) -> bool:
    """Whether units that were picked a while ago may still be delivered; marks those to be marked."""
    settings = consumer.settings
    staleness = settings.staleness
    if any(unit.gone for unit in units):
        return False
    if staleness is None:
        return True
    for unit in units:
        entries = state.contents.members_of(settings, unit.key)
        if not entries:
            continue
        if awaited_version(state, settings, entries) is not None:
            return False
        is_stale = bool(_why_stale(state, staleness, entries, now))
        if is_stale and staleness.on_stale != "mark":
            return False
        unit.stale = is_stale
    return True


def awaited_version(
    state: BufferState, settings: ConsumerSettings, entries: Sequence[Entry]
) -> int | None:
    """The policy version that a unit waits for; None where it waits for none."""
    if (
        settings.staleness is not None
        and settings.staleness.window
        and state.settings.on_missing_version == "refuse"
        and any(entry.record.min_version is None for entry in entries)
    ):
        return UNKNOWN_VERSION
    published = state.row.policy_version
    if published is None:
        return None
    newest = published
    for entry in entries:
        version = entry.record.max_version
        if version is not None and version > newest:
            newest = version
    is_held = newest > published and state.settings.on_future_version != "deliver"
    return newest if is_held else None


def _why_stale(
    state: BufferState, settings: StalenessSettings, entries: Sequence[Entry], now: float
) -> Reason:
    """Whether a unit is fresh enough now; what waits for its version was left out before."""
    return why_stale(
        age_of(entries),
        max_lag=settings.max_lag,
        max_version_span=settings.max_version_span,
        max_age_seconds=settings.max_age_seconds,
        published=state.row.policy_version,
        now=now,
    )


def _look(
    state: BufferState, consumer: Consumer, choice: Choice, picked: Picked, now: float
) -> Unit | None:
    """The chosen unit; None, and out of the ready ones, if it isn't to be delivered now."""
    settings = consumer.settings
    entries = state.contents.members_of(settings, choice.key)
    if not entries:
        consumer.ready.remove(choice.key)
        return None
    version = awaited_version(state, settings, entries)
    if version is not None:
        consumer.ready.remove(choice.key)
        consumer.held[choice.key] = version
        return None
    staleness = settings.staleness
    why = "" if staleness is None else _why_stale(state, staleness, entries, now)
    if why and staleness is not None and staleness.on_stale != "mark":
        consumer.ready.remove(choice.key)
        picked.stale.append((choice.key, why))
        return None
    unit = unit_of(state, choice.key, entries)
    unit.probability = choice.probability
    unit.stale = bool(why)
    state.progress.history(unit, settings.name)
    return unit


def _room(state: BufferState, consumer: Consumer, max_bytes: int) -> _Room:
    settings = consumer.settings
    most = window_of(state, consumer)
    num_units, num_experiences, num_bytes = consumer.window_use
    # A batch of its own may exceed the bytes: else one larger than they are would never go.
    most_bytes = settings.max_leased_bytes if num_units else 0
    return _Room(
        message_bytes=max_bytes,
        num_experiences=most - num_experiences,
        num_bytes=(most_bytes or math.inf) - num_bytes,
        takes_any_first=not num_units,
    )


def unit_of(state: BufferState, key: int, entries: Iterable[Entry]) -> Unit:
    """The unit of this number and these experiences, about to be delivered."""
    computes = bool(state.settings.advantage.estimator)
    seqs = []
    num_bytes = num_tokens = message_bytes = 0
    for entry in entries:
        record = entry.record
        seqs.append(record.seq)
        num_bytes += record.payload_bytes
        num_tokens += record.response_tokens
        message_bytes += _message_bytes(entry, computes)
    seqs.sort()
    return Unit(
        key=key,
        seqs=tuple(seqs),
        num_bytes=num_bytes,
        num_tokens=num_tokens,
        message_bytes=message_bytes,
    )


def _message_bytes(entry: Entry, computes: bool) -> int:
    """Most that an experience takes in a message, in either format."""
    record = entry.record
    size = _ENVELOPE_BYTES + record.payload_bytes + _utf8_bytes(record.uid)
    if entry.group is not None:
        size += _utf8_bytes(entry.group.row.key)
    if entry.magnitude or computes:
        size += _COMPUTED_BYTES + _COMPUTED_BYTES_PER_TOKEN * record.response_tokens
    return size


def _utf8_bytes(text: str) -> int:
    """How many bytes a text takes in a message."""
    return len(text) if text.isascii() else len(text.encode())
