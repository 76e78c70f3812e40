"""Messages to values and back. Pure: no I/O, no gRPC, no rule of the server's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final, cast

from google.protobuf.struct_pb2 import ListValue, Struct

from experience_buffer.errors import InvalidRequestError
from experience_buffer.options import AdvantageConfig, BufferConfig, ConsumerConfig
from experience_buffer.outcomes import AnnotateOutcome, PushOutcome
from experience_buffer.v1 import config_pb2, service_pb2, types_pb2
from experience_buffer.values import (
    BufferInfo,
    BufferStats,
    ConsumerStats,
    ExperienceSummary,
    Stats,
    StoredExperience,
    Tombstone,
)


class Names:
    """The texts that stand for an enum's values: "USE_PARTIAL" of the wire is "use_partial"."""

    def __init__(self, enum: Any, prefix: str) -> None:
        values = [value for value in enum.DESCRIPTOR.values if value.number]
        self.by_number: Final = {
            value.number: value.name.removeprefix(prefix).lower() for value in values
        }
        self.by_name: Final = {name: number for number, name in self.by_number.items()}

    def name(self, number: int, default: str = "") -> Any:
        """The text; `default` for 0, and for values that a newer server added."""
        return self.by_number.get(number, default)

    def number(self, name: str, field: str) -> Any:
        """The enum's value.

        Raises:
            InvalidRequestError: No such name.
        """
        try:
            return self.by_name[name]
        except KeyError:
            known = ", ".join(repr(known) for known in self.by_name)
            raise InvalidRequestError(
                f"{field} is {name!r}; give one of {known}", subject=field
            ) from None


PUSH_STATUS: Final = Names(types_pb2.PushStatus, "PUSH_STATUS_")
ANNOTATE_REFUSAL: Final = Names(types_pb2.AnnotateRefusal, "ANNOTATE_REFUSAL_")
REFUSAL_REASON: Final = Names(types_pb2.RefusalReason, "REFUSAL_REASON_")
STATE: Final = Names(types_pb2.ExperienceState, "EXPERIENCE_STATE_")
UNIT: Final = Names(config_pb2.Unit, "UNIT_")
_CONFIG_ENUMS: Final = {
    "group_by": Names(config_pb2.GroupBy, "GROUP_BY_"),
    "on_group_deadline": Names(config_pb2.DeadlinePolicy, "DEADLINE_POLICY_"),
    "late_members": Names(config_pb2.LatePolicy, "LATE_POLICY_"),
    "on_bad_reward": Names(config_pb2.BadRewardPolicy, "BAD_REWARD_POLICY_"),
    "on_missing_field": Names(config_pb2.MissingFieldPolicy, "MISSING_FIELD_POLICY_"),
}
_CONFIG_NUMBERS: Final = (
    "group_size",
    "group_deadline_seconds",
    "min_group_size",
    "lease_seconds",
    "max_items",
    "max_bytes",
    "duplicate_horizon_seconds",
)
_COUNTS: Final = frozenset({"members", "votes", "batch_groups", "batch_members", "running_count"})
"""Entries of a computation that are whole numbers; in a struct every number is a float."""


def config_to_message(config: BufferConfig) -> config_pb2.BufferConfig:
    """Translate a configuration; fields that are None stay unset.

    Raises:
        InvalidRequestError: A value has the wrong type, sign or name.
    """
    message = config_pb2.BufferConfig(name=config.name)
    for field, names in _CONFIG_ENUMS.items():
        if (value := getattr(config, field)) is not None:
            setattr(message, field, names.number(value, field))
    for field in _CONFIG_NUMBERS:
        if (value := getattr(config, field)) is not None:
            try:
                setattr(message, field, value)
            except (TypeError, ValueError) as error:
                raise InvalidRequestError(f"{field} is {value!r}: {error}", subject=field) from None
    for consumer in config.consumers or ():
        unit = UNIT.number(consumer.unit, "consumers.unit")
        message.consumers.add(name=consumer.name, unit=unit, raw=consumer.raw)
    if config.advantage is not None:
        message.advantage.CopyFrom(_advantage_to_message(config.advantage))
    return message


