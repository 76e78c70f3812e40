"""Leases, consumers and sample streams over plain gRPC."""

from __future__ import annotations

import grpc
import pytest

from experience_buffer.v1 import service_pb2
from tests.integration.plain import (
    NONE,
    ack,
    create,
    group,
    push,
    sample,
    states,
    stats,
    uids,
)
from tests.integration.server import Stub, eventually
from tests.integration.streams import speaking

# --- leases


def test_nacked_and_expired_leases_are_delivered_again(stub: Stub, name: str) -> None:
    create(stub, name, group_by=NONE)
    push(stub, name, group(0, 3))
    first = sample(stub, name, 2)
    nack = service_pb2.NackRequest(buffer=name, lease_id=first.lease.id, reason="out of memory")
    assert stub.Nack(nack).num_experiences == 2
    assert stub.Nack(nack).num_experiences == 2
    second = sample(stub, name, 3, lease_seconds=0.3)
    assert uids(second) == [one.eid.uid for one in group(0, 3)], "in their old places"
    assert [one.num_deliveries for one in second.experiences] == [2, 2, 1]
    third = sample(stub, name, 3)
    assert uids(third) == uids(second)
    assert [one.num_deliveries for one in third.experiences] == [3, 3, 2]
    for lease, word in ((first.lease.id, "nacked"), (second.lease.id, "expired")):
        with pytest.raises(grpc.RpcError) as caught:
            stub.Ack(service_pb2.AckRequest(buffer=name, lease_id=lease))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert f"was {word}" in (caught.value.details() or "")
    assert ack(stub, name, third) == 3
    assert stats(stub, name).consumers[0].num_redelivered_units == 5
    with pytest.raises(grpc.RpcError) as caught:
        stub.Ack(service_pb2.AckRequest(buffer=name, lease_id=4999))
    assert "is not known" in (caught.value.details() or "")


def test_every_consumer_sees_everything_once(stub: Stub, name: str) -> None:
    create(stub, name, group_size=3, consumers={"actor": "group", "critic": "item"})
    push(stub, name, [*group(0, 3), *group(1, 3)])
    everything = [one.eid.uid for task in range(2) for one in group(task, 3)]
    actor = sample(stub, name, 2, consumer="actor")
    assert uids(actor) == everything
    assert ack(stub, name, actor) == 6
    critic = [sample(stub, name, 2, consumer="critic") for _ in range(3)]
    assert [uid for batch in critic for uid in uids(batch)] == everything
    assert states(stub, name) == ["leased"] * 6
    assert [ack(stub, name, batch) for batch in critic] == [2] * 3
    assert states(stub, name) == [], "retired when the last consumer has acknowledged"
    for consumer in ("actor", "critic"):
        assert not sample(stub, name, 1, consumer=consumer, timeout_seconds=0).experiences


def test_a_consumer_added_later_sees_what_is_there(stub: Stub, name: str) -> None:
    create(stub, name, group_by=NONE, consumers={"actor": "item"})
    push(stub, name, group(0, 5))
    ack(stub, name, sample(stub, name, 2, consumer="actor"))
    update = service_pb2.UpdateBufferRequest()
    update.config.name = name
    for consumer in ("actor", "late"):
        update.config.consumers.add(name=consumer)
    update.update_mask.paths.append("consumers")
    stub.UpdateBuffer(update)
    late = sample(stub, name, 3, consumer="late")
    assert uids(late) == [one.eid.uid for one in group(0, 5)[2:]]


# --- streams


def test_a_stream_delivers_one_batch_per_credit(stub: Stub, name: str) -> None:
    create(stub, name, group_by=NONE)
    push(stub, name, group(0, 17))
    with speaking(stub) as stream:
        stream.open(name, 3, credits=2)
        batches = [stream.batch() for _ in range(2)]
        assert [len(batch.uids) for batch in batches] == [3, 3]
        # An ack is answered behind what was sent before it: no third batch is on its way.
        stream.say(ack=service_pb2.AckLeases(ids=[batches[0].lease]))
        assert stream.next().lease_result.lease_id == batches[0].lease
        assert stats(stub, name).consumers[0].num_leased_units == 3
        stream.say(credits=1)
        received = stream.batch()
        found, last = received.uids, received.last
        assert found == [one.eid.uid for one in group(0, 17)[6:9]]
        assert (last.num_units, last.shortfall) == (3, "")
        stream.say(nack=service_pb2.NackLeases(ids=[received.lease]))
        assert not stream.next().lease_result.HasField("error")
        stream.say(credits=1)
        assert stream.batch().uids == found
    eventually(lambda: stats(stub, name).consumers[0].num_leased_units == 0, "leases to come back")
    assert stats(stub, name).num_items == 14


def test_a_stream_says_what_it_waits_for_and_takes_less_in_time(stub: Stub, name: str) -> None:
    create(stub, name, group_size=2, consumers={"trainer": "group"})
    with speaking(stub) as stream:
        stream.open(name, 2, credits=1, min_batch_size=1, timeout_seconds=0.2)
        assert "nothing is stored" in stream.next().waiting
        push(stub, name, [*group(0, 2), *group(1, 1)])
        message = stream.next()
        while message.WhichOneof("message") == "waiting":
            message = stream.next()
        assert len(message.frame.experiences) == 2
        assert "oldest open group '7/1' has 1 of 2" in message.frame.shortfall


@pytest.mark.parametrize("opening", ["none", "credits", "batch_size", "buffer", "consumer"])
def test_a_stream_that_opens_badly_is_told_why(stub: Stub, name: str, opening: str) -> None:
    create(stub, name)
    with speaking(stub) as stream:
        match opening:
            case "none":
                stream.end()
                assert list(stream.call) == []
                return
            case "credits":
                stream.say(credits=1)
                expected = (grpc.StatusCode.INVALID_ARGUMENT, "must be open")
            case "batch_size":
                stream.open(name, 0)
                expected = (grpc.StatusCode.INVALID_ARGUMENT, "batch_size 0")
            case "buffer":
                stream.open("no-such", 1)
                expected = (grpc.StatusCode.NOT_FOUND, "no buffer 'no-such'")
            case _:
                stream.open(name, 1, consumer="nobody")
                expected = (grpc.StatusCode.NOT_FOUND, "no consumer 'nobody'")
        with pytest.raises(grpc.RpcError) as caught:
            stream.next()
        assert caught.value.code() is expected[0]
        assert expected[1] in (caught.value.details() or "")
