"""A flood meets its bounds: pushes wait in line, clients have quotas, and others are served."""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from experience_buffer import (
    BufferConfig,
    BufferFullError,
    Client,
    ClientOptions,
    ConsumerConfig,
    Limiter,
    PushRefusedError,
    ResourceExhaustedError,
    RetryOptions,
    UnavailableError,
    trxp,
)
from experience_buffer.v1 import service_pb2
from tests.integration.buffers import create, stats
from tests.integration.plain import error_of, experience, group, push_request, summaries
from tests.integration.server import MakeServer, Server, eventually

ONCE = ClientOptions(retry=RetryOptions(max_attempts=1))
QUOTAS = """
[server]
max_streams = 5
max_streams_per_client = 3
max_waiting_samples_per_client = 2
max_pending_bytes = 4194304
max_buffers = 5
[access]
file = "{access}"
"""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as executor:
        yield executor


@pytest.fixture
def client(shared_server: Server) -> Iterator[Client]:
    with Client(shared_server.address, timeout=20) as connected:
        yield connected


def blocking(client: Client, name: str, **changes: Any) -> None:
    """A buffer of three experiences in which pushes wait for room."""
    fields: dict[str, Any] = {"max_items": 3, "on_full": "block"}
    create(client, name, **(fields | changes))


def num_waiting(client: Client, name: str) -> int:
    return stats(client, name).num_waiting_pushes


def wait_for_line(client: Client, name: str, length: int) -> None:
    eventually(lambda: num_waiting(client, name) == length, f"{length} pushes to wait")


def test_pushes_wait_in_line_until_acks_make_room(
    client: Client, stub: Any, name: str, pool: ThreadPoolExecutor
) -> None:
    blocking(client, name)
    client.push(group(0, 3), buffer=name)
    waiting: list[Future[Any]] = []
    for task in (1, 2):
        waiting.append(pool.submit(client.push, group(task, 2), buffer=name))
        wait_for_line(client, name, task)
    words = stats(client, name).pushes_wait_for
    assert words.startswith("2 pushes of")
    assert "3 + 2 exceed max_items = 3" in words
    assert client.push(group(0, 2), buffer=name).num_duplicates == 2, "repeats don't wait"
    client.sample(2, buffer=name).ack()
    assert waiting[0].result(20).num_stored == 2
    client.sample(2, buffer=name).ack()
    assert waiting[1].result(20).num_stored == 2
    assert [one.uid.split("/")[1] for one in summaries(stub, name)] == ["1", "2", "2"]
    assert num_waiting(client, name) == 0


QUEUE_OF_8 = ConsumerConfig("trainer", limiter=Limiter(min_diff=0, max_diff=8))
NARROW: dict[str, dict[str, Any]] = {
    "max_items": {"max_items": 14},
    "max_items, waiting": {"max_items": 10, "on_full": "block"},
    "max_items, evicting": {"max_items": 10, "on_full": "evict"},
    "max_bytes": {"max_bytes": 10_000, "on_full": "block"},
    "limiter": {"consumers": (QUEUE_OF_8,)},
    "limiter of bytes": {
        "consumers": (ConsumerConfig("trainer", limiter=Limiter(max_ahead_bytes=3_000)),)
    },
}


@pytest.mark.parametrize("by", ["push", "writer"])
@pytest.mark.parametrize("narrow", NARROW)
def test_what_is_too_much_at_once_goes_in_parts(
    client: Client, shared_server: Server, connect: Any, name: str, narrow: str, by: str
) -> None:
    """Nothing is lost, whoever makes the requests, as long as somebody takes from the buffer."""
    client.create_buffer(BufferConfig(name, group_by="none", **NARROW[narrow]))
    rollouts = group(0, 28)
    got: set[str] = set()
    done = threading.Event()

    def train() -> None:
        batch = None
        while batch or not done.is_set():
            batch = client.sample(7, buffer=name, min_batch_size=1, timeout=0.2)
            got.update(batch.uids)
            batch.ack()

    trainer = threading.Thread(target=train)
    if "evict" not in narrow:
        trainer.start()
    with connect(shared_server.address, timeout=60) as pusher:
        if by == "writer":
            with pusher.writer(buffer=name) as writer:
                writer.append(rollouts[:13])
                for each in rollouts[13:]:
                    writer.append(each)
            assert writer.counts.num_stored == 28
        else:
            assert pusher.push(rollouts, buffer=name).num_stored == 28
    done.set()
    if "evict" in narrow:
        return
    trainer.join(60)
    assert got == {each.eid.uid for each in rollouts}


