"""Pushes on the wire: requests are read from bytes, responses written, as protobuf does both."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer.intake.push_reading import Outcome, PushStatus
from experience_buffer_server.buffer.state.entries import Reason
from experience_buffer_server.rpc import push_codec
from experience_buffer_server.rpc.push_codec import (
    Pushed,
    PushRequest,
    read_push,
    read_push_stream,
    write_push,
    write_push_stream,
)
from tests.fuzz import mutations

MAX_PAYLOADS = 31

tombstones = st.builds(
    types_pb2.Tombstone, id=st.builds(types_pb2.ExperienceId, batch=st.text()), reason=st.text()
)
pushes = st.builds(
    service_pb2.PushRequest,
    buffer=st.text(max_size=200),
    payload=st.binary(max_size=300),
    tombstones=st.lists(tombstones, max_size=3),
    group_size=st.integers(0, 2**32 - 1),
    payloads=st.lists(st.binary(max_size=300), max_size=5),
)
streamed = st.builds(service_pb2.PushStreamRequest, sequence=st.integers(0, 2**64 - 1), push=pushes)
numbers = st.integers(0, 2**64 - 1) | st.sampled_from((0, 1, 127, 128, 2**28 - 1, 2**28, 2**31))


def varint(value: int, *, padding: int = 0) -> bytes:
    """A number as protobuf writes it, or longer."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    for _ in range(padding):
        data[-1] |= 0x80
        data.append(0)
    return bytes(data)


@st.composite
def fields(draw: st.DrawFn) -> bytes:
    """One field on the wire: known or not, of any type, sometimes longer than need be, or broken."""
    number, wire_type = draw(st.integers(0, 7)), draw(st.integers(0, 7) | st.sampled_from((0, 2)))
    padding = draw(st.sampled_from((0, 0, 0, 1, 3, 9)))
    tag = varint(number << 3 | wire_type, padding=draw(st.sampled_from((0, 0, 0, 1, 5))))
    if wire_type == 0:
        return tag + varint(draw(numbers), padding=padding)
    if wire_type == 2:
        content = draw(st.binary(max_size=20) | st.text(max_size=9).map(str.encode))
        length = max(len(content) + draw(st.sampled_from((0, 0, 0, 0, 1, -1, 2**31))), 0)
        return tag + varint(length, padding=padding) + content
    return tag + draw(st.binary(max_size=9))


def as_read(request: PushRequest) -> tuple[Any, ...]:
    payloads = [bytes(payload) for payload in request.payloads]
    return request.buffer, payloads, list(request.tombstones), request.group_size


def as_parsed(message: service_pb2.PushRequest) -> tuple[Any, ...]:
    payloads = [payload for payload in (message.payload, *message.payloads) if payload]
    return message.buffer, payloads, list(message.tombstones), message.group_size


def outcome(read: Callable[[], Any]) -> Any:
    """What reading gives, or the words of the refusal."""
    try:
        return read()
    except DecodeError as error:
        return str(error)


def compare(data: bytes) -> None:
    """Both kinds of requests are read, or refused, as protobuf does."""
    parsed = outcome(lambda: as_parsed(service_pb2.PushRequest.FromString(data)))
    assert outcome(lambda: as_read(read_push(data, max_payloads=MAX_PAYLOADS))) == parsed
    compare_streamed(data)
    compare_streamed(b"\x08\x07\x12" + varint(len(data)) + data)


def compare_streamed(data: bytes) -> None:
    def parse() -> tuple[Any, ...]:
        message = service_pb2.PushStreamRequest.FromString(data)
        return message.sequence, as_parsed(message.push)

    def read() -> tuple[Any, ...]:
        request = read_push_stream(data, max_payloads=MAX_PAYLOADS)
        return request.sequence, as_read(request.push)

    assert outcome(read) == outcome(parse)


