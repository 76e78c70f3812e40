"""Messages to values. Pure: no I/O, no gRPC, no rule of the server's.

Most values have the fields of their messages under the same names, and words of theirs are enums of the
contract: so the messages' own descriptors say how to translate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from google.protobuf.message import Message
from google.protobuf.struct_pb2 import ListValue, Struct

from experience_buffer._arguments import as_whole, as_words, listed, refused
from experience_buffer._messages import fields
from experience_buffer._messages.batch_data import LazyPacked, LazyPayloads
from experience_buffer._messages.names import (
    ANNOTATE_REFUSAL,
    PUSH_STATUS,
    REFUSAL_REASON,
    Names,
    names_of,
)
from experience_buffer.consumer_options import (
    ConsumerConfig,
    Limiter,
    Pacing,
    Selector,
    Staleness,
)
from experience_buffer.eid import EID
from experience_buffer.history import (
    Acknowledgement,
    ConsumerTrend,
    Departure,
    DepartureCount,
    Distribution,
    HistoryEvent,
    LaterFinding,
    StepInfo,
    TrendPoint,
)
from experience_buffer.leaving_options import Archive, Retention
from experience_buffer.looking import (
    ConsumerPlace,
    GroupInfo,
    GroupMember,
    LeasedUnit,
    LeaseInfo,
    LeasePart,
)
from experience_buffer.options import AdvantageConfig, BufferConfig
from experience_buffer.outcomes import AnnotateOutcome, PushOutcome, PushResult
from experience_buffer.v1 import config_pb2, looking_pb2, service_pb2, types_pb2
from experience_buffer.values import (
    ArchiveStats,
    BufferInfo,
    BufferStats,
    ConsumerStats,
    DiskStats,
    ExperienceSummary,
    StoredExperience,
    Tombstone,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Value = TypeVar("_Value", bound="DataclassInstance")
_KINDS: Final[dict[str, type[Any]]] = {
    kind.__name__: kind
    for kind in (
        *(Archive, BufferConfig, ConsumerConfig, Limiter, Pacing, Retention, Selector, Staleness),
        *(Acknowledgement, ConsumerTrend, Departure, DepartureCount, Distribution),
        *(HistoryEvent, StepInfo, TrendPoint),
        *(ArchiveStats, BufferStats, ConsumerStats, DiskStats, ExperienceSummary),
        *(ConsumerPlace, GroupInfo, GroupMember, LeasedUnit, LeaseInfo, LeasePart),
    )
}
"""By the name that a value's class and its message share."""
_EID_INT: Final[dict[str, Any]] = {
    "least": -(10**400),
    "most": 10**400,
    "wanted": "a whole number of at most 400 digits, or text",
}
_COUNTS: Final = frozenset({"members", "votes", "batch_groups", "batch_members", "running_count"})
"""Entries of a computation that are whole numbers; in a struct every number is a float."""


def tombstones_to_messages(tombstones: Sequence[Tombstone]) -> list[types_pb2.Tombstone]:
    """Translate tombstones.

    Raises:
        InvalidRequestError: They are something else; the error names the entry and its part.
    """
    wanted = "a list of Tombstone(eid, reason)"
    if isinstance(tombstones, (Tombstone, Mapping)):
        raise refused("tombstones", tombstones, wanted)
    given = listed("tombstones", tombstones, wanted)
    return [_tombstone(each, f"tombstones[{index}]") for index, each in enumerate(given)]


def _tombstone(tombstone: Tombstone, where: str) -> types_pb2.Tombstone:
    if not isinstance(tombstone, Tombstone):
        raise refused(where, tombstone, "Tombstone(eid, reason)")
    eid, message = tombstone.eid, types_pb2.Tombstone()
    if not isinstance(eid, EID):
        raise refused(f"{where}.eid", eid, "EID(batch=..., task=..., run=...)")
    parts = eid.to_dict()
    for name in ("batch", "task"):
        if isinstance(parts[name], int):
            number = as_whole(f"{where}.eid.{name}", parts[name], **_EID_INT)
            parts[name] = str(number)
    fields.fill(message.id, parts, f"{where}.eid.")
    message.reason = as_words(f"{where}.reason", tombstone.reason)
    return message


def uid_of(message: types_pb2.ExperienceId) -> str:
    """The uid of an identity."""
    parts = (message.batch, message.task, message.run, message.step, message.suffix)
    return "/".join(map(str, parts))


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
    computation = _computation(message.computation) if has_computation else None
    later = tuple(
        LaterFinding(
            time=one.time,
            reward=one.reward if one.HasField("reward") else None,
            info=struct_to_dict(one.info),
            tensors=one.tensors,
        )
        for one in message.later
    )
    return value_of(StoredExperience, message, computation=computation, later=later)


