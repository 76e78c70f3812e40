"""Requests of millions of empty parts: refused by their number, before anything is made of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from experience_buffer.v1 import config_pb2, service_pb2
from tests.integration.hostile import SERVICE
from tests.integration.plain import create, error_of
from tests.integration.server import Server, serving

NUM_PARTS = 2_000_000
MOST_SECONDS = 2.5
"""Of the processor: protobuf reads them in a fraction of one; making something of each took ten."""
UPDATE = service_pb2.UpdateBufferRequest
CREATE = service_pb2.CreateBufferRequest


def field(message: Any, name: str, content: bytes) -> bytes:
    """A field of bytes, on the wire."""
    tag = message.DESCRIPTOR.fields_by_name[name].number << 3 | 2
    return varint(tag) + varint(len(content)) + content


def varint(number: int) -> bytes:
    """A number, on the wire."""
    pieces = bytearray()
    while number > 127:
        pieces.append(number & 127 | 128)
        number >>= 7
    return bytes([*pieces, number])


def many(message: Any, name: str) -> bytes:
    return field(message, name, b"") * NUM_PARTS


def in_buffer(message: Any, name: str) -> bytes:
    return field(message, "buffer", b"b") + many(message, name)


def config() -> bytes:
    return field(config_pb2.BufferConfig, "name", b"b") + many(config_pb2.BufferConfig, "consumers")


def mask() -> bytes:
    return field(UPDATE, "config", field(config_pb2.BufferConfig, "name", b"b")) + field(
        UPDATE, "update_mask", (b"\x0a\0" * NUM_PARTS)
    )


def cpu_seconds(server: Server) -> float:
    """What the server itself has used of the processor."""
    fields = Path(f"/proc/{server.pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(Server(tmp_path_factory.mktemp("many"))) as server:
        with server.stub() as stub:
            create(stub, "b")
        yield server


@pytest.mark.parametrize(
    ("method", "request_bytes", "limit"),
    [
        ("Push", in_buffer(service_pb2.PushRequest, "tombstones"), "max_push_items"),
        ("Push", in_buffer(service_pb2.PushRequest, "payloads"), "4096"),
        ("UpdatePriorities", in_buffer(service_pb2.UpdatePrioritiesRequest, "updates"), "10000"),
        ("Annotate", in_buffer(service_pb2.AnnotateRequest, "annotations"), "max_push_items"),
        ("Delete", in_buffer(service_pb2.DeleteRequest, "uids"), "10000"),
        ("ReserveGroups", in_buffer(service_pb2.ReserveGroupsRequest, "groups"), "empty"),
        ("CreateBuffer", field(CREATE, "config", config()), "over the limit"),
        ("UpdateBuffer", field(UPDATE, "config", config()), "update_mask"),
        ("UpdateBuffer", mask(), "update_mask"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_too_many_parts_are_refused_by_their_number(
    server: Server, method: str, request_bytes: bytes, limit: str
) -> None:
    before = cpu_seconds(server)
    with server.channel() as channel:
        call: Any = channel.unary_unary(f"{SERVICE}/{method}")
        code, text, _ = error_of(lambda: call(request_bytes, timeout=60))
    assert code == grpc.StatusCode.INVALID_ARGUMENT.name
    assert limit in text
    assert cpu_seconds(server) - before < MOST_SECONDS
