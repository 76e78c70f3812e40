"""Between the contract's messages and the server's values. No rules, no state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast

from google.protobuf import message_factory, struct_pb2
from google.protobuf.message import Message

from experience_buffer import errors
from experience_buffer._codec import payload as payload_codec
from experience_buffer._messages.names import ANNOTATE_REFUSAL, STATE, UNIT, Names, names_of
from experience_buffer.looking import ExperienceState
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.priorities import PriorityUpdate, check_count
from experience_buffer_server.buffer.intake.annotation import AnnotateOutcome, Annotation
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.buffer.stats import BufferStats
from experience_buffer_server.sampling.leases import Lease

_Message = TypeVar("_Message", bound=Message)
_WHOLE: Final = frozenset({"num_turns", "model_version", "version_start", "version_end"})
"""Entries of `info` that are whole numbers; on the wire every number is a float."""
MAX_DEPTH: Final = 32
"""Levels of lists and structs within one another; protobuf's own limit lies at about 33."""
_MAX_NAME: Final = 80


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
    return filled(
        types_pb2.ExperienceSummary,
        record,
        state=state_number(buffer.state_of(entry)),
        min_policy_version=record.min_version,
        max_policy_version=record.max_version,
        message=buffer.kept_from(entry),
        group="" if entry.group is None else entry.group.row.key,
        staleness=buffer.staleness(entry),
        magnitude=buffer.magnitude(entry),
        truncated=entry.truncated,
        departure_reason="",
        departure_time=None,
        places=[message_of(types_pb2.ConsumerPlace, one) for one in buffer.places_of(entry)],
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
    archive = stats.archive and message_of(service_pb2.ArchiveStats, stats.archive)
    return filled(service_pb2.BufferStats, stats, consumers=consumers, archive=archive)


def filled(kind: type[_Message], source: object, **given: Any) -> _Message:
    """A message whose fields are the attributes of the same names; None leaves one absent.

    Args:
        kind: The message's class.
        source: Has an attribute for each of its fields.
        given: Those that are something else in the source.
    """
    names = set(kind.DESCRIPTOR.fields_by_name) - given.keys()
    return kind(**given, **{name: getattr(source, name) for name in names})


def message_of(kind: type[_Message], value: Any) -> _Message:
    """The message of a value that has a field of the same name and kind for each of its own.

    What is None is absent; values within one become messages, and words numbers.
    """
    given = {}
    for field in _fields_of(cast("Any", kind)):
        of_field = getattr(value, field.name)
        if of_field is None:
            continue
        if field.words is not None:
            of_field = field.words.by_name[of_field]
        elif field.part is not None and not isinstance(of_field, dict):
            if field.is_repeated:
                of_field = [message_of(field.part, each) for each in of_field]
            else:
                of_field = message_of(field.part, of_field)
        given[field.name] = of_field
    return kind(**given)


class _Field(NamedTuple):
    """What a message's field holds."""

    name: str
    words: Names | None
    """Where its values have words."""
    part: type[Message] | None
    """Where it holds messages."""
    is_repeated: bool


@cache
def _fields_of(kind: type[Message]) -> tuple[_Field, ...]:
    """What `message_of` has to know, found out once: an answer may hold thousands of messages."""
    return tuple(
        _Field(
            name,
            None if field.enum_type is None else names_of(field.enum_type),
            None if part is None else message_factory.GetMessageClass(part),
            field.is_repeated,
        )
        for name, field in kind.DESCRIPTOR.fields_by_name.items()
        for part in [cast("Any", field.message_type)]
    )


def annotation_from(message: service_pb2.Annotation) -> Annotation:
    """What is added to an experience; one that can't be read says why in `problem`."""
    try:
        tensors = payload_codec.read_tensors(message.tensors) if message.tensors else {}
        info = _entries(message.info, ("info",))
    except (errors.TrxpError, errors.InvalidRequestError) as error:
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


_Path: TypeAlias = tuple[str | int, ...]
"""Where a value is: what the struct is called, then a name or a place for each level."""


def _entries(message: struct_pb2.Struct, path: _Path) -> dict[str, Any]:
    """Read a struct's entries; every number is a float.

    Raises:
        InvalidRequestError: A number isn't finite, or the nesting is deeper than `MAX_DEPTH`.
    """
    _check_depth(path)
    return {name: _plain(value, (*path, name)) for name, value in message.fields.items()}


def _plain(value: struct_pb2.Value, path: _Path) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":
            if not math.isfinite(value.number_value):
                raise _refused(path, f"is {value.number_value}; send a finite number")
            return value.number_value
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "list_value":
            _check_depth(path)
            return [_plain(one, (*path, i)) for i, one in enumerate(value.list_value.values)]
        case "struct_value":
            return _entries(value.struct_value, path)
        case _:
            return None


def _check_depth(path: _Path) -> None:
    if len(path) > MAX_DEPTH:
        raise _refused(path, f"is nested deeper than {MAX_DEPTH} levels; send flatter data")


def _refused(path: _Path, reason: str) -> errors.InvalidRequestError:
    label, *steps = path
    shown = (step[:_MAX_NAME] if isinstance(step, str) else step for step in steps)
    return errors.InvalidRequestError(f"{label}{''.join(f'[{step!r}]' for step in shown)} {reason}")
