"""At a limit: large messages, many items, a stopped server."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from experience_buffer import (
    BufferConfig,
    Client,
    ClientOptions,
    InvalidRequestError,
    PushRefusedError,
    Tombstone,
    WriterOptions,
    trxp,
)
from experience_buffer.v1 import service_pb2
from tests.integration.buffers import config
from tests.integration.plain import (
    NONE,
    STORED,
    create,
    error_of,
    experience,
    group,
    push,
    push_request,
    sample,
    stats,
    statuses,
)
from tests.integration.server import MakeServer, Server, eventually

SMALL = """
[server]
max_message_bytes = 1000000
max_push_items = 7
"""


@pytest.fixture
def small(make_server: MakeServer, name: str) -> Iterator[Server]:
    """A server with narrow limits."""
    server = make_server(toml=SMALL)
    with server.stub() as stub:
        create(stub, name, group_by=NONE)
    yield server
    with server.stub() as stub:
        assert stats(stub, name).name == name, "the server goes on"


def big(run: int, num_bytes: int) -> Any:
    return experience(0, run, info={"text": "z" * num_bytes})


def test_a_message_over_the_limit_names_limit_and_setting(small: Server, name: str) -> None:
    with small.stub() as stub:
        for num_bytes in (1_000_003, 1_900_001):
            code, message, _ = error_of(functools.partial(push, stub, name, [big(0, num_bytes)]))
            assert code == "RESOURCE_EXHAUSTED"
            assert "server.max_message_bytes is 1000000" in message
        # Far above it is cut off by gRPC, which knows no settings.
        code, message, _ = error_of(lambda: push(stub, name, [big(0, 9_000_011)]))
        assert (code, "larger than max" in message) == ("RESOURCE_EXHAUSTED", True)
        request = service_pb2.PushStreamRequest(push=push_request(name, [big(0, 1_000_003)]))
        code, message, _ = error_of(lambda: list(stub.PushStream(iter([request]))))
        assert (code, "max_message_bytes is 1000000" in message) == ("RESOURCE_EXHAUSTED", True)
        assert statuses(push(stub, name, [big(1, 900_001)])) == [STORED]


@pytest.mark.parametrize("by", ["push", "raw push", "writer"])
@pytest.mark.parametrize(
    ("num_bytes", "max_message_bytes"),
    [(2_000_003, 1_000_000), (1_000_003, 1 << 26), (9_000_011, 1 << 26)],
)
def test_one_over_the_message_limit_is_named_and_its_neighbours_are_stored(
    small: Server, name: str, connect: Any, by: str, num_bytes: int, max_message_bytes: int
) -> None:
    options = ClientOptions(max_message_bytes=max_message_bytes, max_push_bytes=32 * 1024 * 1024)
    pushed = [experience(0, 0), big(1, num_bytes), experience(0, 2)]
    with connect(small.address, timeout=20, options=options) as client:
        writer = client.writer(buffer=name, options=WriterOptions(max_batch_bytes=32 * 1024 * 1024))

        def push_all() -> None:
            if by == "writer":
                with writer:
                    writer.append(pushed)
            else:
                client.push(trxp.encode(pushed) if by == "raw push" else pushed, buffer=name)

        with pytest.raises(PushRefusedError, match=r"7/0/1/0/c0ffee.*max_message_bytes") as caught:
            push_all()
        assert [each.index for each in caught.value.result.refused] == [1]
        assert client.get_stats(name).buffers[0].num_items == 2


@pytest.mark.parametrize("by", ["push", "raw push", "tombstones", "writer"])
def test_more_than_the_server_takes_at_once_goes_in_parts(
    small: Server, name: str, connect: Any, by: str
) -> None:
    pushed = group(0, 23)
    with connect(small.address, timeout=20) as client:
        if by == "writer":
            with client.writer(buffer=name) as writer:
                writer.append(pushed)
        elif by == "tombstones":
            name += "-grouped"
            client.create_buffer(BufferConfig(name, group_size=30))
            dead = [Tombstone(each.eid, "gone") for each in pushed]
            assert client.push([], buffer=name, tombstones=dead).num_stored == 23
        else:
            raw = trxp.encode(pushed) if by == "raw push" else pushed
            result = client.push(raw, buffer=name)
            assert [each.uid for each in result.outcomes] == [each.eid.uid for each in pushed]
        found = [each.uid for each in client.list(buffer=name)]
        assert sorted(found) == sorted(each.eid.uid for each in pushed)


def test_too_many_items_in_a_push(small: Server, name: str) -> None:
    with small.stub() as stub:
        code, message, _ = error_of(lambda: push(stub, name, group(0, 11)))
        assert (code, "server.max_push_items is 7" in message) == ("INVALID_ARGUMENT", True)


def test_what_a_group_shares_is_stored_with_each(make_server: MakeServer, name: str) -> None:
    """A prompt with an image travels once per push."""
    messages = [{"role": "user", "content": "A" * 1_400_000}]
    server = make_server()
    with Client(server.address) as client:
        client.create_buffer(config(name))
        rollouts = group(0, 32, info={"messages": messages})
        assert client.push(rollouts, buffer=name).num_stored == 32
        rollouts = group(1, 60, info={"messages": messages})
        with pytest.raises(InvalidRequestError, match="push the group in parts") as refused:
            client.push(rollouts, buffer=name)
        assert "server.max_message_bytes" in str(refused.value)
        options = ClientOptions(max_push_items=30)
        with Client(server.address, options=options) as careful:
            assert careful.push(rollouts, buffer=name).num_stored == 60


def test_a_unit_larger_than_a_response_is_left_to_streams(small: Server, name: str) -> None:
    with small.stub() as stub:
        create(stub, "groups", group_size=2, consumers={"trainer": "group"})
        for run in range(2):
            push(stub, "groups", [big(run, 700_001)])
        code, message, _ = error_of(lambda: sample(stub, "groups", 1))
        assert (code, "use a stream" in message) == ("RESOURCE_EXHAUSTED", True)
        with Client(small.address) as client, client.stream(1, buffer="groups") as stream:
            assert len(next(stream)) == 2


def test_a_stream_waits_where_acks_make_room(make_server: MakeServer, name: str) -> None:
    server = make_server(toml="[server]\nmax_leased_experiences = 2\n")
    with Client(server.address) as client:
        client.create_buffer(config(name))
        client.push([experience(0, run) for run in range(5)], buffer=name)
        with client.stream(1, buffer=name, prefetch=5) as batches:
            taken = [next(batches), next(batches)]
            eventually(lambda: "max_leased_experiences is 2" in batches.waiting, "a note says why")
            while len(taken) < 5:
                taken[len(taken) - 2].ack()
                taken.append(next(batches))
            assert len({batch.uids for batch in taken}) == 5

        def counts() -> tuple[int, int]:
            consumer = client.get_stats(name).buffers[0].consumers[0]
            return consumer.num_acked_units, consumer.num_redelivered_units

        eventually(lambda: counts() == (3, 2), "what wasn't acknowledged is offered again")