@given(pushes, pushes)
def test_what_is_written_is_read(
    first: service_pb2.PushRequest, then: service_pb2.PushRequest
) -> None:
    compare(first.SerializeToString())
    # Two messages one after the other are one: the last value counts, or lists go on.
    compare(first.SerializeToString() + then.SerializeToString())


@given(streamed, streamed)
def test_what_is_streamed_is_read(
    first: service_pb2.PushStreamRequest, then: service_pb2.PushStreamRequest
) -> None:
    compare_streamed(first.SerializeToString())
    compare_streamed(first.SerializeToString() + then.SerializeToString())


@given(st.integers(0, 2**64 - 1), st.floats(), pushes)
@example(7, 0.0, service_pb2.PushRequest())
def test_a_field_that_is_no_more_may_lie_anywhere(
    sequence: int, seconds: float, push: service_pb2.PushRequest
) -> None:
    """Older clients say in it for how long they wait."""
    old = struct.pack("<Bd", 3 << 3 | 1, seconds)
    numbers = service_pb2.PushStreamRequest(sequence=sequence).SerializeToString() + old
    rest = service_pb2.PushStreamRequest(push=push).SerializeToString()
    for data in (numbers + rest, rest + numbers, numbers, rest):
        compare_streamed(data)
        compare_streamed(data[:-1])


@given(st.lists(fields(), max_size=6).map(b"".join))
@example(b"\x12")
@example(b"\x12\x80")
@example(b"\x12\x02a")
@example(b"\x12\x81\x00a")
@example(b"\x12\x81\x80\x80\x80\x00a")
@example(b"\x12\x81\x80\x80\x80\x80\x00a")
@example(b"\x92\x00\x01a")
@example(b"\x0a\x01\xff")
@example(b"\x20\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(b"\x20\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01")
@example(b"\x2b\x12\x01a\x2c")
@example(b"\x00\x01")
def test_any_fields_are_read_as_protobuf_reads_them(data: bytes) -> None:
    compare(data)


@given(pushes, st.randoms(use_true_random=False))
def test_what_is_damaged_is_read_or_refused_as_protobuf_does(
    push: service_pb2.PushRequest, rng: random.Random
) -> None:
    compare(mutations.of_bytes(push.SerializeToString(), rng))


def test_payloads_are_views_of_the_request() -> None:
    push = service_pb2.PushRequest(buffer="b", payload=b"first", payloads=[b"", b"second"])
    data = service_pb2.PushStreamRequest(sequence=3, push=push).SerializeToString()
    read = read_push_stream(data, max_payloads=MAX_PAYLOADS)
    views = [payload for payload in read.push.payloads if isinstance(payload, memoryview)]
    assert [view.obj is data for view in views] == [True, True]
    assert [bytes(view) for view in views] == [b"first", b"second"]
    assert read.push.num_bytes == push.ByteSize()


def test_very_many_fields_are_left_to_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    data = service_pb2.PushRequest(payloads=[b"a"] * 37).SerializeToString()
    assert len(read_push(data, max_payloads=MAX_PAYLOADS).payloads) == 37
    monkeypatch.setattr(push_codec, "_MAX_FIELDS", 36)
    read = read_push(data, max_payloads=37)
    assert [type(payload) for payload in read.payloads] == [bytes] * 37
    with pytest.raises(DecodeError, match="37 payloads, 36 are allowed"):
        read_push(data, max_payloads=36)


def test_no_more_payloads_lie_in_shared_memory_than_a_push_may_have() -> None:
    spans = [types_pb2.MemorySpan(offset=number, num_bytes=1) for number in range(37)]
    data = service_pb2.PushStreamRequest(sequence=7, spans=spans).SerializeToString()
    read = read_push_stream(data, max_payloads=37)
    assert [span.offset for span in read.spans] == list(range(37))
    with pytest.raises(DecodeError, match="37 spans, 36 payloads are allowed"):
        read_push_stream(data, max_payloads=36)


# --- responses


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
def test_stored_ones_read_as_protobuf_writes_them(
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
