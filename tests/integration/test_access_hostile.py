"""Strangers, and callers whose grant has ended: they neither lock out others nor go on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from experience_buffer import Client
from experience_buffer.v1 import service_pb2
from tests.integration.credentials import bearer, entry, write
from tests.integration.hostile import (
    SERVICE,
    call_headers,
    call_message,
    connections,
    opening,
    resident_bytes,
)
from tests.integration.plain import experience, push_request
from tests.integration.server import Server, eventually, serving

PING = b"\0\0\x08\x06\0\0\0\0\0" + 8 * b"?"
PONG = b"\0\0\x08\x06\x01\0\0\0\0" + 8 * b"?"
HEALTH = "/grpc.health.v1.Health"
MAX_CALLS = 64
TOML = f"""
[server]
max_calls = {MAX_CALLS}
max_streams = 3
max_streams_per_client = 2

[access]
file = "access.toml"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("strangers"), toml=TOML)
    grant(server.folder / "access.toml")
    with serving(server):
        yield server


def grant(path: Path, *entries: Any) -> None:
    write(path, entry("root", "operate"), entry("other", "operate"), *entries)


def connect(server: Server, said: bytes, *, source: str = "127.0.0.1") -> socket.socket:
    """A connection on which all was said and heard."""
    made = socket.create_connection(("127.0.0.1", server.port), 20, source_address=(source, 0))
    made.sendall(said + PING)
    found = b""
    while PONG not in found:
        found += made.recv(65536)
    return made


def begun(path: str, count: int, *, token: str = "", message: bytes | None = None) -> bytes:
    """Calls on one connection; without a message they have only begun."""
    said = opening()
    for stream in range(1, 2 * count, 2):
        said += call_headers(path, stream=stream, token=token)
        if message is not None:
            said += call_message(message, stream=stream, is_last=True)
    return said


def list_buffers(server: Server, *, token: str = "root") -> None:
    """A call that must be served, again and again."""
    with server.stub() as stub:
        for _ in range(20):
            stub.ListBuffers(service_pb2.ListBuffersRequest(), metadata=bearer(token), timeout=20)


@pytest.mark.parametrize(
    ("path", "token"),
    [
        (f"{HEALTH}/Check", ""),
        (f"{HEALTH}/Watch", ""),
        (f"{HEALTH}/None", ""),
        (f"{SERVICE}/Push", ""),
        (f"{SERVICE}/Push", "other"),
    ],
)
def test_calls_that_only_begin_lock_nobody_out(server: Server, path: str, token: str) -> None:
    said = begun(path, 2 * MAX_CALLS, token=token)
    sources = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    with connections([connect(server, said, source=source) for source in sources]):
        list_buffers(server)


def test_watches_of_strangers_are_no_streams_of_callers(server: Server) -> None:
    said = begun(f"{HEALTH}/Watch", 12, message=b"")
    sources = [f"127.0.0.{number}" for number in range(2, 8)]
    with (
        connections([connect(server, said, source=source) for source in sources]),
        server.stub() as stub,
    ):
        wanted = service_pb2.WatchPolicyVersionRequest(buffer="default")
        versions = stub.WatchPolicyVersion(wanted, metadata=bearer("root"), timeout=20)
        next(versions)
        versions.cancel()


def test_strangers_hold_only_so_many_watches(server: Server) -> None:
    request = health_pb2.HealthCheckRequest()
    with server.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(request) for _ in range(3)]
        codes: list[grpc.StatusCode] = []
        for watch in watches:
            try:
                assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            except grpc.RpcError as error:
                codes.append(error.code())
        assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for watch in watches:
            watch.cancel()
        eventually(lambda: _is_served(stub.Watch(request)), "a place to be free again")
        # Those who hold all that lasts leave room for those who only ask.
        assert stub.Check(request, timeout=20).status == health_pb2.HealthCheckResponse.SERVING


def _is_served(watch: Any) -> bool:
    try:
        next(watch)
    except grpc.RpcError:
        return False
    watch.cancel()
    return True


def test_requests_of_strangers_are_small(server: Server) -> None:
    before = resident_bytes(server)
    with server.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        large = health_pb2.HealthCheckRequest(service="x" * 5_000)
        with pytest.raises(grpc.RpcError, match="may have 4096 bytes"):
            stub.Check(large, timeout=20)
        with pytest.raises(grpc.RpcError, match="may have 4096 bytes"):
            next(stub.Watch(large))
        named = health_pb2.HealthCheckRequest(service="\0" * 4_000)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(named, timeout=20)
        call_error: Any = caught.value
        assert call_error.code() is grpc.StatusCode.NOT_FOUND
        assert len(call_error.details()) < 600
    assert resident_bytes(server) < before + 64 * 2**20


def test_a_revoked_token_stores_nothing_more(server: Server) -> None:
    """Though its client reads no answer, so that no status can be sent to it."""
    path = server.folder / "access.toml"
    num_lines = len(server.log)
    grant(path, entry("worker", "push"))
    eventually(lambda: _reads(server, num_lines), "the grant to be taken")
    headers = call_headers(f"{SERVICE}/PushStream", token="worker")
    with (
        connections([connect(server, opening(is_reading=False) + headers)]) as (worker,),
        Client(server.address, token="root") as root,
    ):
        for number in (1, 2, 3):
            worker.sendall(call_message(_pushed(number)))
        eventually(lambda: root.get_stats().buffers[0].num_items == 3, "three to be stored")
        num_lines = len(server.log)
        grant(path)
        eventually(lambda: _reads(server, num_lines), "the grant to be taken")
        worker.sendall(call_message(_pushed(4)))
        eventually(
            lambda: any(
                '"refused"' in line and '"PushStream"' in line for line in tuple(server.log)
            ),
            "the refusal to be logged",
        )
        # Its streams end, though their peer reads nothing: their places are free for others.
        eventually(lambda: _num_open(server) == 0, "the stream to end")
        assert root.get_stats().buffers[0].num_items == 3


def _reads(server: Server, num_lines: int) -> bool:
    return any('"access: read again"' in line for line in server.log[num_lines:])


def _num_open(server: Server) -> int:
    """Push streams that have begun and not ended."""
    counts = dict.fromkeys(("grpc_server_started_total", "grpc_server_handled_total"), 0.0)
    for line in server.metrics("root").splitlines():
        name = line.partition("{")[0]
        if name in counts and 'grpc_method="PushStream"' in line:
            counts[name] += float(line.rpartition(" ")[2])
    return int(counts["grpc_server_started_total"] - counts["grpc_server_handled_total"])


def _pushed(number: int) -> bytes:
    push = push_request("default", [experience(1, number)])
    return service_pb2.PushStreamRequest(sequence=number, push=push).SerializeToString()
