"""Where an experience is on its way, as a whole and for each consumer, and what keeps it there."""

from __future__ import annotations

from typing import Final, get_args

from experience_buffer.looking import ConsumerPlace, ExperienceState
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.entries import Entry, key_of
from experience_buffer_server.sampling.staleness import UNKNOWN_VERSION

STATES: Final[tuple[ExperienceState, ...]] = get_args(ExperienceState)
_MAY_STILL_GET_IT: Final[tuple[ExperienceState, ...]] = ("ready", "held", "quarantined")
"""The first of them that holds for any consumer is the state of what is available."""
_DONE: Final = frozenset(("retained", "consumed"))


def state_of(state: BufferState, entry: Entry) -> ExperienceState:
    """Where an experience is on its way.

    Leased where any consumer holds it; else how far it has come; and once it is available, the first of
    ready, held, quarantined and waiting for its group that it is for any consumer.
    """
    if entry.record.tombstone:
        return "tombstone"
    consumers = state.consumers.values()
    for consumer in consumers:
        if key_of(consumer.settings, entry) in consumer.out:
            return "leased"
    if stage := _stage(state, entry):
        return stage
    places = {place_of(state, consumer, entry) for consumer in consumers}
    for place in _MAY_STILL_GET_IT:
        if place in places:
            return place
    if places and places <= _DONE:
        return "retained" if state.progress.is_retained(entry) else "consumed"
    return "waiting_for_group" if places else "ready"


def place_of(state: BufferState, consumer: Consumer, entry: Entry) -> ExperienceState:
    """Where an experience is on its way to one consumer."""
    if entry.record.tombstone:
        return "tombstone"
    key = key_of(consumer.settings, entry)
    if key in consumer.out:
        return "leased"
    if key in consumer.ready:
        return "ready"
    if key in consumer.quarantined:
        return "quarantined"
    if key in consumer.held:
        return "held"
    if consumer.name in entry.acked:
        steps = state.progress.known(entry.record.seq).steps
        return "retained" if steps.get(consumer.name) else "consumed"
    if stage := _stage(state, entry):
        return stage
    if consumer.settings.unit == "group" and entry.group is not None:
        if entry.group.damage:
            return "quarantined"
        if not entry.group.available:
            return "waiting_for_group"
    # Nothing offers it to this consumer any more: what it hadn't consumed of its unit has left.
    return "consumed"


def places_of(state: BufferState, entry: Entry) -> tuple[ConsumerPlace, ...]:
    """Where an experience is for each consumer; nowhere where it is a tombstone."""
    if entry.record.tombstone:
        return ()
    return tuple(place_info(state, consumer, entry) for consumer in state.consumers.values())


def place_info(state: BufferState, consumer: Consumer, entry: Entry) -> ConsumerPlace:
    """Where an experience is on its way to one consumer, and why."""
    known = state.progress.known(entry.record.seq)
    name, key = consumer.name, key_of(consumer.settings, entry)
    unit = consumer.out.get(key)
    deliveries = known.num_deliveries.get(name, 0) if unit is None else unit.num_deliveries
    place = place_of(state, consumer, entry)
    message = why_kept(consumer, key)
    if place == "consumed" and name in known.passed_over:
        message = "passed over: it was too stale"
    return ConsumerPlace(
        consumer=name,
        state=place,
        lease_id=0 if unit is None else unit.lease_id,
        step=max(known.steps.get(name, ()), default=None),
        num_deliveries=deliveries,
        message=message,
    )


def kept_from(state: BufferState, entry: Entry) -> str:
    """What keeps an experience from being delivered, in words; empty where nothing does."""
    if entry.record.note or entry.quarantine:
        return entry.record.note or entry.quarantine
    for consumer in state.consumers.values():
        if words := why_kept(consumer, key_of(consumer.settings, entry)):
            return words
    if entry.missing:
        return f"waits for {', '.join(entry.missing)}"
    if _waits_for_group_fields(state, entry) and entry.group is not None:
        return f"other members of its group wait for {', '.join(entry.group.missing)}"
    return ""


def why_kept(consumer: Consumer, key: int) -> str:
    """Why one consumer isn't given a unit that it could have, in words; empty where nothing keeps it."""
    if key in consumer.quarantined:
        return consumer.quarantined[key]
    if key not in consumer.held:
        return ""
    version = consumer.held[key]
    if version == UNKNOWN_VERSION:
        return consumer.why_unversioned
    return f"waits for policy version {version} to be published"


def _stage(state: BufferState, entry: Entry) -> ExperienceState | None:
    """How far an experience has come that consumers can't have yet; None: they can."""
    if entry.quarantine:
        return "quarantined"
    if entry.available:
        return None
    if state.settings.needs_groups and entry.group is not None and not entry.group.is_whole:
        return "waiting_for_group"
    if entry.missing or _waits_for_group_fields(state, entry):
        return "waiting_for_fields"
    return "computing"


def _waits_for_group_fields(state: BufferState, entry: Entry) -> bool:
    return state.settings.needs_groups and entry.group is not None and bool(entry.group.missing)
