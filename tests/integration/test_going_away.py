"""A server that goes away under load: the clients make every call again, and none of them fails.

What no handler has accepted when a server stops, gRPC answers with CANCELLED, without a word of the
service. Which calls that meets is chance: each test goes on until it has met some.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from experience_buffer import ClientOptions, RetryOptions
from experience_buffer._transport.settings import ClientSettings
from experience_buffer.errors import ExperienceBufferError
from experience_buffer.v1 import service_pb2
from tests.integration.plain import NONE, create, experience, group, push, sample
from tests.integration.server import MakeServer, Server, eventually

NUM_CALLERS = 24
MIN_ROUNDS, MAX_ROUNDS = 2, 16
OPTIONS = ClientOptions(
    retry=RetryOptions(initial_backoff_seconds=0.02, max_backoff_seconds=0.1, reconnect_seconds=60)
)


class Tally:
    """What became of calls; it can be shared between threads."""

    def __init__(self) -> None:
        self.num_done = 0
        self.codes: Counter[grpc.StatusCode] = Counter()
        """Of what gRPC raised, retried or not."""
        self.failures: list[ExperienceBufferError] = []
        self.over = threading.Event()

    def note(self, error: Any) -> None:
        self.codes[error.code()] += 1


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    """A server with experiences to sample."""
    server = make_server()
    with server.stub() as stub:
        create(stub, "b", group_by=NONE)
        push(stub, "b", group(0, 3 * NUM_CALLERS))
    return server


@pytest.fixture
def acked(server: Server) -> int:
    """A lease that was acknowledged: that may be said again at any time."""
    with server.stub() as stub:
        lease_id = sample(stub, "b", 1).lease.id
        stub.Ack(service_pb2.AckRequest(buffer="b", lease_id=lease_id))
    return lease_id


@pytest.fixture(params=["sigterm", "writer killed"])
def end(request: pytest.FixtureRequest) -> Callable[[Server], None]:
    """Ends a server in an orderly way: told to, or by itself because its store's writer died."""

    def terminate(server: Server) -> None:
        assert server.stop() == 0

    def kill_writer(server: Server) -> None:
        [writer] = server.children("lmdb.writer_process")
        os.kill(writer, signal.SIGKILL)
        assert server.wait() == 1

    return terminate if request.param == "sigterm" else kill_writer


def go_away(server: Server, end: Callable[[Server], None], tally: Tally) -> None:
    """End the server and start it again until calls were cancelled by it, and then answered."""

    def answered() -> None:
        goal = tally.num_done + 3 * NUM_CALLERS
        eventually(lambda: tally.failures or tally.num_done >= goal, "answers")

    for number in itertools.count(1):
        answered()
        end(server)
        server.start()
        if number >= MIN_ROUNDS and tally.codes[grpc.StatusCode.CANCELLED]:
            break
        assert number < MAX_ROUNDS, (
            f"nothing was cancelled, the test has shown nothing: {tally.codes}"
        )
    answered()


@contextlib.contextmanager
def callers(tally: Tally, call: Callable[[int], object]) -> Iterator[None]:
    """Threads that make calls, each with numbers of its own, until the end of the block."""

    def run(caller: int) -> None:
        try:
            for number in itertools.count(caller, NUM_CALLERS):
                if tally.over.is_set():
                    return
                call(number)
                tally.num_done += 1
        except ExperienceBufferError as error:
            tally.failures.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(NUM_CALLERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        tally.over.set()
        for thread in threads:
            thread.join(40)
    assert not tally.failures, tally.failures[0]
    assert not any(thread.is_alive() for thread in threads), "a call never ended"


def test_plain_calls_meet_unavailable_or_cancelled(
    server: Server, end: Callable[[Server], None]
) -> None:
    tally = Tally()
    with server.stub() as stub:

        def call(number: int) -> None:
            try:
                stub.GetStats(service_pb2.GetStatsRequest(), timeout=30, wait_for_ready=True)
            except grpc.RpcError as error:
                tally.note(error)

        with callers(tally, call):
            go_away(server, end, tally)
    assert set(tally.codes) <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


@pytest.fixture
def watched(
    server: Server, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Tally]]:
    """Either client, and a tally of what it is about to retry, or to raise."""
    tally = Tally()
    translate = ClientSettings._translate

    def note(self: ClientSettings, error: grpc.RpcError, method: str) -> ExperienceBufferError:
        tally.note(error)
        return translate(self, error, method)

    monkeypatch.setattr(ClientSettings, "_translate", note)
    with connect(server.address, options=OPTIONS) as client:
        yield client, tally


def test_no_call_of_a_client_fails(
    server: Server, watched: tuple[Any, Tally], acked: int, end: Callable[[Server], None]
) -> None:
    client, tally = watched

    def call(number: int) -> None:
        if number % 3 == 0:
            client.push([experience(1, number)], buffer="b")
        elif number % 3 == 1:
            client.ack(acked, buffer="b")
        else:
            client.get_stats()

    with callers(tally, call):
        go_away(server, end, tally)


def test_no_stream_of_a_client_fails(
    server: Server, watched: tuple[Any, Tally], end: Callable[[Server], None]
) -> None:
    # They are opened again and again: only an opening can be cancelled before it is accepted.
    client, tally = watched

    def call(number: int) -> None:
        if number % 2:
            with client.writer(buffer="b") as writer:
                writer.append(experience(1, number))
            assert writer.counts.num_stored + writer.counts.num_duplicates == 1
        else:
            with client.stream(1, buffer="b", prefetch=1) as stream:
                assert len(next(stream).experiences) == 1

    with callers(tally, call):
        go_away(server, end, tally)
