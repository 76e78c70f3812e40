"""Messages to values and back. Pure: no I/O, no gRPC, no rule of the server's.

The configurations of buffers are translated in `config.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from google.protobuf.message import Message
from google.protobuf.struct_pb2 import ListValue, Struct

from experience_buffer._messages.batch_data import LazyPacked, LazyPayloads
from experience_buffer._messages.names import (
    ANNOTATE_REFUSAL,
    PUSH_STATUS,
    REFUSAL_REASON,
    STATE,
    UNIT,
)
from experience_buffer.outcomes import AnnotateOutcome, PushOutcome, PushResult
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer.values import (
    BufferStats,
    ConsumerStats,
    ExperienceSummary,
    Stats,
    StoredExperience,
    Tombstone,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Value = TypeVar("_Value", bound="DataclassInstance")
_COUNTS: Final = frozenset({"members", "votes", "batch_groups", "batch_members", "running_count"})
"""Entries of a computation that are whole numbers; in a struct every number is a float."""


def tombstone_to_message(tombstone: Tombstone) -> types_pb2.Tombstone:
    """Translate a tombstone."""
    eid = tombstone.eid
    identity = types_pb2.ExperienceId(
        batch=str(eid.batch), task=str(eid.task), run=eid.run, step=eid.step, suffix=eid.suffix
    )
    return types_pb2.Tombstone(id=identity, reason=tombstone.reason)


def push_result(message: service_pb2.PushResponse, *, positions: Sequence[int]) -> PushResult:
    """Translate what became of a push's items.

    Args:
        message: The server's answer.
        positions: Those that the items have for the caller; where there are none, the server's.
    """
    outcomes = [
        outcome(each, positions[place] if place < len(positions) else each.index)
        for place, each in enumerate(message.outcomes)
    ]
    return PushResult(outcomes=tuple(outcomes), policy_version=policy_version(message))


def outcome(message: types_pb2.PushOutcome, position: int) -> PushOutcome:
    """Translate the outcome of the item at a position."""
    return PushOutcome(
        index=position,
        uid=message.uid,
        status=PUSH_STATUS.name(message.status, "refused"),
        reason=REFUSAL_REASON.name(message.reason),
        message=message.message,
    )


def annotate_outcomes(message: service_pb2.AnnotateResponse) -> tuple[AnnotateOutcome, ...]:
    """Translate the outcomes of annotations."""
    return tuple(map(annotate_outcome, message.outcomes))


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
    payloads: Sequence[bytes | memoryview],
    packed: bytearray | memoryview,
    num_bytes: int | None,
    received_time: float,
) -> dict[str, Any]:
    """The fields of `BatchData` that the server states, all but buffer, consumer and rank.

    Args:
        experiences: All of the batch; none of a packed one.
        lease: None when nothing was delivered.
        end: The message with the batch's totals: the response, or the last frame.
        payloads: Those of the experiences.
        packed: The packed batch, writable; empty when it isn't one.
        num_bytes: Payload bytes of the batch; None: as many as came.
        received_time: `time.monotonic()` at the receipt.
    """
    experiences = list(experiences)
    return {
        "lease_id": lease.id if lease else 0,
        "expire_time": received_time + lease.expires_in_seconds if lease else math.inf,
        "world_size": lease.world_size if lease else 0,
        "uids": tuple(item.uid for item in experiences),
        "groups": tuple(item.group for item in experiences),
        "content": LazyPayloads(payloads),
        "num_deliveries": tuple(item.num_deliveries for item in experiences),
        "staleness": tuple(_optional(item, "staleness") for item in experiences),
        "flags": tuple(tuple(item.flags) for item in experiences),
        "probabilities": tuple(item.probability for item in experiences),
        "times_sampled": tuple(item.times_sampled for item in experiences),
        "generations": tuple(item.generation for item in experiences),
        "columns": LazyPacked(packed) if packed else None,
        "num_bytes": len(packed) + sum(map(len, payloads)) if num_bytes is None else num_bytes,
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
    return value_of(
        ExperienceSummary, message, state=STATE.name(message.state, "waiting_for_group")
    )


def page(
    message: service_pb2.ListResponse,
) -> tuple[tuple[ExperienceSummary, ...], str]:
    """Translate one page of summaries; with the next page's token, empty after the last."""
    return tuple(map(summary, message.experiences)), message.next_page_token


def stats(message: service_pb2.GetStatsResponse) -> Stats:
    """Translate a server's statistics."""
    return value_of(Stats, message, buffers=tuple(map(_buffer_stats, message.buffers)))


def policy_version(message: Any) -> int | None:
    """The message's policy version; None before the first was published."""
    return cast("int | None", _optional(message, "policy_version"))


def _buffer_stats(message: service_pb2.BufferStats) -> BufferStats:
    return value_of(BufferStats, message, consumers=tuple(map(_consumer_stats, message.consumers)))


def _consumer_stats(message: service_pb2.ConsumerStats) -> ConsumerStats:
    return value_of(ConsumerStats, message, unit=UNIT.name(message.unit, "item"))


def value_of(kind: type[_Value], message: Message, **given: Any) -> _Value:
    """Fill a dataclass from the message's fields of the same names.

    What is absent is None, what is repeated a tuple.

    Args:
        kind: The dataclass.
        message: Has a field for each of its fields.
        given: Those that are something else in the message.
    """
    of = message.DESCRIPTOR.fields_by_name
    for name in (each.name for each in dataclasses.fields(kind) if each.name not in given):
        value = None
        if not of[name].has_presence or message.HasField(name):
            value = getattr(message, name)
        given[name] = tuple(value) if isinstance(value, MutableSequence) else value
    return kind(**given)


def reader_of(kind: type[_Value]) -> Callable[[Any], _Value]:
    """What fills a dataclass from a message, as `value_of` does."""
    return partial(value_of, kind)


def previous_version(message: service_pb2.PublishPolicyVersionResponse) -> int | None:
    """The policy version that was published before; None when this is the first."""
    return message.previous_version if message.HasField("previous_version") else None


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None
