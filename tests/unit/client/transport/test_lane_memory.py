"""Pushes of a lane: what goes on its stream, what of it lies in shared memory, and until when."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from experience_buffer._messages import push_bytes
from experience_buffer._messages.push_body import PushBody
from experience_buffer._messages.shared_memory import MIN_BYTES, PUSH_BYTES, machine
from experience_buffer._transport.lane_memory import MAX_BYTES, LaneMemory
from experience_buffer.errors import BufferFullError
from experience_buffer.status import to_request_error
from experience_buffer.v1 import service_pb2 as pb
from tests.unit.client.transport.test_shared_memory import FIELDS, NUM_BYTES, Made


@pytest.fixture
def made() -> Iterator[Made]:
    found = Made()
    yield found
    os.close(found.descriptor)


def body(payload: bytes) -> PushBody:
    """Of a payload in pieces."""
    return PushBody(FIELDS, [payload[:7], memoryview(payload)[7:]])


def large(made: Made) -> LaneMemory:
    """Memory that was asked for, and is there."""
    lane = LaneMemory(is_wanted=True)
    first = body(os.urandom(MIN_BYTES))
    asked, push = map(pb.PushStreamRequest.FromString, lane.messages(1, first, 5.0))
    assert asked.memory.machine == machine()
    assert push.push == pb.PushRequest.FromString(first.request())
    assert (push.sequence, push.timeout_seconds) == (1, 5.0)
    assert lane.is_offer(pb.PushStreamResponse(memory=made.offer))
    answer = pb.PushStreamResponse(sequence=1, response=pb.PushResponse())
    assert not lane.is_offer(answer)
    lane.answered(answer, first)
    return lane


def read(made: Made, message: bytes) -> tuple[pb.PushStreamRequest, list[bytes]]:
    """A push, and what lies where it says."""
    request = pb.PushStreamRequest.FromString(message)
    spans = [made.memory[span.offset : span.offset + span.num_bytes] for span in request.spans]
    return request, spans


def stored(sequence: int) -> pb.PushStreamResponse:
    return pb.PushStreamResponse(sequence=sequence, response=pb.PushResponse())


def full(sequence: int) -> pb.PushStreamResponse:
    error = to_request_error(BufferFullError("full", retry_delay_seconds=0.1))
    return pb.PushStreamResponse(sequence=sequence, error=error)


def test_a_body_is_a_push_request() -> None:
    payload = os.urandom(100)
    whole = body(payload)
    assert whole.request() == push_bytes.push_request(FIELDS, [[payload]])
    assert whole.request() is whole.request()
    assert PushBody(FIELDS).request() == FIELDS
    assert whole.num_bytes == len(FIELDS) + 100


def test_small_pushes_ask_for_no_memory() -> None:
    lane = LaneMemory(is_wanted=True)
    [message] = lane.messages(3, body(b"x" * 1000), 7.0)
    request = pb.PushStreamRequest.FromString(message)
    assert request.push == pb.PushRequest.FromString(body(b"x" * 1000).request())
    assert (request.sequence, request.timeout_seconds) == (3, 7.0)
    [message] = lane.messages(4, PushBody(FIELDS), 7.0)
    assert pb.PushStreamRequest.FromString(message).push == pb.PushRequest.FromString(FIELDS)


def test_large_pushes_lie_in_it_once_it_is_there(made: Made) -> None:
    lane = large(made)
    for sequence in range(2, 9):
        payload = os.urandom(900_007)  # Two don't have room at once.
        push = body(payload)
        assert lane.takes(push.num_bytes)
        [message] = lane.messages(sequence, push, 11.0)
        request, found = read(made, message)
        assert found == [payload]
        assert request.push == pb.PushRequest.FromString(FIELDS)
        assert (request.sequence, request.timeout_seconds) == (sequence, 11.0)
        lane.answered(stored(sequence), push)
    assert not lane.takes(NUM_BYTES + 1)


def test_what_is_sent_again_is_what_was_sent(made: Made) -> None:
    """Another push may have its place meanwhile, and its tensors another content."""
    lane = large(made)
    tensor = bytearray(os.urandom(900_007))
    push, payload = PushBody(FIELDS, [b"TRXP", memoryview(tensor)]), b"TRXP" + tensor
    assert read(made, lane.messages(2, push, 1.0)[0])[1] == [payload]
    tensor[:] = bytes(len(tensor))
    lane.answered(full(2), push)
    other = body(os.urandom(900_007))
    lane.messages(3, other, 1.0)
    lane.answered(stored(3), other)
    assert push.request() == push_bytes.push_request(FIELDS, [[payload]])
    assert read(made, lane.messages(4, push, 1.0)[0])[1] == [payload]
    lane.answered(stored(4), push)
    assert lane._memory is not None
    assert lane._memory._free.num_bytes == NUM_BYTES


def test_what_a_broken_stream_had_is_sent_on_the_next_one(made: Made) -> None:
    lane, payload = large(made), os.urandom(900_007)
    push = body(payload)
    lane.messages(2, push, 1.0)
    following = LaneMemory(is_wanted=True)
    _, message = following.messages(1, push, 1.0)
    assert pb.PushStreamRequest.FromString(message).push.payload == payload
    assert push.request() == push_bytes.push_request(FIELDS, [[payload]])


def test_without_memory_only_small_pushes_are_for_the_stream() -> None:
    lane = LaneMemory(is_wanted=True)
    assert lane.takes(PUSH_BYTES)
    assert not lane.takes(PUSH_BYTES + 1)
    lane.messages(1, body(os.urandom(MIN_BYTES)), 1.0)
    assert not lane.takes(MAX_BYTES + 1), "nobody has offered any"
    assert lane.takes(MAX_BYTES)
    unwanted = LaneMemory(is_wanted=False)
    assert not unwanted.takes(MAX_BYTES + 1)
    [message] = unwanted.messages(1, body(bytes(MIN_BYTES)), 1.0)
    assert len(pb.PushStreamRequest.FromString(message).push.payload) == MIN_BYTES


def test_memory_that_nobody_asked_for_is_not_taken(made: Made) -> None:
    lane = LaneMemory(is_wanted=False)
    assert lane.is_offer(pb.PushStreamResponse(memory=made.offer))
    assert not lane.takes(MAX_BYTES + 1)