def _advantage_to_message(advantage: AdvantageConfig) -> config_pb2.AdvantageConfig:
    message = config_pb2.AdvantageConfig()
    field = "estimator"
    try:
        message.estimator = advantage.estimator
        field = "parameters"
        for name, value in dict(advantage.parameters).items():
            if not isinstance(value, (bool, int, float, str)):
                raise TypeError(f"{name} is a {type(value).__name__}")
            message.parameters[name] = value
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(
            f"advantage.{field} is {getattr(advantage, field)!r:.200}: {error}; give numbers, "
            "booleans and texts by name",
            subject=f"advantage.{field}",
        ) from None
    return message


def config_from_message(message: config_pb2.BufferConfig) -> BufferConfig:
    """Translate a configuration; unset fields become None."""
    values: dict[str, Any] = {}
    for field, names in _CONFIG_ENUMS.items():
        if message.HasField(cast(Any, field)):
            values[field] = names.name(getattr(message, field)) or None
    for field in _CONFIG_NUMBERS:
        if message.HasField(cast(Any, field)):
            values[field] = getattr(message, field)
    if message.consumers:
        values["consumers"] = tuple(
            ConsumerConfig(consumer.name, UNIT.name(consumer.unit, "item"), raw=consumer.raw)
            for consumer in message.consumers
        )
    if message.HasField("advantage"):
        values["advantage"] = AdvantageConfig(
            message.advantage.estimator, struct_to_dict(message.advantage.parameters)
        )
    return BufferConfig(message.name, **values)


def changed_fields(config: BufferConfig) -> list[str]:
    """The fields that are set, for an update mask."""
    fields = [*_CONFIG_ENUMS, *_CONFIG_NUMBERS, "consumers", "advantage"]
    return [field for field in fields if getattr(config, field) is not None]


def tombstone_to_message(tombstone: Tombstone) -> types_pb2.Tombstone:
    """Translate a tombstone."""
    eid = tombstone.eid
    identity = types_pb2.ExperienceId(
        batch=str(eid.batch), task=str(eid.task), run=eid.run, step=eid.step, suffix=eid.suffix
    )
    return types_pb2.Tombstone(id=identity, reason=tombstone.reason)


def outcomes(
    messages: Iterable[types_pb2.PushOutcome], positions: list[int]
) -> Iterable[PushOutcome]:
    """Translate outcomes, giving each item the position that it has for the caller."""
    for place, message in enumerate(messages):
        yield PushOutcome(
            index=positions[place] if place < len(positions) else message.index,
            uid=message.uid,
            status=PUSH_STATUS.name(message.status, "refused"),
            reason=REFUSAL_REASON.name(message.reason),
            message=message.message,
        )


def annotate_outcome(message: types_pb2.AnnotateOutcome) -> AnnotateOutcome:
    """Translate the outcome of an annotation; a reason that a newer server added is empty."""
    return AnnotateOutcome(
        uid=message.uid,
        status="refused" if message.refusal else "stored",
        reason=ANNOTATE_REFUSAL.name(message.refusal),
        message=message.message,
    )


def struct_to_dict(message: Struct) -> dict[str, Any]:
    """Translate a struct; NaN and infinity, which the JSON mapping refuses, are numbers too."""
    return {name: _struct_value(message[name]) for name in sorted(message)}


def _struct_value(value: Any) -> Any:
    if isinstance(value, Struct):
        return struct_to_dict(value)
    if isinstance(value, ListValue):
        return [_struct_value(member) for member in value]
    return value


