"""Push requests as the bytes that go over the wire, in which each payload is copied once.

protobuf would copy a payload into the message, into the message around it, and again to serialise
both. It writes and reads everything else of these messages. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from experience_buffer._codec import memory
from experience_buffer._messages import sample_bytes
from experience_buffer._messages.calls import build
from experience_buffer._messages.sample_bytes import tag, varint
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1 import types_pb2
from experience_buffer.v1.service_pb2_grpc import ExperienceBufferStub

Pieces: TypeAlias = Sequence[bytes | memoryview]
"""A payload as what it is joined of; views are of bytes."""
Payload: TypeAlias = bytes | memoryview
"""A payload in one; a view is of shared memory (`push_memory`)."""

_SERVICE: Final = pb.DESCRIPTOR.services_by_name["ExperienceBuffer"].full_name


_FIRST: Final = varint(tag(pb.PushRequest, "payload"))
_MORE: Final = varint(tag(pb.PushRequest, "payloads"))
_PUSH: Final = varint(tag(pb.PushStreamRequest, "push"))


def push_fields(
    *, buffer: str, group_size: int, tombstones: Sequence[types_pb2.Tombstone] = ()
) -> bytes:
    """Everything of a `PushRequest` but its payloads.

    Raises:
        InvalidRequestError: A value has the wrong type or sign.
    """
    return build(
        pb.PushRequest,
        buffer=buffer,
        tombstones=tombstones,
        group_size=group_size,
    ).SerializeToString()


def push_request(fields: bytes, payloads: Iterable[Pieces]) -> bytes:
    """A `PushRequest`.

    Args:
        fields: What `push_fields` returned.
        payloads: TRXP payloads.
    """
    return b"".join(_push_parts(fields, payloads))


def push_stream_request(sequence: int, fields: bytes, payloads: Iterable[Pieces]) -> bytes:
    """A `PushStreamRequest`; see `push_request`."""
    head = pb.PushStreamRequest(sequence=sequence)
    parts = _push_parts(fields, payloads)
    return b"".join([head.SerializeToString(), _PUSH, varint(sum(map(len, parts))), *parts])


def push_by_spans(
    sequence: int,
    fields: bytes,
    spans: Iterable[types_pb2.MemorySpan],
) -> bytes:
    """A `PushStreamRequest` whose payloads lie in shared memory; see `push_stream_request`."""
    head = pb.PushStreamRequest(sequence=sequence, spans=spans)
    return b"".join([head.SerializeToString(), _PUSH, varint(len(fields)), fields])


def push_memory_request(fields: bytes, machine: str) -> bytes:
    """The `PushStreamRequest` that asks for shared memory; see `push_request`."""
    asked = pb.PushStreamRequest(memory=types_pb2.MemoryRequest(machine=machine))
    return b"".join([asked.SerializeToString(), _PUSH, varint(len(fields)), fields])


def make_stub(channel: Any) -> Any:
    """A stub of the service, whose `Push` and `PushStream` take requests as bytes.

    Its `Sample` and `SampleStream` return `sample_bytes.Received`.

    Args:
        channel: A `grpc.Channel` or `grpc.aio.Channel`.
    """
    memory.keep_large_blocks()
    stub: Any = ExperienceBufferStub(channel)
    stub.Push = channel.unary_unary(
        f"/{_SERVICE}/Push", response_deserializer=pb.PushResponse.FromString
    )
    stub.Sample = channel.unary_unary(
        f"/{_SERVICE}/Sample",
        request_serializer=pb.SampleRequest.SerializeToString,
        response_deserializer=sample_bytes.read_response,
    )
    stub.SampleStream = channel.stream_stream(
        f"/{_SERVICE}/SampleStream",
        request_serializer=pb.SampleStreamRequest.SerializeToString,
        response_deserializer=sample_bytes.read_stream_response,
    )
    stub.PushStream = channel.stream_stream(
        f"/{_SERVICE}/PushStream", response_deserializer=pb.PushStreamResponse.FromString
    )
    return stub


def _push_parts(fields: bytes, payloads: Iterable[Pieces]) -> list[bytes | memoryview]:
    parts: list[bytes | memoryview] = [fields]
    before = _FIRST
    for pieces in payloads:
        parts += (before, varint(sum(map(len, pieces))), *pieces)
        before = _MORE
    return parts
