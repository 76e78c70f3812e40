"""From push to sample over plain gRPC: items, waits, repeats, conflicts."""

from __future__ import annotations

from experience_buffer import trxp
from experience_buffer.v1 import service_pb2, types_pb2
from tests.integration.plain import (
    DUPLICATE,
    NONE,
    REFUSED,
    STORED,
    ack,
    create,
    decode,
    experience,
    group,
    push,
    sample,
    stats,
    statuses,
    uids,
)
from tests.integration.server import MakeServer, Stub

# --- items


def test_items_come_back_bit_for_bit_oldest_first(stub: Stub, name: str) -> None:
    create(stub, name, group_by=NONE)
    pushed = group(0, 7)
    assert statuses(push(stub, name, pushed)) == [STORED] * 7
    first, second = sample(stub, name, 3), sample(stub, name, 4)
    assert uids(first) + uids(second) == [one.eid.uid for one in pushed]
    payloads = [one.payload for one in (*first.experiences, *second.experiences)]
    assert payloads == trxp.split(trxp.encode(pushed))
    assert (first.num_units, first.shortfall, first.lease.consumer) == (3, "", "trainer")
    assert 0 < first.lease.expires_in_seconds <= 600
    assert {one.group for one in first.experiences} == {""}
    assert (ack(stub, name, first), ack(stub, name, first)) == (3, 3)
    assert stats(stub, name).num_items == 4


def test_a_shortfall_says_why(stub: Stub, name: str) -> None:
    create(stub, name, group_size=5, consumers={"trainer": "group"})
    push(stub, name, group("whole", 5))
    push(stub, name, group("partial", 3))
    response = sample(stub, name, 2, timeout_seconds=0.3)
    assert not response.experiences
    assert not response.HasField("lease")
    for part in ("0 of 2 groups", "1 ready of 2", "1 group incomplete", "'7/partial' has 3 of 5"):
        assert part in response.shortfall
    response = sample(stub, name, 2, min_batch_size=1, timeout_seconds=0.3)
    assert response.num_units == 1
    assert response.shortfall.startswith("1 of 2 groups after waiting 0.3 s")
    assert "1 leased and not acknowledged" in sample(stub, name, 1, timeout_seconds=0).shortfall


def test_a_wait_ends_before_the_deadline_of_its_call(stub: Stub, name: str) -> None:
    create(stub, name)
    request = service_pb2.SampleRequest(
        buffer=name, consumer="trainer", batch_size=1, timeout_seconds=60.0
    )
    assert "nothing is stored" in stub.Sample(request, timeout=0.7).shortfall


# --- repeats


def test_repeats_are_recognised_also_when_consumed_and_after_a_restart(
    make_server: MakeServer, name: str
) -> None:
    server = make_server()
    pushed = group(0, 3)
    with server.stub() as stub:
        create(stub, name, group_by=NONE)
        assert statuses(push(stub, name, [*pushed, pushed[0]])) == [STORED] * 3 + [DUPLICATE]
        assert statuses(push(stub, name, pushed)) == [DUPLICATE] * 3
        assert ack(stub, name, sample(stub, name, 2)) == 2
        assert statuses(push(stub, name, pushed)) == [DUPLICATE] * 3
    assert server.stop() == 0
    server.start()
    with server.stub() as stub:
        assert statuses(push(stub, name, pushed)) == [DUPLICATE] * 3
        assert uids(sample(stub, name, 1)) == [pushed[2].eid.uid]
        changed = experience(0, 0, reward=0.625)
        outcome = push(stub, name, [changed])[0]
        assert (outcome.status, outcome.reason) == (REFUSED, types_pb2.REFUSAL_REASON_CONFLICT)
        assert "was consumed with other content" in outcome.message


def test_the_same_uid_with_other_content_is_refused_alone(stub: Stub, name: str) -> None:
    create(stub, name, group_by=NONE)
    push(stub, name, [experience(0, 1)])
    in_one_push = experience(0, 2, reward=0.375)
    outcomes = push(
        stub,
        name,
        [experience(0, 0), experience(0, 1, reward=0.125), experience(0, 2), in_one_push],
    )
    assert statuses(outcomes) == [STORED, REFUSED, STORED, REFUSED]
    for index in (1, 3):
        assert outcomes[index].reason == types_pb2.REFUSAL_REASON_CONFLICT
        assert outcomes[index].uid == f"7/0/{index if index == 1 else 2}/0/c0ffee"
    rewards = {one.eid.run: one.reward for one in decode(sample(stub, name, 3))}
    assert rewards == {1: 1 / 3, 0: 0.0, 2: 2 / 3}
