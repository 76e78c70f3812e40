"""Push requests read from the bytes that came, without copying their payloads.

A payload is most of its request. protobuf copies it when it parses the request, and again when it is
asked for; here it is cut out as a view, and protobuf reads what is left. Only what senders usually
write is cut: whatever else is in a request, or wrong with it, protobuf reads all of it and decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from experience_buffer._messages.names import PUSH_STATUS, REFUSAL_REASON
from experience_buffer._messages.sample_bytes import varint
from experience_buffer.eid import EID
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer.intake.push_reading import Outcome, Push, PushStatus

_LENGTH_DELIMITED: Final = 2


def _tag(message: type[Any], field: str, *, wire_type: int = _LENGTH_DELIMITED) -> int:
    number: int = message.DESCRIPTOR.fields_by_name[field].number
    return number << 3 | wire_type


_PAYLOAD: Final = _tag(service_pb2.PushRequest, "payload")
_PAYLOADS: Final = _tag(service_pb2.PushRequest, "payloads")
_LENGTH_FIRST: Final = (
    _PAYLOADS,
    _PAYLOAD,
    _tag(service_pb2.PushRequest, "buffer"),
    _tag(service_pb2.PushRequest, "tombstones"),
)
_GROUP_SIZE: Final = _tag(service_pb2.PushRequest, "group_size", wire_type=0)
_SEQUENCE: Final = _tag(service_pb2.PushStreamRequest, "sequence", wire_type=0)
_PUSH: Final = _tag(service_pb2.PushStreamRequest, "push")
_MAX_LENGTH_BYTES: Final = 4
_MAX_NUMBER_BYTES: Final = 9
"""A number of ten bytes may exceed 64 bits: that is protobuf's to read."""
_MAX_FIELDS: Final = 16_384
"""In a request with more of them protobuf takes less time for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRequest:
    """What a `PushRequest` message says."""

    buffer: str
    payloads: Sequence[bytes | memoryview]
    """None of them empty; views keep all of the request in memory."""
    tombstones: Sequence[types_pb2.Tombstone]
    group_size: int
    num_bytes: int
    """Of the request."""
    is_lent: bool = False
    """Whether the payloads lie in memory that the sender can still change; see `push_reading`."""

    def push(self) -> Push:
        """What the buffer is to store."""
        return Push(
            payloads=self.payloads,
            tombstones=[
                (
                    EID(
                        batch=failed.id.batch,
                        task=failed.id.task,
                        run=failed.id.run,
                        step=failed.id.step,
                        suffix=failed.id.suffix,
                    ),
                    failed.reason or "no reason given",
                )
                for failed in self.tombstones
            ],
            group_size=self.group_size,
            is_lent=self.is_lent,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PushStreamRequest:
    """What a `PushStreamRequest` message says."""

    sequence: int
    push: PushRequest
    asked: types_pb2.MemoryRequest | None = None
    """It asks for shared memory, and is no push."""
    spans: Sequence[types_pb2.MemorySpan] = ()
    """Payloads in shared memory, behind those of the push."""


def read_push(data: bytes, *, max_payloads: int) -> PushRequest:
    """Read a `PushRequest`.

    Raises:
        DecodeError: It is none, or has more payloads than a push may have, where only counting them
            has become costly.
    """
    found = _split_push(memoryview(data))
    if found is not None:
        return found
    return _converted(service_pb2.PushRequest.FromString(data), len(data), max_payloads)


def read_push_stream(data: bytes, *, max_payloads: int) -> PushStreamRequest:
    """Read a `PushStreamRequest`.

    Raises:
        DecodeError: It is none, or has too many payloads, as above.
    """
    found = _split_push_stream(memoryview(data))
    if found is not None:
        return found
    message = service_pb2.PushStreamRequest.FromString(data)
    push = _converted(message.push, len(data), max_payloads)
    if len(message.spans) > max_payloads:
        raise DecodeError(f"{len(message.spans)} spans, {max_payloads} payloads are allowed")
    return PushStreamRequest(
        sequence=message.sequence,
        push=push,
        asked=message.memory if message.HasField("memory") else None,
        spans=message.spans,
    )


def _split_push_stream(view: memoryview) -> PushStreamRequest | None:
    """A request of its number, and of a push that goes up to the end; None for any other."""
    sequence, start, end = 0, 0, len(view)
    if start < end and view[start] == _SEQUENCE:
        sequence, start = _number(view, 1, _MAX_NUMBER_BYTES)
        if not start:
            return None
    if start == end or view[start] != _PUSH:
        return None
    length, start = _number(view, start + 1, _MAX_LENGTH_BYTES)
    if not start or start + length != end:
        return None
    push = _split_push(view[start:])
    if push is None:
        return None
    return PushStreamRequest(sequence=sequence, push=push)


def _split_push(view: memoryview) -> PushRequest | None:
    """A request without its payloads, and these; None where protobuf should read all of it."""
    payload = view[:0]
    payloads: list[memoryview] = []
    rest: list[memoryview] = []
    start, end, num_fields = 0, len(view), 0
    while start < end:
        tag, num_fields = view[start], num_fields + 1
        if tag == _GROUP_SIZE:
            _, stop = _number(view, start + 1, _MAX_NUMBER_BYTES)
            first = start
        elif tag in _LENGTH_FIRST:
            length, first = _number(view, start + 1, _MAX_LENGTH_BYTES)
            stop = first and first + length
        else:
            return None
        if not stop or stop > end or num_fields > _MAX_FIELDS:
            return None
        if tag == _PAYLOAD:
            payload = view[first:stop]
        elif tag != _PAYLOADS:
            rest.append(view[start:stop])
        elif first < stop:
            payloads.append(view[first:stop])
        start = stop
    try:
        message = service_pb2.PushRequest.FromString(b"".join(rest))
    except DecodeError:
        return None
    return PushRequest(
        buffer=message.buffer,
        payloads=[payload, *payloads] if payload else payloads,
        tombstones=message.tombstones,
        group_size=message.group_size,
        num_bytes=end,
    )


def _number(view: memoryview, start: int, max_bytes: int) -> tuple[int, int]:
    """The number that begins at `start`, and where it ends; 0 where it is cut off or too long."""
    value = 0
    for place, byte in enumerate(view[start : start + max_bytes]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, start + place + 1
    return 0, 0


def _converted(message: service_pb2.PushRequest, num_bytes: int, max_payloads: int) -> PushRequest:
    """A request that protobuf has read.

    Raises:
        DecodeError: It has too many payloads.
    """
    if len(message.payloads) > max_payloads:
        raise DecodeError(f"{len(message.payloads)} payloads, {max_payloads} are allowed")
    return PushRequest(
        buffer=message.buffer,
        payloads=list(filter(None, (message.payload, *message.payloads))),
        tombstones=message.tombstones,
        group_size=message.group_size,
        num_bytes=num_bytes,
    )


_ONE_BYTE: Final = 0x7F
"""The largest number that the wire writes as one byte."""
_OUTCOMES: Final = _tag(service_pb2.PushResponse, "outcomes", wire_type=2)
_INDEX: Final = _tag(types_pb2.PushOutcome, "index", wire_type=0)
_UID: Final = _tag(types_pb2.PushOutcome, "uid", wire_type=2)
_IS_STORED: Final = types_pb2.PushOutcome(status=types_pb2.PUSH_STATUS_STORED).SerializeToString()
_RESPONSE: Final = _tag(service_pb2.PushStreamResponse, "response", wire_type=2)


class Pushed(NamedTuple):
    """What became of a push."""

    outcomes: Sequence[Outcome]
    """One per item."""
    policy_version: int | None
    """The published one; None before the first."""


def write_push(pushed: Pushed) -> bytes:
    """A `PushResponse`."""
    rest = service_pb2.PushResponse(policy_version=pushed.policy_version).SerializeToString()
    outcomes = [_outcome(index, outcome) for index, outcome in enumerate(pushed.outcomes)]
    return b"".join([*outcomes, rest])


def write_push_stream(sequence: int, pushed: Pushed) -> bytes:
    """A `PushStreamResponse` to a push that was read.

    Args:
        sequence: The request's.
        pushed: What became of it.
    """
    head = service_pb2.PushStreamResponse(sequence=sequence).SerializeToString()
    response = write_push(pushed)
    return b"%b%c%b%b" % (head, _RESPONSE, varint(len(response)), response)


def _outcome(index: int, outcome: Outcome) -> bytes:
    """One of the `outcomes` of a `PushResponse`."""
    uid = outcome.uid.encode()
    if outcome.status is PushStatus.STORED and index > 0 and 0 < len(uid) <= _ONE_BYTE:
        place = varint(index)
        size = 3 + len(place) + len(uid) + len(_IS_STORED)
        if size <= _ONE_BYTE:
            return b"%c%c%c%b%c%c%b%b" % (
                _OUTCOMES, size, _INDEX, place, _UID, len(uid), uid, _IS_STORED,
            )  # fmt: skip
    message = types_pb2.PushOutcome(
        index=index, uid=outcome.uid, status=PUSH_STATUS.by_name[outcome.status]
    )
    if outcome.reason is not None:
        message.reason = REFUSAL_REASON.by_name[outcome.reason]
        message.message = outcome.message
    written = message.SerializeToString()
    return b"%c%b%b" % (_OUTCOMES, varint(len(written)), written)
