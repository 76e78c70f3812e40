"""Sample streams: credits, byte credits, extensions, windows, fairness, notes, cancellation."""

from __future__ import annotations

import math
from collections import Counter

import grpc
import pytest

from experience_buffer import (
    AsyncClient,
    BufferConfig,
    Client,
    ConsumerConfig,
    DeadlineExceededError,
    Experience,
    LeaseNotFoundError,
    trxp,
)
from experience_buffer.v1 import service_pb2
from tests.integration.buffers import create, trainer
from tests.integration.plain import experience, group, uids
from tests.integration.server import Server, Stub, eventually
from tests.integration.streams import SpokenStream, speaking


def leased(client: Client, name: str) -> int:
    """How many units are leased."""
    return trainer(client, name).num_leased_units


def large(run: int, num_bytes: int = 100_003) -> Experience:
    """An experience of about so many bytes."""
    return experience(0, run, response_text="z" * num_bytes)


def size_of(one: Experience) -> int:
    """Its payload bytes."""
    return len(trxp.encode([one]))


def nothing_more(stream: SpokenStream, client: Client, name: str, count: int) -> None:
    """No batch is on its way: an answer comes next, and so many units are leased."""
    error = stream.settle(nack=service_pb2.NackLeases(ids=[999_999]))
    assert error is not None
    assert leased(client, name) == count


# --- credits


def test_byte_credits_bound_what_is_sent_ahead(client: Client, stub: Stub, name: str) -> None:
    """Reverb bounds items in flight; large experiences need a bound in bytes as well."""
    create(client, name)
    client.push([large(run) for run in range(6)], buffer=name)
    size = size_of(large(0))
    with speaking(stub) as stream:
        stream.say(open=service_pb2.SampleStreamOpen(buffer=name, consumer="trainer", batch_size=1))
        stream.say(byte_credits=2 * size + 1)
        stream.say(credits=6)
        batches = [stream.batch() for _ in range(3)]
        assert [batch.last.batch_bytes for batch in batches] == [size] * 3, "one may exceed them"
        nothing_more(stream, client, name, 3)
        # 2 * size + 1 - 3 * size is below 0; a grant that brings it above 0 lets one more go.
        stream.say(byte_credits=size - 1)
        nothing_more(stream, client, name, 3)
        stream.say(byte_credits=1)
        assert stream.batch().uids == [large(3).eid.uid]
        nothing_more(stream, client, name, 4)


def test_the_clients_stream_bounds_what_it_reads_ahead(client: Client, name: str) -> None:
    create(client, name)
    client.push([large(run) for run in range(6)], buffer=name)
    with client.stream(1, buffer=name, prefetch=6, max_bytes=size_of(large(0))) as stream:
        batch = next(stream)
        assert leased(client, name) <= 2, "the one that was taken, and one ahead"
        seen = [batch.uids[0]]
        batch.ack()
        for _ in range(5):
            batch = next(stream)
            seen.append(batch.uids[0])
            batch.ack()
    assert seen == [large(run).eid.uid for run in range(6)]


def test_frames_are_bounded_and_say_the_rest_at_the_end(
    client: Client, stub: Stub, name: str
) -> None:
    create(client, name)
    pushed = [large(run, 400_009) for run in range(7)]
    client.push(pushed, buffer=name)
    client.publish_policy_version(4, buffer=name)
    with speaking(stub) as stream:
        stream.open(name, 7, credits=1)
        received = stream.batch()
    for frame in received.frames:
        num_bytes = sum(len(one.payload) for one in frame.experiences)
        assert num_bytes <= 1024 * 1024
        assert frame.lease.id == received.lease
        last = frame is received.last
        assert (frame.last, frame.num_units, frame.HasField("policy_version")) == (
            last,
            7 if last else 0,
            last,
        )
    assert len(received.frames) == 4
    assert received.uids == [one.eid.uid for one in pushed]
    assert received.last.batch_bytes == sum(size_of(one) for one in pushed)


# --- leases on a stream


def test_leases_are_extended_by_call_and_on_the_stream(
    client: Client, stub: Stub, name: str
) -> None:
    create(client, name)
    client.push(group(0, 3), buffer=name)
    kept = client.sample(1, buffer=name, lease_seconds=9)
    assert kept.extend(60) > 50
    assert kept.extend(1) > 50, "never earlier than it would have"
    with speaking(stub) as stream:
        stream.open(name, 1, credits=2, lease_seconds=1.0)
        extended, expired = stream.batch(), stream.batch()
        extension = service_pb2.ExtendLeaseRequest(lease_id=extended.lease, lease_seconds=60)
        assert stream.settle(extend=extension) is None
        eventually(lambda: leased(client, name) == 2, "the third to expire")
        error = stream.ack(expired.lease)
        assert error is not None
        assert "was expired" in error.message
        assert error.code == grpc.StatusCode.NOT_FOUND.value[0]
        assert stream.ack(extended.lease, step=3) is None
        extension.lease_id = extended.lease
        assert stream.settle(extend=extension) is not None, "it has ended"
    kept.ack()
    with pytest.raises(LeaseNotFoundError):
        client.extend_lease(kept.lease_id, buffer=name, lease_seconds=5)
    assert trainer(client, name).last_step == 3


