"""Between the contract's messages and the server's values. No rules, no state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from experience_buffer import errors
from experience_buffer._codec import payload as payload_codec
from experience_buffer._messages.names import ANNOTATE_REFUSAL, STATE, UNIT
from experience_buffer.eid import EID
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.priorities import PriorityUpdate, check_count
from experience_buffer_server.buffer.intake.annotation import (
    AnnotateOutcome,
    Annotation,
)
from experience_buffer_server.buffer.state.experience_states import ExperienceState
from experience_buffer_server.buffer.state.group_table import Entry
from experience_buffer_server.buffer.stats import BufferStats
from experience_buffer_server.rpc.struct_values import StructValueError, plain_entries
from experience_buffer_server.sampling.leases import Lease

_Message = TypeVar("_Message", bound=Message)
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
        state=state_number(buffer.state_of(entry)),
        reward=record.reward,
        response_tokens=record.response_tokens,
        payload_bytes=record.payload_bytes,
        min_policy_version=record.min_version,
        max_policy_version=record.max_version,
        push_time=record.push_time,
        message=buffer.kept_from(entry),
        priority=record.priority,
        generation=record.generation,
    )


def priorities_from(messages: Sequence[service_pb2.PriorityUpdate]) -> list[PriorityUpdate]:
    """New priorities, as asked for.

    Raises:
        InvalidRequestError: More than a call may have: nothing is made of them.
    """
    check_count(len(messages))
    return [
        PriorityUpdate(uid=one.uid, priority=one.priority, generation=one.generation)
        for one in messages
    ]


def state_number(state: ExperienceState) -> types_pb2.ExperienceState.ValueType:
    """The number that stands for where an experience is."""
    number: types_pb2.ExperienceState.ValueType = STATE.by_name[state]
    return number


def stats_message(stats: BufferStats) -> service_pb2.BufferStats:
    """The state of one buffer."""
    consumers = [
        filled(service_pb2.ConsumerStats, consumer, unit=UNIT.by_name[consumer.unit])
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
        message.refusal = ANNOTATE_REFUSAL.by_name[outcome.reason]
    return message
