"""Between the contract's messages and the server's values. No rules, no state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from google.protobuf import struct_pb2

from experience_buffer import errors, trxp
from experience_buffer.eid import EID
from experience_buffer.v1 import config_pb2, service_pb2, types_pb2
from experience_buffer_server.admission import Reason
from experience_buffer_server.annotation import AnnotateOutcome, AnnotateReason, Annotation
from experience_buffer_server.buffer import Buffer
from experience_buffer_server.config import BufferSettings
from experience_buffer_server.groups import Entry
from experience_buffer_server.ingest import Outcome, PushStatus
from experience_buffer_server.registry import checked_settings
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.stats import BufferStats
from experience_buffer_server.struct_values import StructValueError, plain_entries
from experience_buffer_server.wire_enums import CHOICES, enum_number, enum_word

_STATUS: Final = {
    PushStatus.STORED: types_pb2.PUSH_STATUS_STORED,
    PushStatus.DUPLICATE: types_pb2.PUSH_STATUS_DUPLICATE,
    PushStatus.REFUSED: types_pb2.PUSH_STATUS_REFUSED,
}
_REASON: Final = {
    Reason.INVALID: types_pb2.REFUSAL_REASON_INVALID,
    Reason.CONFLICT: types_pb2.REFUSAL_REASON_CONFLICT,
    Reason.LATE: types_pb2.REFUSAL_REASON_LATE,
    Reason.MISSING_FIELD: types_pb2.REFUSAL_REASON_MISSING_FIELD,
    Reason.GROUP_SIZE: types_pb2.REFUSAL_REASON_GROUP_SIZE,
}
_ANNOTATE: Final = {
    AnnotateReason.UNKNOWN_UID: types_pb2.ANNOTATE_REFUSAL_UNKNOWN_UID,
    AnnotateReason.INVALID: types_pb2.ANNOTATE_REFUSAL_INVALID,
    AnnotateReason.DELIVERED: types_pb2.ANNOTATE_REFUSAL_DELIVERED,
}
_WHOLE: Final = frozenset({"num_turns", "model_version", "version_start", "version_end"})
"""Entries of `info` that are whole numbers; on the wire every number is a float."""
_PLAIN_FIELDS: Final = (
    "group_size",
    "group_deadline_seconds",
    "min_group_size",
    "lease_seconds",
    "max_items",
    "max_bytes",
    "duplicate_horizon_seconds",
)


def settings_from(config: config_pb2.BufferConfig) -> BufferSettings:
    """The settings that a configuration asks for; what isn't set takes its default.

    Raises:
        InvalidRequestError: A value is unknown or out of bounds; the message names the field.
    """
    return checked_settings(values_from(config))


def values_from(config: config_pb2.BufferConfig) -> dict[str, Any]:
    """The fields that are set, as `BufferSettings` names and spells them."""
    values: dict[str, Any] = {
        name: getattr(config, name) for name in _PLAIN_FIELDS if config.HasField(name)
    }
    for name in CHOICES:
        number = getattr(config, name)
        if config.HasField(name) and number:
            values[name] = enum_word(name, number)
    if config.consumers:
        values["consumers"] = [
            {"name": consumer.name, "raw": consumer.raw}
            | ({"unit": enum_word("unit", consumer.unit)} if consumer.unit else {})
            for consumer in config.consumers
        ]
    if config.HasField("advantage"):
        parameters = {
            name: _parameter(name, value)
            for name, value in config.advantage.parameters.fields.items()
        }
        values["advantage"] = parameters | {"estimator": config.advantage.estimator}
    return values


def changes_from(request: service_pb2.UpdateBufferRequest) -> dict[str, Any]:
    """The fields that an update names, with their new values; unset ones become the defaults.

    Raises:
        InvalidRequestError: The mask is empty or names what can't be changed.
    """
    paths = list(request.update_mask.paths)
    known = set(BufferSettings.model_fields)
    unknown = [path for path in paths if path not in known]
    if unknown or not paths:
        raise errors.InvalidRequestError(
            f"update_mask {paths} must name at least one of {sorted(known)}", subject="update_mask"
        )
    defaults = BufferSettings().model_dump()
    values = values_from(request.config)
    return {path: values.get(path, defaults[path]) for path in paths}


def buffer_message(buffer: Buffer) -> config_pb2.Buffer:
    """A buffer as the server holds it."""
    settings = buffer.settings
    config = config_pb2.BufferConfig(
        name=buffer.name,
        consumers=[
            config_pb2.ConsumerConfig(name=c.name, unit=enum_number("unit", c.unit), raw=c.raw)
            for c in settings.consumers
        ],
        advantage=config_pb2.AdvantageConfig(estimator=settings.advantage.estimator),
    )
    config.advantage.parameters.update(settings.advantage.parameters)
    for name in _PLAIN_FIELDS:
        setattr(config, name, getattr(settings, name))
    for name in CHOICES:
        setattr(config, name, enum_number(name, getattr(settings, name)))
    return config_pb2.Buffer(
        config=config,
        policy_version=buffer.row.policy_version,
        create_time=buffer.row.create_time,
        num_items=buffer.contents.num_items,
        num_bytes=buffer.contents.num_bytes,
    )


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


def outcome_message(index: int, outcome: Outcome) -> types_pb2.PushOutcome:
    """What became of one pushed item."""
    message = types_pb2.PushOutcome(index=index, uid=outcome.uid, status=_STATUS[outcome.status])
    if outcome.reason is not None:
        message.reason = _REASON[outcome.reason]
        message.message = outcome.message
    return message


def lease_message(lease: Lease, now: float) -> types_pb2.Lease:
    """A lease, with the time it has left."""
    return types_pb2.Lease(
        id=lease.id, consumer=lease.consumer, expires_in_seconds=max(lease.deadline - now, 0.0)
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
        message=record.note or entry.quarantine or _lacks(buffer, entry),
    )


def _lacks(buffer: Buffer, entry: Entry) -> str:
    """Which fields keep an experience waiting, in words; empty where none do."""
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
    states = set()
    for consumer in buffer.delivery.consumers.values():
        if consumer.name not in entry.acked:
            unit = consumer.units.get(entry.record.seq)
            states.add("none" if unit is None else "ready" if unit.waiting else "leased")
    if "ready" in states:
        return types_pb2.EXPERIENCE_STATE_READY
    if "leased" in states:
        return types_pb2.EXPERIENCE_STATE_LEASED
    return types_pb2.EXPERIENCE_STATE_WAITING_FOR_GROUP


def stats_message(stats: BufferStats) -> service_pb2.BufferStats:
    """The state of one buffer."""
    return service_pb2.BufferStats(
        name=stats.name,
        num_items=stats.num_items,
        num_bytes=stats.num_bytes,
        num_open_groups=stats.num_open_groups,
        num_overdue_groups=stats.num_overdue_groups,
        num_computing_groups=stats.num_computing_groups,
        num_quarantined_groups=stats.num_quarantined_groups,
        oldest_open_group=stats.oldest_open_group,
        policy_version=stats.policy_version,
        consumers=[
            service_pb2.ConsumerStats(
                name=consumer.name,
                unit=enum_number("unit", consumer.unit),
                num_ready_units=consumer.num_ready_units,
                num_leased_units=consumer.num_leased_units,
                num_leases=consumer.num_leases,
                num_waiting=consumer.num_waiting,
                waiting_for=consumer.waiting_for,
                num_acked_units=consumer.num_acked_units,
                num_redelivered_units=consumer.num_redelivered_units,
            )
            for consumer in stats.consumers
        ],
        num_waiting_for_fields=stats.num_waiting_for_fields,
        computing_waits_for=stats.computing_waits_for,
    )


def annotation_from(message: service_pb2.Annotation) -> Annotation:
    """What is added to an experience; one that can't be read says why in `problem`."""
    try:
        tensors = trxp.read_tensors(message.tensors) if message.tensors else {}
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


def _parameter(name: str, value: struct_pb2.Value) -> float | bool | str:
    kind = value.WhichOneof("kind")
    if kind not in ("number_value", "bool_value", "string_value"):
        raise errors.InvalidRequestError(
            f"advantage.parameters.{name}: a number, a boolean or a text is expected",
            subject=f"config.advantage.parameters.{name}",
        )
    parameter: float | bool | str = getattr(value, kind)
    return parameter
