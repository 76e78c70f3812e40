"""Which experiences are wanted, by what they are and where they are: all that is given has to hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from experience_buffer import errors
from experience_buffer.looking import ExperienceState
from experience_buffer_server.buffer.inspection.places import place_of, state_of
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.store.interface import AdvantageRow

Bounds: TypeAlias = tuple[float, float]
"""Lowest and highest, both included; infinite where there is none."""
Test: TypeAlias = Callable[[Entry], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which experiences; what is empty or None matches all. What isn't known of one doesn't match."""

    tid: str = ""
    rid: str = ""
    sid: str = ""
    state: ExperienceState | None = None
    """As a whole, or for the consumer where one is named."""
    consumer: str = ""
    step: int | None = None
    """Acknowledged with it, and may still be rewound; by the consumer, or by any."""
    reward: Bounds | None = None
    response_tokens: Bounds | None = None
    policy_version: Bounds | None = None
    """All versions that produced a token lie there."""
    staleness: Bounds | None = None
    push_time: Bounds | None = None
    truncated: bool | None = None
    uid_prefix: str = ""
    text: str = ""
    """Within the uid."""
    flags: tuple[str, ...] = ()
    """All of these; known on the disk alone."""

    @property
    def is_empty(self) -> bool:
        """Whether everything matches."""
        return self == _ALL


_ALL: Final = Wanted()


def sieve(state: BufferState, wanted: Wanted) -> Callable[[Sequence[Entry]], Sequence[Entry]]:
    """What lets those experiences pass that are wanted, but for their flags.

    Raises:
        ConsumerNotFoundError: There is no such consumer.
        InvalidRequestError: A consumer is named, and nothing that it might be asked for.
    """
    tests = [_is_here, *_of_record(state, wanted), *_of_place(state, wanted)]

    def passing(entries: Sequence[Entry]) -> Sequence[Entry]:
        # Test by test: a million may be looked at.
        for test in tests:
            entries = [entry for entry in entries if test(entry)]
            if not entries:
                break
        return entries

    return passing


async def with_flags(
    state: BufferState, entries: Sequence[Entry], flags: Sequence[str]
) -> Sequence[Entry]:
    """Those of the entries whose computation says all of the flags; their rows are read."""
    seqs = [entry.record.seq for entry in entries]
    if state.store.reads_wait:
        await state.store.at_hand(state.id, seqs=seqs)
    rows = state.store.advantages(state.id, seqs)
    return [
        entry
        for entry, row in zip(entries, rows, strict=True)
        if isinstance(row, AdvantageRow) and set(flags).issubset(row.flags)
    ]


def _is_here(entry: Entry) -> bool:
    return entry.durable and not entry.leaving


def _of_record(state: BufferState, wanted: Wanted) -> list[Test]:
    tests: list[Test] = []
    if wanted.uid_prefix:
        prefix = wanted.uid_prefix
        tests.append(lambda entry: entry.record.uid.startswith(prefix))
    if wanted.text:
        text = wanted.text
        tests.append(lambda entry: text in entry.record.uid)
    if wanted.truncated is not None:
        tests.append(lambda entry: entry.truncated is wanted.truncated)
    if wanted.reward is not None:
        tests.append(_within(wanted.reward, lambda entry: entry.record.reward))
    if wanted.response_tokens is not None:
        tests.append(_within(wanted.response_tokens, lambda entry: entry.record.response_tokens))
    if wanted.push_time is not None:
        tests.append(_within(wanted.push_time, lambda entry: entry.record.push_time))
    if wanted.policy_version is not None:
        tests.append(_within(wanted.policy_version, lambda entry: entry.record.min_version))
        tests.append(_within(wanted.policy_version, lambda entry: entry.record.max_version))
    if wanted.staleness is not None:
        tests.append(_within(wanted.staleness, state.staleness))
    # Last: they take the uid apart.
    if wanted.tid:
        tests.append(lambda entry: entry.record.tid == wanted.tid)
    if wanted.rid:
        tests.append(lambda entry: entry.record.rid == wanted.rid)
    if wanted.sid:
        tests.append(lambda entry: entry.record.sid == wanted.sid)
    return tests


def _within(bounds: Bounds, number: Callable[[Entry], float | None]) -> Test:
    low, high = bounds
    return lambda entry: (found := number(entry)) is not None and low <= found <= high


def _of_place(state: BufferState, wanted: Wanted) -> list[Test]:
    tests: list[Test] = []
    if wanted.consumer:
        consumer = state.consumer(wanted.consumer)
        if wanted.state is None and wanted.step is None:
            raise errors.InvalidRequestError(
                "consumer alone says nothing of an experience; give a state or a step, too",
                subject="consumer",
            )
        if wanted.state is not None:
            tests.append(lambda entry: place_of(state, consumer, entry) == wanted.state)
    elif wanted.state is not None:
        tests.append(lambda entry: state_of(state, entry) == wanted.state)
    if wanted.state in _BEFORE:
        tests.insert(0, _BEFORE[wanted.state])
    if wanted.step is not None:
        tests.append(lambda entry: _has_step(state, entry, wanted))
    return tests


_BEFORE: Final[dict[ExperienceState, Test]] = {
    "tombstone": lambda entry: entry.record.tombstone,
    "computing": lambda entry: not entry.available,
    "waiting_for_fields": lambda entry: not entry.available,
    "waiting_for_group": lambda entry: entry.group is not None and not entry.group.available,
    "retained": lambda entry: bool(entry.acked),
}
"""What is sooner known, and has to hold in a state."""


def _has_step(state: BufferState, entry: Entry, wanted: Wanted) -> bool:
    steps = state.progress.known(entry.record.seq).steps
    if wanted.consumer:
        return wanted.step in steps.get(wanted.consumer, ())
    return any(wanted.step in of_one for of_one in steps.values())
