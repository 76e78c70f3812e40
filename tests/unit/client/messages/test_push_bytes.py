"""Requests written without protobuf, read by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from experience_buffer import EID, Experience, PushResult, Tombstone, trxp
from experience_buffer._messages import convert, push_bytes
from experience_buffer._messages.calls import Call
from experience_buffer._messages.push_plan import Push
from experience_buffer._transport.push_queue import Request
from experience_buffer.options import ClientOptions
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1 import types_pb2

PAYLOADS = st.lists(st.lists(st.binary(max_size=300), max_size=3), min_size=1, max_size=4)


@given(
    sequence=st.integers(0, 2**64 - 1),
    group_size=st.integers(0, 2**32 - 1),
    buffer=st.text(st.characters(codec="utf-8"), max_size=9),
    reasons=st.lists(st.text(st.characters(codec="utf-8"), max_size=9), max_size=2),
    payloads=PAYLOADS,
)
@example(2**64 - 1, 7, "math", ["gone"], [[bytes(127)], [bytes(128)]])
@example(0, 0, "", [], [[]])
def test_protobuf_reads_what_was_meant(
    sequence: int, group_size: int, buffer: str, reasons: list[str], payloads: list[list[bytes]]
) -> None:
    eid = EID("b", 1, 2, 3, "f")
    expected = pb.PushRequest(
        buffer=buffer,
        payload=b"".join(payloads[0]),
        payloads=map(b"".join, payloads[1:]),
        group_size=group_size,
    )
    for reason in reasons:
        tombstone = expected.tombstones.add(reason=reason)
        tombstone.id.batch, tombstone.id.task, tombstone.id.run = "b", "1", 2
        tombstone.id.step, tombstone.id.suffix = 3, "f"
    fields = push_bytes.push_fields(
        buffer=buffer,
        group_size=group_size,
        tombstones=convert.tombstones_to_messages([Tombstone(eid, each) for each in reasons]),
    )
    views = [[memoryview(piece) for piece in pieces] for pieces in payloads]
    written = push_bytes.push_request(fields, views)
    assert pb.PushRequest.FromString(written) == expected
    streamed = pb.PushStreamRequest.FromString(
        push_bytes.push_stream_request(sequence, fields, payloads)
    )
    assert streamed == pb.PushStreamRequest(sequence=sequence, push=expected)


@pytest.mark.parametrize("num_bytes", [0, 1, 127, 128, 2**14 - 1, 2**14, 2**21 - 1, 2**21])
def test_lengths_around_each_step_of_their_spelling(num_bytes: int) -> None:
    payload = b"x" * num_bytes
    request = Request(1 << 35, b"", [payload, payload], range(2), 2 * num_bytes)
    found = pb.PushStreamRequest.FromString(request.message())
    assert found.sequence == 1 << 35
    assert (found.push.payload, list(found.push.payloads)) == (payload, [payload])


def rollout(run: int) -> Experience:
    return Experience(
        eid=EID(1, 2, run),
        tokens=torch.arange(7) + run,
        prompt_length=3,
        extra={"e": torch.zeros(0)},
    )


def request_of(call: Call[PushResult] | None) -> pb.PushRequest:
    assert call is not None
    assert isinstance(call.request, bytes)
    return pb.PushRequest.FromString(call.request)


def test_a_split_push_is_what_was_given_in_order() -> None:
    pushed = [rollout(run) for run in range(7)]
    tombstones = [Tombstone(EID(1, 2, run), "gone") for run in range(7, 11)]
    options = ClientOptions(max_push_items=3)
    push = Push(pushed, tombstones, options, buffer="math", group_size=11)
    pushes = list(iter(push.next_call, None))
    requests = [request_of(push) for push in pushes]
    assert {(one.buffer, one.group_size) for one in requests} == {("math", 11)}
    sizes = (3, 3, 1, 3, 1)
    answers = [pb.PushResponse(outcomes=[types_pb2.PushOutcome()] * size) for size in sizes]
    for call, answer in zip(pushes, answers, strict=True):
        assert call is not None
        push.answered(call.parse(answer))
    assert [each.index for each in push.result().outcomes] == list(range(11))
    assert [one.payload for one in requests] == [
        trxp.encode(pushed[:3]),
        trxp.encode(pushed[3:6]),
        trxp.encode(pushed[6:]),
        b"",
        b"",
    ]
    dead = [tombstone.id.run for one in requests for tombstone in one.tombstones]
    assert dead == [7, 8, 9, 10]


def test_a_raw_payload_is_sent_as_it_is_with_all_tombstones() -> None:
    raws: list[Any] = [b"raw", bytearray(b"raw"), memoryview(b"r.a.w")[::2]]
    for raw in raws:
        push = Push(
            raw,
            [Tombstone(EID(), "gone")] * 3,
            ClientOptions(max_push_items=2),
            buffer="b",
            group_size=0,
        )
        call = push.next_call()
        request = request_of(call)
        assert (request.payload, len(request.tombstones)) == (b"raw", 3)
        answer = pb.PushResponse(
            outcomes=[types_pb2.PushOutcome(index=7, uid="a", status=types_pb2.PUSH_STATUS_STORED)]
        )
        assert call is not None
        [outcome] = call.parse(answer).outcomes
        assert (outcome.index, outcome.status) == (7, "stored"), "the index is the server's"