def _computation(message: Struct) -> dict[str, Any]:
    return {
        name: _counted(value) if name in _COUNTS else value
        for name, value in struct_to_dict(message).items()
    }


def _counted(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def group(message: Any) -> GroupInfo:
    """Translate the group that an answer describes."""
    return value_of(GroupInfo, message.group)


def buffer(message: Any) -> BufferInfo:
    """Translate the buffer that an answer describes."""
    return value_of(BufferInfo, message.buffer)


def buffers(message: service_pb2.ListBuffersResponse) -> tuple[BufferInfo, ...]:
    """Translate all buffers that an answer describes."""
    return tuple(value_of(BufferInfo, each) for each in message.buffers)


def page_of(field: str) -> Callable[[Any], tuple[tuple[Any, ...], str]]:
    """What reads one page of values from a response's field, and the next page's token."""

    def read(message: Any) -> tuple[tuple[Any, ...], str]:
        return tuple(map(_part, getattr(message, field))), message.next_page_token

    return read


page: Final[Callable[[Any], tuple[tuple[ExperienceSummary, ...], str]]] = page_of("experiences")
"""Reads one page of summaries; the next page's token is empty after the last."""


def steps(message: looking_pb2.ListStepsResponse) -> tuple[StepInfo, ...]:
    """Translate the training steps that an answer describes."""
    return tuple(map(_part, message.steps))


def policy_version(message: Any) -> int | None:
    """The message's policy version; None before the first was published."""
    return cast("int | None", _optional(message, "policy_version"))


def value_of(kind: type[_Value], message: Message, **given: Any) -> _Value:
    """Fill a dataclass from the message's fields of the same names.

    What is absent, and a word that a newer server added, is the dataclass's default. Where it has none,
    what is absent is None, and the word the first of its kind. What is repeated is a tuple.

    Args:
        kind: The dataclass.
        message: Has a field for each of its fields.
        given: Those that are something else in the message.
    """
    for field in _fields_of(kind, message.DESCRIPTOR):
        name = field.name
        if name in given:
            continue
        value: Any = None
        if not field.has_presence or message.HasField(name):
            value = getattr(message, name)
        if field.words is not None and value is not None:
            value = field.words.name(value, field.unknown_word) or None
        elif field.is_repeated:
            value = tuple(map(_part, value) if field.is_message else value)
        elif field.is_message and value is not None:
            value = _part(value)
        if field.is_required or value not in (None, ()):
            given[name] = value
    return kind(**given)


class _Field(NamedTuple):
    """How one field of a message becomes one of a dataclass."""

    name: str
    is_required: bool
    """The dataclass has no default for it."""
    has_presence: bool
    is_repeated: bool
    is_message: bool
    words: Names | None
    """Where its values have words."""
    unknown_word: str
    """For a value that a newer server added."""


@cache
def _fields_of(kind: type[DataclassInstance], descriptor: Any) -> tuple[_Field, ...]:
    """What `value_of` has to know, found out once: an answer may hold thousands of messages of a kind."""
    found = []
    for each in dataclasses.fields(kind):
        of = descriptor.fields_by_name.get(each.name)
        if of is None:
            continue  # It is given.
        is_required = each.default is dataclasses.MISSING
        words = None if of.enum_type is None or of.is_repeated else names_of(of.enum_type)
        unknown = next(iter(words.by_name)) if words is not None and is_required else ""
        is_message = of.message_type is not None
        found.append(
            _Field(
                each.name, is_required, of.has_presence, of.is_repeated, is_message, words, unknown
            )
        )
    return tuple(found)


def _part(value: Any) -> Any:
    """The value of a message within one; of a field that is none, what it is."""
    if isinstance(value, Struct):
        return _computation(value)
    if isinstance(value, config_pb2.AdvantageConfig):
        return AdvantageConfig(value.estimator, struct_to_dict(value.parameters))
    return value_of(_KINDS[value.DESCRIPTOR.name], value) if isinstance(value, Message) else value


def reader_of(kind: type[_Value]) -> Callable[[Any], _Value]:
    """What fills a dataclass from a message, as `value_of` does."""
    return partial(value_of, kind)


def previous_version(message: service_pb2.PublishPolicyVersionResponse) -> int | None:
    """The policy version that was published before; None when this is the first."""
    return message.previous_version if message.HasField("previous_version") else None


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None
