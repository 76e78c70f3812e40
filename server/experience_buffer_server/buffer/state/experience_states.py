"""Where an experience is on its way, and what keeps it there. Looks only."""

from __future__ import annotations

from enum import StrEnum

from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.entries import Entry, key_of
from experience_buffer_server.sampling.staleness import UNKNOWN_VERSION


class ExperienceState(StrEnum):
    """Where an experience is; the wire has the same names."""

    TOMBSTONE = "tombstone"
    WAITING_FOR_GROUP = "waiting_for_group"
    WAITING_FOR_FIELDS = "waiting_for_fields"
    COMPUTING = "computing"
    RETAINED = "retained"
    READY = "ready"
    LEASED = "leased"
    HELD = "held"
    QUARANTINED = "quarantined"


_PLACES = (
    ExperienceState.READY,
    ExperienceState.LEASED,
    ExperienceState.HELD,
    ExperienceState.QUARANTINED,
)
"""Where it may be for one consumer; the first that holds for any is its state."""


def state_of(state: BufferState, entry: Entry) -> ExperienceState:
    """Where an experience is on its way."""
    if entry.record.tombstone:
        return ExperienceState.TOMBSTONE
    if entry.quarantine:
        return ExperienceState.QUARANTINED
    if not entry.available:
        if state.settings.needs_groups and entry.group is not None and not entry.group.is_whole:
            return ExperienceState.WAITING_FOR_GROUP
        if entry.missing or _waits_for_group_fields(state, entry):
            return ExperienceState.WAITING_FOR_FIELDS
        return ExperienceState.COMPUTING
    consumers = state.consumers.values()
    places = {_place(c, entry) for c in consumers if c.name not in entry.acked}
    if not places and consumers:
        return ExperienceState.RETAINED
    return next((p for p in _PLACES if p in places), ExperienceState.WAITING_FOR_GROUP)


def kept_from(state: BufferState, entry: Entry) -> str:
    """What keeps an experience from being delivered, in words; empty where nothing does."""
    if entry.record.note or entry.quarantine:
        return entry.record.note or entry.quarantine
    for consumer in state.consumers.values():
        key = key_of(consumer.settings, entry)
        if key in consumer.quarantined:
            return consumer.quarantined[key]
        if key in consumer.held:
            version = consumer.held[key]
            if version == UNKNOWN_VERSION:
                return consumer.why_unversioned
            return f"waits for policy version {version} to be published"
    if entry.missing:
        return f"waits for {', '.join(entry.missing)}"
    if _waits_for_group_fields(state, entry) and entry.group is not None:
        return f"other members of its group wait for {', '.join(entry.group.missing)}"
    return ""


def _waits_for_group_fields(state: BufferState, entry: Entry) -> bool:
    return state.settings.needs_groups and entry.group is not None and bool(entry.group.missing)


def _place(consumer: Consumer, entry: Entry) -> ExperienceState | None:
    """Where an experience is for one consumer; None: it isn't its."""
    key = key_of(consumer.settings, entry)
    if key in consumer.ready:
        return ExperienceState.READY
    if key in consumer.out:
        return ExperienceState.LEASED
    if key in consumer.held:
        return ExperienceState.HELD
    return ExperienceState.QUARANTINED if key in consumer.quarantined else None
