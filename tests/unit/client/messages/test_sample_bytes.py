"""Sample responses written and read around protobuf: always what protobuf would have made of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer._messages import sample_bytes as wire
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1 import types_pb2

EXPERIENCES = st.lists(
    st.builds(
        types_pb2.SampledExperience,
        uid=st.text(max_size=7),
        payload=st.binary(max_size=300),
        num_deliveries=st.integers(0, 2**32 - 1),
        flags=st.lists(st.text(max_size=3), max_size=2),
    ),
    max_size=3,
)
LEASES = st.builds(types_pb2.Lease, id=st.integers(0, 2**64 - 1), consumer=st.text(max_size=3))
FRAMES = st.builds(
    pb.SampleFrame, lease=LEASES, experiences=EXPERIENCES, last=st.booleans(), num_units=st.just(7)
)
RESPONSES = st.builds(pb.SampleResponse, lease=LEASES, experiences=EXPERIENCES)
INNER = (
    b"\x12\x03\x1a\x01x",  # an experience with a payload
    b"\x12\x02\x1a\x01x",  # whose payload goes beyond it
    b"\x12\x06\x1a\x01x\x1a\x01y",  # with two payloads
    b"\x12\x00",
    b"\x12\x7f",
    b"\x3a\x02zz",  # packed bytes of a frame, and of a response
    b"\x32\x02zz",
)
PACKED = st.binary(max_size=40_000)


@pytest.fixture(scope="module", autouse=True)
def _cut_small_ones_too() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MIN_CUT_BYTES", 0)
        yield


def parts_of(message: Any, packed: bytes) -> tuple[Any, list[Any]]:
    """A message without its large fields, and these as they are written."""
    rest = type(message)()
    large: list[Any] = []
    rest.CopyFrom(message)
    for experience in rest.experiences:
        payload, experience.payload = experience.payload, b""
        pieces = [payload[:11], b"", memoryview(payload)[11:]]
        large += wire.experience_pieces(experience.SerializeToString(), pieces)
    if not rest.experiences and packed:
        large += wire.packed_pieces(type(message), [packed[:97], memoryview(packed)[97:]])
        message.packed = packed
    rest.ClearField("experiences")
    return rest, large


def whole(received: wire.Received[Any], message: Any) -> Any:
    """What was read, put together again; `message` is the part of it that has experiences."""
    if received.packed:
        message.packed = bytes(received.packed)
    for experience, payload in zip(message.experiences, received.payloads, strict=True):
        experience.payload = bytes(payload)
    return received.message


@given(FRAMES, PACKED)
def test_a_frame_is_what_protobuf_writes_and_reads(frame: pb.SampleFrame, packed: bytes) -> None:
    data = wire.frame_response(*parts_of(frame, packed))
    expected = pb.SampleStreamResponse(frame=frame)
    assert pb.SampleStreamResponse.FromString(data) == expected
    for spelled in (data, expected.SerializeToString()):
        received = wire.read_stream_response(spelled)
        assert whole(received, received.message.frame) == expected


@given(RESPONSES, PACKED)
def test_a_response_is_what_protobuf_writes_and_reads(
    response: pb.SampleResponse, packed: bytes
) -> None:
    data = wire.sample_response(*parts_of(response, packed))
    assert pb.SampleResponse.FromString(data) == response
    for spelled in (data, response.SerializeToString()):
        received = wire.read_response(spelled)
        assert whole(received, received.message) == response


def test_large_fields_are_views_on_what_came() -> None:
    experience = types_pb2.SampledExperience(uid="a", num_deliveries=3)
    pieces = wire.experience_pieces(experience.SerializeToString(), [b"x" * 300])
    for data in (wire.frame_response(pb.SampleFrame(last=True), [*pieces, *pieces]),):
        received = wire.read_stream_response(data)
        assert [each.obj for each in received.payloads if isinstance(each, memoryview)] == [
            data
        ] * 2
    data = wire.sample_response(pb.SampleResponse(), wire.packed_pieces(pb.SampleResponse, [b"y"]))
    received_packed = wire.read_response(data).packed
    assert isinstance(received_packed, memoryview)
    assert received_packed.obj is data


@given(FRAMES, PACKED, FRAMES, st.data())
@settings(max_examples=400)
def test_damaged_bytes_are_protobufs_to_judge(
    frame: pb.SampleFrame, packed: bytes, other: pb.SampleFrame, data: st.DataObject
) -> None:
    """Cut, changed, or with fields that come twice: the same message, or the same error."""
    rest, large = parts_of(frame, packed[:200])
    found = bytearray(wire.frame_response(rest, [*large, other.SerializeToString()]))
    harm = data.draw(st.sampled_from(["", "inner", "changed", "cut"]))
    if harm == "changed":
        # Tags and lengths are at the beginning.
        place = data.draw(st.integers(0, min(len(found) - 1, 20)))
        found[place] = data.draw(st.integers(0, 255))
    elif harm == "cut":
        del found[data.draw(st.integers(0, len(found))) :]
    elif harm == "inner":
        inner = data.draw(st.lists(st.sampled_from(INNER), min_size=1, max_size=4))
        found = bytearray(wire.frame_response(rest, [*large, *inner]))
    damaged = bytes(found)
    for kind, read in (
        (pb.SampleStreamResponse, wire.read_stream_response),
        (pb.SampleResponse, wire.read_response),
    ):
        try:
            expected: Any = kind.FromString(damaged)
        except DecodeError:
            with pytest.raises(DecodeError):
                read(damaged)
            continue
        received: Any = read(damaged)
        message = received.message
        assert whole(received, getattr(message, "frame", message)) == expected
