"""What is known of one experience in time: from what is stored of it, and what is remembered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from experience_buffer.history import Departure, HistoryEvent
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Entry, Group, key_of


def history(
    buffer: Buffer, entry: Entry, computation: Mapping[str, Any] | None
) -> list[HistoryEvent]:
    """The events of a stored experience, in the order in which they happened.

    Args:
        buffer: Where it is.
        entry: The experience, or failed rollout.
        computation: How its advantages were computed; None where none were.
    """
    state = buffer.state
    events = [*_coming(state, entry, computation), *_delivered(state, entry)]
    placed, last = [], 0.0
    for number, event in enumerate(events):
        # What nobody has noted the time of comes after what is known to come before it.
        last = last if event.time is None else event.time
        placed.append((last, number, event))
    return [event for _, _, event in sorted(placed, key=lambda each: each[:2])]


def history_of_departed(
    departure: Departure,
    *,
    push_time: float,
    computation: Mapping[str, Any] | None,
    later: Iterable[tuple[float, str]],
) -> list[HistoryEvent]:
    """The events of an experience that the archive has, in the order in which they happened.

    Args:
        departure: How it left.
        push_time: When it was pushed, seconds since the Unix epoch.
        computation: How its advantages were computed; None where none were.
        later: When something was added after it had left, and what, oldest first.
    """
    return [
        HistoryEvent(kind="pushed", time=push_time),
        *([] if computation is None else [_computed(computation)]),
        *(
            HistoryEvent(kind="acknowledged", time=ack.time, consumer=ack.consumer, step=ack.step)
            for ack in departure.acked_by
        ),
        HistoryEvent(
            kind="departed",
            time=departure.time,
            message=": ".join(filter(None, (departure.reason, departure.message))),
        ),
        *(HistoryEvent(kind="annotated", time=time, message=words) for time, words in later),
    ]


def _coming(
    state: BufferState, entry: Entry, computation: Mapping[str, Any] | None
) -> Iterator[HistoryEvent]:
    record, telemetry = entry.record, state.telemetry
    what = f"a failed rollout: {record.note}" if record.tombstone else ""
    who = telemetry.pushes.who(record.seq)
    yield HistoryEvent(kind="pushed", time=record.push_time, who=who, message=what)
    if entry.group is not None and not entry.group.is_open:
        yield _completed(entry.group)
    if annotated := telemetry.annotated.get(record.seq):
        time, words = annotated
        yield HistoryEvent(kind="annotated", time=time, message=words)
    if computation is not None:
        yield _computed(computation)


def _computed(computation: Mapping[str, Any]) -> HistoryEvent:
    known = computation.get("compute_time")
    return HistoryEvent(
        kind="computed",
        time=float(known) if isinstance(known, (int, float)) else None,
        message=str(computation.get("estimator", "")),
    )


def _completed(group: Group) -> HistoryEvent:
    time, closed = None, group.row.closed
    if closed == "whole" and group.members and not group.row.num_consumed:
        time = max(member.record.push_time for member in group.members)
    words = {"whole": "its group is whole", "sealed": "its group was sealed"}.get(
        closed, f"its group was closed: {closed}"
    )
    return HistoryEvent(kind="completed", time=time, message=words)


def _delivered(state: BufferState, entry: Entry) -> Iterator[HistoryEvent]:
    seq = entry.record.seq
    for ack in state.telemetry.acks(seq):
        yield HistoryEvent(kind="acknowledged", time=ack.time, consumer=ack.consumer, step=ack.step)
    progress = state.progress.known(seq)
    for name, consumer in state.consumers.items():
        if name in entry.acked and not any(a.consumer == name for a in state.telemetry.acks(seq)):
            passed = name in progress.passed_over
            words = "passed over: too stale" if passed else "before the server started"
            kind = "passed_over" if passed else "acknowledged"
            yield HistoryEvent(kind=kind, consumer=name, message=words)
        if count := progress.num_deliveries.get(name, 0):
            times = "once" if count == 1 else f"{count} times"
            yield HistoryEvent(kind="returned", consumer=name, message=f"{times}, without an ack")
        unit = consumer.out.get(key_of(consumer.settings, entry))
        lease = None if unit is None else consumer.leases.get(unit.lease_id)
        if lease is not None:
            holders = [holder.name or holder.address for holder in lease.holders.values()]
            yield HistoryEvent(
                kind="leased",
                time=lease.grant_time,
                consumer=name,
                who=", ".join(dict.fromkeys(filter(None, holders))),
                lease_id=lease.id,
                until_time=lease.deadline,
            )
        if why := consumer.quarantined.get(key_of(consumer.settings, entry)):
            yield HistoryEvent(kind="quarantined", consumer=name, message=why)
    if entry.quarantine:
        yield HistoryEvent(kind="quarantined", message=entry.quarantine)
