"""Slow, silent, vanished and flooding clients: bounded memory, others served, nothing left behind."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch

from experience_buffer import Client
from experience_buffer.v1 import service_pb2
from tests.integration.hostile import (
    PREFACE,
    SERVICE,
    call_begun,
    connect,
    connections,
    garbage,
    num_files,
    num_threads,
    resident_bytes,
)
from tests.integration.plain import (
    NONE,
    create,
    error_of,
    experience,
    group,
    push,
    push_request,
    stats,
)
from tests.integration.server import MakeServer, Server, Stub, eventually, serving
from tests.integration.streams import speaking

MEBI = 1024 * 1024
MALFORMED = b"\x0a\xff\xff"
TOML = """
[server]
max_message_bytes = 1048576
keepalive_seconds = 1.0
keepalive_timeout_seconds = 2.0
"""
SLACK_BYTES = 64 * MEBI
"""What the server may have more than before: its allocators keep some of what was used."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all of them; in the end it has what it had in the beginning."""
    with serving(Server(tmp_path_factory.mktemp("hostile"), toml=TOML)) as server:
        with server.stub() as stub:
            create(stub, "warm", group_by=NONE)
            push(stub, "warm", group(1, 50))
        files, threads, memory = num_files(server), num_threads(server), resident_bytes(server)
        yield server
        eventually(lambda: num_files(server) <= files + 2, "no more files than before")
        assert num_threads(server) <= threads + 8
        assert resident_bytes(server) < memory + 2 * SLACK_BYTES


@pytest.fixture
def stub(server: Server) -> Iterator[Stub]:
    with server.stub() as plain:
        yield plain


def consumer(stub: Stub, name: str) -> service_pb2.ConsumerStats:
    return stats(stub, name).consumers[0]


def seconds_of_calls(stub: Stub, count: int) -> list[float]:
    """How long each of so many small calls takes, sorted."""
    found = []
    for _ in range(count):
        started = time.monotonic()
        stub.GetBuffer(service_pb2.GetBufferRequest(name="warm"), timeout=20)
        found.append(time.monotonic() - started)
    return sorted(found)


def big(run: int, num_bytes: int) -> Any:
    return experience(1, run, extra={"x": torch.zeros(num_bytes, dtype=torch.uint8)})


def test_streams_that_are_never_read(server: Server, stub: Stub, name: str) -> None:
    create(stub, name, group_by=NONE)
    for first in range(0, 240, 3):
        push(stub, name, [big(first + i, 300_000) for i in range(3)])
    before = resident_bytes(server)
    with server.channel() as slow, speaking(Stub(slow)) as one, speaking(Stub(slow)) as two:
        for stream in (one, two):
            stream.open(name, 1, credits=1000)
        counts: list[int] = []

        def stands_still() -> bool:
            counts.append(consumer(stub, name).num_leased_units)
            return counts[-1] >= 8 and counts[-100:] == 100 * counts[-1:]

        eventually(stands_still, "no more fits on the way")
        assert seconds_of_calls(stub, 50)[-1] < 5
        # No more is taken out of the buffer than what fits between it and a reader that stands still:
        # some 13 MB, but the kernel may let a connection have its 33 MB (tcp_rmem) and more.
        assert counts[-1] < 200
        assert resident_bytes(server) < before + SLACK_BYTES
    eventually(lambda: consumer(stub, name).num_ready_units == 240, "all is offered again")
    stub.DeleteBuffer(service_pb2.DeleteBufferRequest(name=name, force=True))


def test_answers_that_are_never_read(make_server: MakeServer) -> None:
    server = make_server(toml="[server]\nmax_response_bytes = 67108864\n")
    with server.stub() as stub:
        create(stub, "large", group_by=NONE)
        push(stub, "large", [big(1, 15 * MEBI)])
        page = stub.List(service_pb2.ListRequest(buffer="large"))
        get = service_pb2.GetRequest(buffer="large", uid=page.experiences[0].uid)
        before = resident_bytes(server)
        message = get.SerializeToString()
        calls = [call_begun("Get", message, stated_bytes=len(message)) for _ in range(20)]
        with connections([connect(server, call) for call in calls]):
            # Two of them are read from the store: the client's share. No earlier may this thread ask,
            # whose answer would take the place of one.
            refused = 'experience_buffer_calls_refused_total{reason="max_response_bytes"} 18.0'
            eventually(lambda: refused in server.metrics(), "its share is used up")
            code, text, details = error_of(lambda: stub.Get(get, timeout=20))
            assert code == "RESOURCE_EXHAUSTED"
            assert "server.max_response_bytes is 67108864" in text
            assert details["RetryInfo"].retry_delay.ToMilliseconds() == 100
            assert resident_bytes(server) < before + 2 * 3 * 15 * MEBI + SLACK_BYTES
        eventually(lambda: refusal_of(stub, get) is None, "what they held is given back")


def refusal_of(stub: Stub, request: service_pb2.GetRequest) -> Any:
    """The error that Get is refused with for a while; None where it is answered."""
    try:
        stub.Get(request, timeout=20)
    except grpc.RpcError as error:
        return error
    return None


VANISHING = """
import sys, time
from experience_buffer import Client
with Client(sys.argv[1]) as client, client.stream(3, buffer=sys.argv[2], prefetch=1) as stream:
    next(stream)
    print("has a batch", flush=True)
    time.sleep(600)
"""


