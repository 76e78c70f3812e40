"""Responses to pushes as the bytes that go over the wire.

Nearly all of what was pushed is stored, and its outcome says no more than the uid. That takes a third
of the time without a message; and the memory of messages is what protobuf counts to see when it
returns all free memory to the kernel, from where the next pushes would have to get it page by page (see
`memory.keep_large_blocks`). protobuf writes everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from experience_buffer._varint import varint
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.admission import Reason
from experience_buffer_server.arrival import Outcome, PushStatus

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
    Reason.FUTURE_VERSION: types_pb2.REFUSAL_REASON_FUTURE_VERSION,
}
_ONE_BYTE: Final = 0x7F
"""The largest number that the wire writes as one byte."""


def _tag(message: Any, field: str, *, wire_type: int) -> int:
    number: int = message.DESCRIPTOR.fields_by_name[field].number
    return number << 3 | wire_type


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
    written = _message(index, outcome).SerializeToString()
    return b"%c%b%b" % (_OUTCOMES, varint(len(written)), written)


def _message(index: int, outcome: Outcome) -> types_pb2.PushOutcome:
    message = types_pb2.PushOutcome(index=index, uid=outcome.uid, status=_STATUS[outcome.status])
    if outcome.reason is not None:
        message.reason = _REASON[outcome.reason]
        message.message = outcome.message
    return message