@pytest.mark.parametrize("by", ["push", "writer"])
def test_one_that_never_fits_is_named_with_the_limit(
    shared_server: Server, connect: Any, name: str, by: str
) -> None:
    with connect(shared_server.address, timeout=20) as client:
        client.create_buffer(BufferConfig(name, group_by="none", max_bytes=6_000))
        large = experience(0, 1, response_text="x" * 7_000)
        pushed = [experience(0, 0), large, experience(0, 2)]
        words = r"7/0/1/0/c0ffee.* is over max_bytes = 6000 .*raise max_bytes"
        writer = client.writer(buffer=name)
        if by == "writer":
            writer.append(pushed)
        with pytest.raises(PushRefusedError, match=words):
            writer.close() if by == "writer" else client.push(pushed, buffer=name)
        assert stats(client, name).num_items == 2


def test_the_wait_ends_with_the_time_and_with_the_call(
    shared_server: Server, client: Client, name: str, pool: ThreadPoolExecutor
) -> None:
    blocking(client, name, full_timeout_seconds=0.3)
    client.push(group(0, 3), buffer=name)
    with Client(shared_server.address, options=ONCE) as once:
        with pytest.raises(BufferFullError, match=r"after 0\.\d s in line: 3 \+ 1") as refused:
            once.push(group(1, 1), buffer=name)
        assert refused.value.retry_delay_seconds == 1.0
        client.update_buffer(name, full_timeout_seconds=600.0)
        with pytest.raises(BufferFullError, match="in line"):
            once.push(group(1, 1), buffer=name, timeout=0.7)
    with shared_server.stub() as stub:
        call = stub.Push.future(push_request(name, group(1, 1)))
        wait_for_line(client, name, 1)
        call.cancel()
        wait_for_line(client, name, 0)
        stream = stub.PushStream(
            iter([service_pb2.PushStreamRequest(push=push_request(name, group(1, 1)))])
        )
        wait_for_line(client, name, 1)
        stream.cancel()
        wait_for_line(client, name, 0)
    waiting = pool.submit(client.push, group(1, 1), buffer=name)
    wait_for_line(client, name, 1)
    client.update_buffer(name, max_items=4)
    assert waiting.result(20).num_stored == 1


def test_a_stream_keeps_its_order_while_it_waits(client: Client, stub: Any, name: str) -> None:
    blocking(client, name)
    client.push(group(0, 2), buffer=name)
    sizes = [2, 1, 1, 2]
    requests = [
        service_pb2.PushStreamRequest(sequence=task, push=push_request(name, group(task, size)))
        for task, size in enumerate(sizes, start=1)
    ]
    responses = stub.PushStream(iter(requests))
    wait_for_line(client, name, 4)
    answers = []
    reader = threading.Thread(target=lambda: answers.extend(responses))
    reader.start()
    while reader.is_alive():
        client.sample(1, buffer=name, timeout=0.05).ack()
    assert [answer.sequence for answer in answers] == [1, 2, 3, 4]
    assert [len(answer.response.outcomes) for answer in answers] == sizes


def test_a_stopping_server_ends_the_wait_at_once(
    make_server: MakeServer, name: str, pool: ThreadPoolExecutor
) -> None:
    server = make_server()
    with Client(server.address) as client, Client(server.address, options=ONCE) as once:
        blocking(client, name, full_timeout_seconds=600.0)
        client.push(group(0, 3), buffer=name)
        waiting = pool.submit(once.push, group(1, 1), buffer=name)
        wait_for_line(client, name, 1)
        started = time.monotonic()
        assert server.stop() == 0
        with pytest.raises(UnavailableError, match="waited for room"):
            waiting.result(20)
        assert time.monotonic() - started < 8


# --- quotas