def batch_fields(
    experiences: Iterable[types_pb2.SampledExperience],
    lease: types_pb2.Lease | None,
    end: service_pb2.SampleResponse | service_pb2.SampleFrame,
    *,
    received_time: float,
) -> dict[str, Any]:
    """The fields of `BatchData` that the server states, all but buffer and consumer.

    Args:
        experiences: All of the batch.
        lease: None when nothing was delivered.
        end: The message with the batch's totals: the response, or the last frame.
        received_time: `time.monotonic()` at the receipt.
    """
    experiences = list(experiences)
    return {
        "lease_id": lease.id if lease else 0,
        "expire_time": received_time + lease.expires_in_seconds if lease else math.inf,
        "uids": tuple(item.uid for item in experiences),
        "groups": tuple(item.group for item in experiences),
        "payloads": tuple(item.payload for item in experiences),
        "num_deliveries": tuple(item.num_deliveries for item in experiences),
        "staleness": tuple(_optional(item, "staleness") for item in experiences),
        "flags": tuple(tuple(item.flags) for item in experiences),
        "num_units": end.num_units,
        "shortfall": end.shortfall,
        "policy_version": _optional(end, "policy_version"),
    }


def stored(message: service_pb2.GetResponse) -> StoredExperience:
    """Translate an experience as the server holds it."""
    has_computation = message.HasField("computation")
    return StoredExperience(
        summary=summary(message.summary),
        payload=message.payload,
        computation=_computation(message.computation) if has_computation else None,
    )


def _computation(message: Struct) -> dict[str, Any]:
    return {
        name: _counted(value) if name in _COUNTS else value
        for name, value in struct_to_dict(message).items()
    }


def _counted(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def summary(message: types_pb2.ExperienceSummary) -> ExperienceSummary:
    """Translate a summary."""
    return ExperienceSummary(
        uid=message.uid,
        tid=message.tid,
        rid=message.rid,
        sid=message.sid,
        state=STATE.name(message.state, "waiting_for_group"),
        reward=_optional(message, "reward"),
        response_tokens=message.response_tokens,
        payload_bytes=message.payload_bytes,
        min_policy_version=_optional(message, "min_policy_version"),
        max_policy_version=_optional(message, "max_policy_version"),
        push_time=message.push_time,
        message=message.message,
    )


def buffer_info(message: config_pb2.Buffer) -> BufferInfo:
    """Translate a buffer."""
    return BufferInfo(
        config=config_from_message(message.config),
        policy_version=policy_version(message),
        create_time=message.create_time,
        num_items=message.num_items,
        num_bytes=message.num_bytes,
    )


def stats(message: service_pb2.GetStatsResponse) -> Stats:
    """Translate a server's statistics."""
    return Stats(
        buffers=tuple(_buffer_stats(buffer) for buffer in message.buffers),
        server_version=message.server_version,
        uptime_seconds=message.uptime_seconds,
    )


def policy_version(message: Any) -> int | None:
    """The message's policy version; None before the first was published."""
    return cast("int | None", _optional(message, "policy_version"))


def _buffer_stats(message: service_pb2.BufferStats) -> BufferStats:
    return BufferStats(
        name=message.name,
        num_items=message.num_items,
        num_bytes=message.num_bytes,
        num_open_groups=message.num_open_groups,
        num_overdue_groups=message.num_overdue_groups,
        num_computing_groups=message.num_computing_groups,
        num_quarantined_groups=message.num_quarantined_groups,
        num_waiting_for_fields=message.num_waiting_for_fields,
        computing_waits_for=message.computing_waits_for,
        oldest_open_group=message.oldest_open_group,
        policy_version=policy_version(message),
        consumers=tuple(_consumer_stats(consumer) for consumer in message.consumers),
    )


def _consumer_stats(message: service_pb2.ConsumerStats) -> ConsumerStats:
    return ConsumerStats(
        name=message.name,
        unit=UNIT.name(message.unit, "item"),
        num_ready_units=message.num_ready_units,
        num_leased_units=message.num_leased_units,
        num_leases=message.num_leases,
        num_waiting=message.num_waiting,
        waiting_for=message.waiting_for,
        num_acked_units=message.num_acked_units,
        num_redelivered_units=message.num_redelivered_units,
    )


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None