def test_a_machine_that_vanishes(server: Server, stub: Stub, name: str) -> None:
    create(stub, name, group_by=NONE, lease_seconds=600.0)
    push(stub, name, group(1, 6))
    command = [sys.executable, "-c", VANISHING, server.address, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"has a batch\n"
            assert consumer(stub, name).num_leased_units >= 3
            # The kernel still answers for it, but nobody answers the server's question.
            process.send_signal(signal.SIGSTOP)
            eventually(lambda: consumer(stub, name).num_ready_units == 6, "its leases come back")
        finally:
            process.kill()


def test_connections_that_say_nothing_or_half_of_it(server: Server, stub: Stub) -> None:
    before = num_files(server)
    said = (b"", PREFACE[:7], PREFACE, b"GET / HTTP/1.1\r\n")
    with connections([connect(server, said[i % 4]) for i in range(200)]):
        assert seconds_of_calls(stub, 50)[-1] < 5
        assert num_files(server) <= before + 210
        eventually(lambda: num_files(server) <= before + 5, "the server closes them by itself")


def test_garbage_on_the_port(server: Server, stub: Stub) -> None:
    rng, before = random.Random(11), resident_bytes(server)
    for _ in range(10):
        with connections([connect(server, garbage(rng)) for _ in range(40)]):
            assert seconds_of_calls(stub, 3)[-1] < 5
    assert resident_bytes(server) < before + SLACK_BYTES


@pytest.mark.parametrize("method", ["Push", "PushStream", "SampleStream", "GetStats"])
def test_messages_that_are_none(server: Server, method: str) -> None:
    path = f"{SERVICE}/{method}"
    with server.channel() as channel:
        if method.endswith("Stream"):
            stream: Any = channel.stream_stream(path)
            code, message, _ = error_of(lambda: next(stream(iter((MALFORMED,)))))
        else:
            call: Any = channel.unary_unary(path)
            code, message, _ = error_of(lambda: call(MALFORMED))
    assert (code, "can't be read" in message) == ("INVALID_ARGUMENT", True)


def test_pushes_that_stop_in_the_middle_of_a_message(server: Server, stub: Stub) -> None:
    before, files = resident_bytes(server), num_files(server)
    begun = [
        call_begun(method, b"\x0a\x04warm\x12", stated_bytes=1_000_000)
        for method in ("Push", "PushStream") * 30
    ]
    with connections([connect(server, piece) for piece in begun]):
        assert seconds_of_calls(stub, 50)[-1] < 5
        push(stub, "warm", group(2, 3))
        assert resident_bytes(server) < before + SLACK_BYTES
    eventually(lambda: num_files(server) <= files + 2, "their connections are gone")


def test_floods_of_calls_and_streams(server: Server, stub: Stub, name: str) -> None:
    create(stub, name, group_by=NONE)
    before = resident_bytes(server)
    with server.channel() as flooding:
        flood = Stub(flooding)
        stats_request = service_pb2.GetStatsRequest(buffer=name)
        calls = [flood.GetStats.future(stats_request) for _ in range(3000)]
        opening = service_pb2.SampleStreamRequest(credits=1)
        silent = [flood.SampleStream(iter(())) for _ in range(1000)]
        wrong = [flood.SampleStream(iter((opening,))) for _ in range(500)]
        times = seconds_of_calls(stub, 100)
        assert times[98] < 5, times[-5:]
        for call in calls:
            call.exception(timeout=40)
        for stream in wrong:
            with pytest.raises(grpc.RpcError):
                next(stream)
        assert resident_bytes(server) < before + 2 * SLACK_BYTES
        for stream in silent:
            stream.cancel()
    assert consumer(stub, name).num_waiting == 0


def test_calls_that_are_cancelled_in_every_phase(server: Server, stub: Stub, name: str) -> None:
    create(stub, name, group_by=NONE, lease_seconds=1.0)
    rng = random.Random(5)
    wanted = service_pb2.SampleRequest(
        buffer=name, consumer="trainer", batch_size=2, min_batch_size=1, timeout_seconds=30
    )
    pushes = [push_request(name, [experience(1, run)]) for run in range(300)]
    with server.channel() as channel:
        hasty = Stub(channel)
        pending: list[Any] = []
        for request in pushes:
            pending += [hasty.Push.future(request), hasty.Sample.future(wanted)]
            if len(pending) > 20:
                rng.shuffle(pending)
                while len(pending) > 10:
                    pending.pop().cancel()
        for call in pending:
            call.cancel()
        streams = [hasty.PushStream(iter(_numbered(pushes[:5]))) for _ in range(50)]
        for stream in streams:
            stream.cancel()
    # Nothing waits, nothing is leased for longer than a lease, and every push can be repeated.
    eventually(lambda: consumer(stub, name).num_waiting == 0, "nobody waits")
    eventually(lambda: consumer(stub, name).num_leased_units == 0, "leases expire")
    with Client(server.address) as client:
        for request in pushes:
            client.push(request.payload, buffer=name)
    assert stats(stub, name).num_items == len(pushes)


def _numbered(pushes: list[service_pb2.PushRequest]) -> list[service_pb2.PushStreamRequest]:
    return [service_pb2.PushStreamRequest(sequence=i, push=one) for i, one in enumerate(pushes)]


def test_messages_above_the_limits(server: Server, stub: Stub) -> None:
    before = resident_bytes(server)
    with server.channel() as channel:
        large = Stub(channel)
        for num_bytes in (1_100_000, 2_000_000, 8_000_000) * 5:
            request = service_pb2.PushRequest(buffer="warm", payload=bytes(num_bytes))
            with pytest.raises(grpc.RpcError) as caught:
                large.Push(request)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        names = service_pb2.GetBufferRequest(name="x" * 500_000)
        with pytest.raises(grpc.RpcError) as caught:
            large.GetBuffer(names)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert resident_bytes(server) < before + SLACK_BYTES
