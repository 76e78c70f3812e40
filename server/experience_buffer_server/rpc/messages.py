"""Between the contract's messages and the server's values. No rules, no state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from experience_buffer import errors
from experience_buffer._codec import payload as payload_codec
from experience_buffer.eid import EID
from experience_buffer.v1 import config_pb2, service_pb2, types_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.priorities import PriorityUpdate
from experience_buffer_server.buffer.intake.annotation import (
    AnnotateOutcome,
    AnnotateReason,
    Annotation,
)
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.group_table import Entry
from experience_buffer_server.buffer.state.units import key_of
from experience_buffer_server.buffer.stats import BufferStats
from experience_buffer_server.rpc.struct_values import StructValueError, plain_entries
from experience_buffer_server.sampling.leases import Lease

_Message = TypeVar("_Message", bound=Message)
_UNIT: Final = {"item": config_pb2.UNIT_ITEM, "group": config_pb2.UNIT_GROUP}
_ANNOTATE: Final = {
    AnnotateReason.UNKNOWN_UID: types_pb2.ANNOTATE_REFUSAL_UNKNOWN_UID,
    AnnotateReason.INVALID: types_pb2.ANNOTATE_REFUSAL_INVALID,
    AnnotateReason.DELIVERED: types_pb2.ANNOTATE_REFUSAL_DELIVERED,
}
_WHOLE: Final = frozenset({"num_turns", "model_version", "version_start", "version_end"})
"""Entries of `info` that are whole numbers; on the wire every number is a float."""


def tombstones_from(messages: Iterable[types_pb2.Tombstone]) -> list[tuple[EID, str]]:
    """Identities and reasons of failed rollouts."""
    return [
        (
            EID(
                batch=message.id.batch,
                task=message.id.task,
                run=message.id.run,
                step=message.id.step,
                suffix=message.id.suffix,
            ),
            message.reason or "no reason given",
        )
        for message in messages
    ]


def lease_message(lease: Lease, now: float) -> types_pb2.Lease:
    """A lease, with the time it has left."""
    return types_pb2.Lease(
        id=lease.id,
        consumer=lease.consumer,
        expires_in_seconds=max(lease.deadline - now, 0.0),
        world_size=lease.world_size,
    )


def summary_message(buffer: Buffer, entry: Entry) -> types_pb2.ExperienceSummary:
    """What is known of an experience without its payload."""
    record = entry.record
    return types_pb2.ExperienceSummary(
        uid=record.uid,
        tid=record.tid,
        rid=record.rid,
        sid=record.sid,
        state=state_of(buffer, entry),
        reward=record.reward,
        response_tokens=record.response_tokens,
        payload_bytes=record.payload_bytes,
        min_policy_version=record.min_version,
        max_policy_version=record.max_version,
        push_time=record.push_time,
        message=record.note or entry.quarantine or _kept_from(buffer, entry),
        priority=record.priority,
        generation=record.generation,
    )


def priorities_from(messages: Iterable[service_pb2.PriorityUpdate]) -> list[PriorityUpdate]:
    """New priorities, as asked for."""
    return [
        PriorityUpdate(uid=one.uid, priority=one.priority, generation=one.generation)
        for one in messages
    ]


def _kept_from(buffer: Buffer, entry: Entry) -> str:
    """What keeps an experience from being delivered, in words; empty where nothing does."""
    for consumer in buffer.delivery.consumers.values():
        key = key_of(consumer.settings, entry)
        if key in consumer.quarantined:
            return consumer.quarantined[key]
        if key in consumer.held:
            return f"waits for policy version {consumer.held[key]} to be published"
    if entry.missing:
        return f"waits for {', '.join(entry.missing)}"
    if _waits_for_group_fields(buffer, entry) and entry.group is not None:
        return f"other members of its group wait for {', '.join(entry.group.missing)}"
    return ""


def _waits_for_group_fields(buffer: Buffer, entry: Entry) -> bool:
    return buffer.settings.needs_groups and entry.group is not None and bool(entry.group.missing)


def state_of(buffer: Buffer, entry: Entry) -> types_pb2.ExperienceState.ValueType:
    """Where an experience is on its way."""
    if entry.record.tombstone:
        return types_pb2.EXPERIENCE_STATE_TOMBSTONE
    if entry.quarantine:
        return types_pb2.EXPERIENCE_STATE_QUARANTINED
    if not entry.available:
        if buffer.settings.needs_groups and entry.group is not None and not entry.group.is_whole:
            return types_pb2.EXPERIENCE_STATE_WAITING_FOR_GROUP
        if entry.missing or _waits_for_group_fields(buffer, entry):
            return types_pb2.EXPERIENCE_STATE_WAITING_FOR_FIELDS
        return types_pb2.EXPERIENCE_STATE_COMPUTING
    consumers = buffer.delivery.consumers.values()
    places = {_place(c, entry) for c in consumers if c.name not in entry.acked}
    if not places and consumers:
        return types_pb2.EXPERIENCE_STATE_RETAINED
    for place in _PLACES:
        if place in places:
            return place
    return types_pb2.EXPERIENCE_STATE_WAITING_FOR_GROUP


_PLACES: Final = (
    types_pb2.EXPERIENCE_STATE_READY,
    types_pb2.EXPERIENCE_STATE_LEASED,
    types_pb2.EXPERIENCE_STATE_HELD,
    types_pb2.EXPERIENCE_STATE_QUARANTINED,
)
"""Where an experience is for one consumer; the first that holds for any is its state."""


def _place(consumer: Consumer, entry: Entry) -> types_pb2.ExperienceState.ValueType:
    key = key_of(consumer.settings, entry)
    if key in consumer.ready:
        return types_pb2.EXPERIENCE_STATE_READY
    if key in consumer.out:
        return types_pb2.EXPERIENCE_STATE_LEASED
    if key in consumer.held:
        return types_pb2.EXPERIENCE_STATE_HELD
    if key in consumer.quarantined:
        return types_pb2.EXPERIENCE_STATE_QUARANTINED
    return types_pb2.EXPERIENCE_STATE_WAITING_FOR_GROUP


def stats_message(stats: BufferStats) -> service_pb2.BufferStats:
    """The state of one buffer."""
    consumers = [
        filled(service_pb2.ConsumerStats, consumer, unit=_UNIT[consumer.unit])
        for consumer in stats.consumers
    ]
    return filled(service_pb2.BufferStats, stats, consumers=consumers)


def filled(kind: type[_Message], source: object, **given: Any) -> _Message:
    """A message whose fields are the attributes of the same names; None leaves one absent.

    Args:
        kind: The message's class.
        source: Has an attribute for each of its fields.
        given: Those that are something else in the source.
    """
    names = set(kind.DESCRIPTOR.fields_by_name) - given.keys()
    return kind(**given, **{name: getattr(source, name) for name in names})


def annotation_from(message: service_pb2.Annotation) -> Annotation:
    """What is added to an experience; one that can't be read says why in `problem`."""
    try:
        tensors = payload_codec.read_tensors(message.tensors) if message.tensors else {}
        info = plain_entries(message.info, label="info")
    except (errors.TrxpError, StructValueError) as error:
        return Annotation(uid=message.uid, problem=str(error))
    return Annotation(
        uid=message.uid,
        reward=message.reward if message.HasField("reward") else None,
        tensors=tensors,
        info={name: _whole(value) if name in _WHOLE else value for name, value in info.items()},
    )


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def annotate_outcome_message(outcome: AnnotateOutcome) -> types_pb2.AnnotateOutcome:
    """What became of one annotation."""
    message = types_pb2.AnnotateOutcome(uid=outcome.uid, message=outcome.message)
    if outcome.reason is not None:
        message.refusal = _ANNOTATE[outcome.reason]
    return message