def test_the_window_in_experiences_holds_batches_back_until_an_ack(
    client: Client, stub: Stub, name: str
) -> None:
    create(client, name, max_leased_experiences=4)
    client.push(group(0, 9), buffer=name)
    with speaking(stub) as stream:
        stream.open(name, 2, credits=4, timeout_seconds=0.1)
        batches = [stream.batch(), stream.batch()]
        note = stream.next().waiting
        assert "4 experiences are leased and max_leased_experiences is 4" in note
        assert leased(client, name) == 4
        stream.say(ack=service_pb2.AckLeases(ids=[batches[0].lease]))
        message = stream.next()
        while message.WhichOneof("message") != "frame":
            message = stream.next()
        assert uids(message.frame) == [one.eid.uid for one in group(0, 9)[4:6]]


def test_the_window_in_bytes_lets_one_batch_go_whatever_its_size(client: Client, name: str) -> None:
    size = size_of(large(0))
    create(client, name, max_leased_bytes=size // 2)
    client.push([large(run) for run in range(3)], buffer=name)
    first = client.sample(2, buffer=name)
    assert len(first) == 2, "one batch may always be leased"
    nothing = client.sample(1, buffer=name, timeout=0)
    assert f"{2 * size} bytes are leased and max_leased_bytes is {size // 2}" in nothing.shortfall
    first.ack()
    assert len(client.sample(1, buffer=name)) == 1


# --- several streams, ends


def test_streams_of_one_consumer_share_fairly(client: Client, stub: Stub, name: str) -> None:
    """An early read must not starve the others: who waits longest is served first."""
    create(client, name)
    with speaking(stub) as one, speaking(stub) as two, speaking(stub) as three:
        streams = (one, two, three)
        for stream in streams:
            stream.open(name, 2, credits=100)
        eventually(lambda: trainer(client, name).num_waiting == 3, "all to wait")
        counts: Counter[int] = Counter()
        for turn in range(6):
            client.push(group(turn, 6), buffer=name)
            for number, stream in enumerate(streams):
                batch = stream.batch()
                counts[number] += len(batch.uids)
            eventually(lambda: trainer(client, name).num_waiting == 3, "all to wait")
        assert counts == {0: 12, 1: 12, 2: 12}


def test_a_cancelled_stream_loses_nothing(client: Client, stub: Stub, name: str) -> None:
    create(client, name)
    client.push([large(run) for run in range(20)], buffer=name)
    seen: set[str] = set()
    for turn in range(8):
        with speaking(stub) as stream:
            stream.open(name, 2, credits=turn + 1)
            # The first of the frames may be all that is read, or not even that.
            if turn % 2:
                seen.update(stream.batch().uids)
        eventually(lambda: leased(client, name) == 0, "its leases to come back")
    everything = client.sample(20, buffer=name)
    assert set(everything.uids) == {large(run).eid.uid for run in range(20)}
    assert seen <= set(everything.uids)


async def test_who_waits_for_ever_gets_its_acks(shared_server: Server, name: str) -> None:
    with Client(shared_server.address, timeout=math.inf) as client:
        create(client, name)
        client.push(group(0, 4), buffer=name)
        with client.stream(2, buffer=name) as stream:
            assert next(stream).ack() == 0
    async with (
        AsyncClient(shared_server.address, timeout=math.inf) as asynchronous,
        asynchronous.stream(2, buffer=name) as batches,
    ):
        assert await (await anext(batches)).ack() == 0


# --- why nothing comes


def test_a_first_batch_that_does_not_come_raises_with_the_reason(client: Client, name: str) -> None:
    """Trinity's users (182): "get_batch hangs, no log, how can we debug"."""
    client.create_buffer(BufferConfig(name, group_size=4))
    client.push(group(0, 3), buffer=name)
    client.update_buffer(name, consumers=(ConsumerConfig("trainer", "group"),))
    with (
        client.stream(1, buffer=name, timeout=0.1, first_timeout=0.4) as stream,
        pytest.raises(DeadlineExceededError, match=r"oldest open group '7/0' has 3 of 4"),
    ):
        next(stream)


def test_a_removed_consumer_ends_its_stream(client: Client, stub: Stub, name: str) -> None:
    create(client, name)
    with speaking(stub) as stream:
        stream.open(name, 1, credits=1)
        eventually(lambda: trainer(client, name).num_waiting, "the stream to wait")
        client.update_buffer(name, consumers=(ConsumerConfig("other"),))
        with pytest.raises(grpc.RpcError) as caught:
            stream.next()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