@pytest.fixture
def guarded(make_server: MakeServer, tmp_path: Path) -> Server:
    """A server with narrow quotas that tells clients "a" and "b" apart by their tokens."""
    access = tmp_path / "access.toml"
    access.touch(mode=0o600)
    access.write_text(
        "".join(
            f'[[grants]]\nname = "{name}"\nroles = ["push", "sample", "operate", "metrics"]\n'
            f'token_sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            for name in "ab"
        ),
        encoding="utf-8",
    )
    return make_server(toml=QUOTAS.format(access=access))


def token(name: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {name}"),)


def refused(call: Callable[[], Any]) -> tuple[str, str, float]:
    """The code and text of a failed call, and after how many seconds to try again."""
    code, message, details = error_of(call)
    assert details["ErrorInfo"].domain == "experience_buffer"
    delay = details["RetryInfo"].retry_delay
    return code, message, delay.seconds + delay.nanos / 1e9


def test_streams_of_one_client_leave_room_for_others(guarded: Server, name: str) -> None:
    with guarded.stub() as stub, Client(guarded.address, token="b") as other:
        create(other, name)
        request = service_pb2.WatchPolicyVersionRequest(buffer=name)
        watch = functools.partial(stub.WatchPolicyVersion, request)
        streams = [watch(metadata=token("a")) for _ in range(3)]
        for stream in streams:
            next(stream)
        code, message, delay = refused(lambda: next(watch(metadata=token("a"))))
        assert (code, delay) == ("RESOURCE_EXHAUSTED", 1.0)
        assert "client 'a' has 3 open streams" in message
        assert "server.max_streams_per_client is 3" in message
        others = [watch(metadata=token("b")) for _ in range(2)]
        for stream in others:
            next(stream)
        code, message, _ = refused(lambda: next(watch(metadata=token("b"))))
        assert (code, "server.max_streams is 5" in message) == ("RESOURCE_EXHAUSTED", True)
        assert other.push(group(0, 1), buffer=name).num_stored == 1, "calls are served"
        streams[0].cancel()

        def opens() -> bool:
            stream = watch(metadata=token("a"))
            try:
                next(stream)
            except grpc.RpcError:
                return False
            return True

        eventually(opens, "a place for another stream")


def test_waiting_samples_of_one_client_leave_room_for_others(
    guarded: Server, name: str, pool: ThreadPoolExecutor
) -> None:
    with Client(guarded.address, token="b") as other, guarded.stub() as stub:
        create(other, name)
        request = service_pb2.SampleRequest(
            buffer=name, consumer="trainer", batch_size=1, timeout_seconds=60
        )
        calls = [stub.Sample.future(request, metadata=token("a")) for _ in range(2)]

        def num_calls() -> int:
            return other.get_stats(name).buffers[0].consumers[0].num_waiting

        eventually(lambda: num_calls() == 2, "both to wait")
        code, message, delay = refused(lambda: stub.Sample(request, metadata=token("a")))
        assert (code, delay) == ("RESOURCE_EXHAUSTED", 1.0)
        assert "server.max_waiting_samples_per_client is 2" in message
        waiting = pool.submit(other.sample, 1, buffer=name, timeout=20.0)
        eventually(lambda: num_calls() == 3, "another's to wait")
        other.push(group(0, 3), buffer=name)
        assert waiting.result(20).num_units == 1
        assert [call.result().num_units for call in calls] == [1, 1]


def test_a_flood_of_a_full_buffer_leaves_room_for_all_else(guarded: Server, name: str) -> None:
    text = "z" * 200_000
    with Client(guarded.address, token="b") as other, guarded.stub() as stub:
        blocking(other, name, full_timeout_seconds=600.0)
        create(other, "calm")
        other.push(group(0, 3), buffer=name)
        requests = [push_request(name, [experience(1, run, info={"t": text})]) for run in range(9)]
        calls = [stub.Push.future(request, metadata=token("a")) for request in requests]
        eventually(lambda: sum(call.done() for call in calls) == 4, "the flood to be bounded")
        wait_for_line(other, name, 5)
        for call in calls:
            if call.done():
                code, message, delay = refused(call.result)
                assert (code, delay) == ("RESOURCE_EXHAUSTED", 1.0)
                assert "of 2097152: half of server.max_pending_bytes" in message
        large = [experience(2, 0, info={"t": "z" * 3_500_000})]
        stub.Push(push_request("calm", large), metadata=token("a"))
        for run in range(20):
            one = [experience(3, run, info={"t": text})]
            assert other.push(one, buffer="calm").num_stored == 1
        metric = f'pushes_held_back_total{{buffer="{name}",reason="line_share"}} 4.0'
        assert metric in guarded.metrics("a")
        for call in calls:
            call.cancel()
        wait_for_line(other, name, 0)
        last = stub.Push.future(requests[0], metadata=token("a"))
        wait_for_line(other, name, 1)
        last.cancel()


def test_pushes_that_wait_take_little_more_than_they_are(
    make_server: MakeServer, name: str
) -> None:
    server = make_server()
    with Client(server.address) as client, server.stub() as stub:
        blocking(client, name, max_items=60, full_timeout_seconds=600.0)
        client.push(group(0, 60), buffer=name)
        before = _memory_bytes(server)
        calls, size = [], 0
        for task in range(1, 16):
            request = push_request(name, group(task, 60, info={"t": "z" * 350_000}))
            size += request.ByteSize()
            calls.append(stub.Push.future(request))
        wait_for_line(client, name, 15)
        assert size < 8_000_000
        # Stored they are 315 MB; reading one takes 21 MB for a moment, and leaves free pages.
        assert _memory_bytes(server) - before < 150_000_000
        for call in calls:
            call.cancel()


def _memory_bytes(server: Server) -> int:
    """The server's own memory, beyond the page cache."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def test_buffers_are_bounded(guarded: Server) -> None:
    with Client(guarded.address, token="a", options=ONCE) as client:
        for number in range(4):
            client.create_buffer(f"more-{number}")
        with pytest.raises(ResourceExhaustedError, match=r"server\.max_buffers is 5"):
            client.create_buffer("one-too-many")
        client.delete_buffer("more-1")
        client.create_buffer("one-too-many")


# --- what a payload may ask for


METADATA = """
[server]
max_metadata_bytes = 100000
max_metadata_depth = 6
max_metadata_nodes = 3000
max_header_bytes = 9000
max_tensors = 9
"""


def test_metadata_is_bounded_and_what_is_accepted_can_be_read(
    make_server: MakeServer, name: str
) -> None:
    server = make_server(toml=METADATA)
    deep: Any = 1
    for _ in range(4):
        deep = [deep]
    fields = {f"x{number}": torch.arange(13) for number in range(6)}
    good = experience(1, 0, info={"deep": deep, "text": "z" * 90_000}, **_extra(fields))
    with Client(server.address, options=ONCE) as client, server.stub() as stub:
        create(client, name)
        assert client.push([good], buffer=name).num_stored == 1
        for bad, message in (
            ({"info": {"deep": [deep]}}, "nested more than 6 deep (max_metadata_depth)"),
            (_extra(fields | {"y": torch.arange(2)}), "10 tensors exceed the limit of 9"),
        ):
            outcomes = stub.Push(
                push_request(name, trxp.encode([experience(2, 0, **bad), experience(2, 1)]))
            ).outcomes
            assert message in outcomes[0].message
            assert outcomes[1].status in (1, 2), "its neighbour is stored"
        for bad, message in (
            ({"info": {"text": "z" * 100_000}}, "exceeds the limit of 100000 (max_metadata_bytes)"),
            ({"info": {"list": list(range(3000))}}, "more than 3,000 values (max_metadata_nodes)"),
            (_extra({"n" * 9000: torch.arange(1)}), "exceeds the limit of 9000 (max_header_bytes)"),
        ):
            request = push_request(name, [experience(3, 0, **bad)])
            code, text, details = error_of(functools.partial(stub.Push, request))
            assert (code, message in text) == ("INVALID_ARGUMENT", True), text
            assert "RetryInfo" not in details, "sending it again can't help"
        for form in ("trxp", "packed"):
            batch = client.sample(1, buffer=name, format=form)
            row = batch.packed.of(0) if form == "packed" else batch.experiences[0]
            assert row.info["text"] == "z" * 90_000
            batch.nack()


def _extra(fields: dict[str, Any]) -> dict[str, Any]:
    """Tensors beside the three of every experience."""
    return {"extra": fields}
