"""Sample responses as the bytes that go over the wire, in which each payload is copied once.

protobuf would copy the payloads into a message, into the message around it, and again to serialise
both; and as often where they are read. Here they are joined behind their tags and lengths, before
the other fields of their message: so whoever reads them finds them without looking at anything
else. protobuf writes and reads everything else, and all of what others have written in other orders.
Pure; the server writes with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1 import types_pb2

Pieces: TypeAlias = Sequence[bytes | memoryview]
"""Bytes as what they are joined of; views are of bytes."""
M = TypeVar("M", bound=Message)
L = TypeVar("L", pb.SampleFrame, pb.SampleResponse)
_MAX_LENGTH_BYTES: Final = 5
MIN_CUT_BYTES: Final = 16 * 1024
"""Messages whose first payload is smaller are protobuf's to read: copying takes less than cutting."""


class Received(NamedTuple, Generic[M]):
    """A message whose large fields are outside of it."""

    message: M
    """Its experiences have no payloads, and it has no packed bytes."""
    payloads: Sequence[bytes | memoryview]
    """Of its experiences, in their order; views keep all of the message in memory."""
    packed: bytes | memoryview
    """The packed bytes; empty where there are none."""


def varint(value: int) -> bytes:
    """A number of at least 0 as the wire format writes it: seven bits per byte, the lowest first."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def tag(message: type[Message], field: str) -> int:
    """What comes before the length of a bytes or message field; one byte."""
    return message.DESCRIPTOR.fields_by_name[field].number << 3 | 2


_FRAME: Final = tag(pb.SampleStreamResponse, "frame")
_PAYLOAD: Final = tag(types_pb2.SampledExperience, "payload")
_EXPERIENCES: Final = tag(pb.SampleFrame, "experiences")
_PACKED: Final[dict[type[Message], int]] = {
    kind: tag(kind, "packed") for kind in (pb.SampleFrame, pb.SampleResponse)
}
assert tag(pb.SampleResponse, "experiences") == _EXPERIENCES

# --- writing


def experience_pieces(rest: bytes, payload: Pieces) -> Pieces:
    """One of the experiences of a `SampleFrame` or `SampleResponse`.

    Args:
        rest: A `SampledExperience` as it goes over the wire, without its payload.
        payload: A TRXP payload.
    """
    num_bytes = sum(map(len, payload))
    size = varint(num_bytes)
    head = b"%c%b%c%b" % (
        _EXPERIENCES, varint(1 + len(size) + num_bytes + len(rest)), _PAYLOAD, size,
    )  # fmt: skip
    return head, *payload, rest


def packed_pieces(message: type[Message], pieces: Pieces) -> Pieces:
    """The packed bytes of a `SampleFrame` or `SampleResponse`."""
    return b"%c%b" % (_PACKED[message], varint(sum(map(len, pieces)))), *pieces


def frame_pieces(frame: pb.SampleFrame, large: Pieces) -> Pieces:
    """A `SampleStreamResponse` with a frame.

    Args:
        frame: Everything of it but its large fields.
        large: These, as the functions above make them.
    """
    rest = frame.SerializeToString()
    length = sum(map(len, large)) + len(rest)
    return b"%c%b" % (_FRAME, varint(length)), *large, rest


def frame_response(frame: pb.SampleFrame, large: Pieces) -> bytes:
    """What `frame_pieces` returns, in one."""
    return b"".join(frame_pieces(frame, large))


def sample_response(response: pb.SampleResponse, large: Pieces) -> bytes:
    """A `SampleResponse`; see `frame_response`."""
    return b"".join([*large, response.SerializeToString()])


# --- reading


def read_stream_response(data: bytes | bytearray | memoryview) -> Received[pb.SampleStreamResponse]:
    """Read a `SampleStreamResponse`.

    Args:
        data: The message. Views on it are as writable as it is.

    Raises:
        DecodeError: It is none.
    """
    if len(data) > 1 and data[0] == _FRAME:
        view = memoryview(data)
        length, start = _number(view, 1)
        if start + length == len(data) and (found := _cut(view, start, pb.SampleFrame)):
            return Received(pb.SampleStreamResponse(frame=found.message), *found[1:])
    # It takes any of them, and its types say bytes.
    message = pb.SampleStreamResponse.FromString(cast("bytes", data))
    frame = message.frame
    return Received(message, _payloads(frame.experiences), frame.packed)


def read_response(data: bytes) -> Received[pb.SampleResponse]:
    """Read a `SampleResponse`.

    Raises:
        DecodeError: It is none.
    """
    if found := _cut(memoryview(data), 0, pb.SampleResponse):
        return found
    message = pb.SampleResponse.FromString(data)
    return Received(message, _payloads(message.experiences), message.packed)


def _payloads(experiences: Iterable[types_pb2.SampledExperience]) -> list[bytes]:
    return [experience.payload for experience in experiences]


def _cut(view: memoryview, start: int, kind: type[L]) -> Received[L] | None:
    """A message that begins with its large fields; None where protobuf should read all of it."""
    payloads: list[memoryview] = []
    packed = view[:0]
    rest: list[bytes | memoryview] = []
    end = len(view)
    if start < end and view[start] == _PACKED[kind]:
        length, first = _number(view, start + 1)
        start = first + length
        packed = view[first:start]
    else:
        while start < end and view[start] == _EXPERIENCES:
            length, first = _number(view, start + 1)
            start = first + length
            if not length or start > end or view[first] != _PAYLOAD:
                return None
            num_bytes, first = _number(view, first + 1)
            stop = first + num_bytes
            if stop > start:
                return None
            if not payloads and num_bytes < MIN_CUT_BYTES:
                return None
            payloads.append(view[first:stop])
            rest += (b"%c%b" % (_EXPERIENCES, varint(start - stop)), view[stop:start])
    if start > end or not (payloads or packed):
        return None
    rest.append(view[start:])
    try:
        message = kind.FromString(b"".join(rest))
    except DecodeError:
        return None
    # What comes again replaces what came before, or comes in addition.
    is_whole = len(message.experiences) == len(payloads) and not message.packed
    if not is_whole or any(experience.payload for experience in message.experiences):
        return None
    return Received(message, payloads, packed)


def _number(view: memoryview, start: int) -> tuple[int, int]:
    """The number that begins at `start`, and where it ends: beyond everything, if it is cut off."""
    value = 0
    for place, byte in enumerate(view[start : start + _MAX_LENGTH_BYTES]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, start + place + 1
    return 0, len(view) + 1
