"""Responses to pushes, read by protobuf."""

from __future__ import annotations

import pytest

from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer.intake.push_reading import Outcome, PushStatus
from experience_buffer_server.buffer.state.entries import Reason
from experience_buffer_server.rpc.push_codec import Pushed, write_push, write_push_stream

STATUS = {
    PushStatus.STORED: types_pb2.PUSH_STATUS_STORED,
    PushStatus.DUPLICATE: types_pb2.PUSH_STATUS_DUPLICATE,
    PushStatus.REFUSED: types_pb2.PUSH_STATUS_REFUSED,
}
REASON: dict[Reason | None, types_pb2.RefusalReason.ValueType] = {
    reason: types_pb2.RefusalReason.Value(f"REFUSAL_REASON_{reason.name}") for reason in Reason
}
REASON[None] = types_pb2.REFUSAL_REASON_UNSPECIFIED


def message(pushed: Pushed) -> service_pb2.PushResponse:
    """The response as protobuf would write it."""
    return service_pb2.PushResponse(
        outcomes=[
            types_pb2.PushOutcome(
                index=index,
                uid=outcome.uid,
                status=STATUS[outcome.status],
                reason=REASON[outcome.reason],
                message=outcome.message,
            )
            for index, outcome in enumerate(pushed.outcomes)
        ],
        policy_version=pushed.policy_version,
    )


def outcomes(*, num: int, length: int) -> list[Outcome]:
    """Stored ones, with uids of this many bytes."""
    return [Outcome(f"{place:0{length}d}", PushStatus.STORED) for place in range(num)]


@pytest.mark.parametrize("version", [None, 0, 5, -3])
@pytest.mark.parametrize("length", [1, 110, 115, 116, 117, 118, 119, 120, 127, 128, 400])
@pytest.mark.parametrize("num", [0, 1, 3, 300])
def test_what_is_stored_reads_as_protobuf_writes_it(
    num: int, length: int, version: int | None
) -> None:
    pushed = Pushed(outcomes(num=num, length=length), version)
    assert write_push(pushed) == message(pushed).SerializeToString()


def test_all_that_can_become_of_an_item() -> None:
    """Of each kind at the first place, and at one that takes two bytes."""
    each = [
        Outcome("", PushStatus.REFUSED, Reason.INVALID, "what was wrong \u00e4"),
        Outcome("b\u00e4tch/1/0/0", PushStatus.STORED),
        Outcome("", PushStatus.STORED),
        Outcome("a/1/0/0", PushStatus.DUPLICATE),
        *(Outcome("a/2/0/0", PushStatus.REFUSED, reason, "x" * 500) for reason in Reason),
    ]
    for first in range(len(each)):
        turned = each[first:] + each[:first]
        pushed = Pushed(turned * 20, 7)
        assert write_push(pushed) == message(pushed).SerializeToString()


@pytest.mark.parametrize("sequence", [0, 1, 127, 128, 2**63])
def test_on_a_stream_a_response_comes_with_its_number(sequence: int) -> None:
    for num in (0, 1, 1_000):
        pushed = Pushed(outcomes(num=num, length=20), 3)
        written = service_pb2.PushStreamResponse(sequence=sequence, response=message(pushed))
        assert write_push_stream(sequence, pushed) == written.SerializeToString()
