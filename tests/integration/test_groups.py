"""Groups over plain gRPC: whole, stated, sealed, dropped, late, overdue, with tombstones."""

from __future__ import annotations

import grpc
import pytest

from experience_buffer import EID
from experience_buffer.v1 import config_pb2, service_pb2, types_pb2
from tests.integration.plain import (
    DUPLICATE,
    REFUSED,
    STORED,
    ack,
    create,
    decode,
    experience,
    group,
    push,
    sample,
    states,
    stats,
    statuses,
)
from tests.integration.server import Stub, eventually


def test_groups_are_whole_and_never_mixed(stub: Stub, name: str) -> None:
    create(stub, name, group_size=3, consumers={"trainer": "group"})
    by_task = {task: group(task, 3) for task in range(5)}
    for run in range(3):
        # Every push holds one member of each group.
        push(stub, name, [by_task[task][run] for task in (3, 0, 4, 1, 2)])
    assert stats(stub, name).consumers[0].num_ready_units == 5
    response = sample(stub, name, 5)
    assert response.num_units == 5
    delivered = [(one.group, one.uid) for one in response.experiences]
    assert delivered == [
        (f"7/{task}", member.eid.uid) for task in (3, 0, 4, 1, 2) for member in by_task[task]
    ]


def test_items_of_an_estimated_buffer_wait_for_their_group(stub: Stub, name: str) -> None:
    create(stub, name, group_size=3, estimator="grpo")
    push(stub, name, group(0, 2))
    assert states(stub, name) == ["waiting_for_group"] * 2
    assert "2 of 3" in sample(stub, name, 1, timeout_seconds=0).shortfall
    push(stub, name, [experience(0, 2)])
    assert len(sample(stub, name, 3).experiences) == 3


def test_a_tombstone_completes_its_group_and_has_no_vote(stub: Stub, name: str) -> None:
    create(stub, name, group_size=3, estimator="rloo", consumers={"trainer": "group"})
    failed = EID(batch=7, task=0, run=2, step=0, suffix="dead")
    outcomes = push(stub, name, group(0, 2), tombstones=[(failed, "environment crashed")])
    assert statuses(outcomes) == [STORED] * 3
    assert outcomes[2].uid == failed.uid
    response = sample(stub, name, 1)
    assert [one.eid.run for one in decode(response)] == [0, 1]
    advantages = [one.advantages for one in decode(response)]
    assert [a.tolist()[0] for a in advantages if a is not None] == pytest.approx([-1 / 3, 1 / 3])
    found = stub.Get(service_pb2.GetRequest(buffer=name, uid=failed.uid))
    assert found.summary.state == types_pb2.EXPERIENCE_STATE_TOMBSTONE
    assert (found.summary.message, found.payload) == ("environment crashed", b"")
    assert ack(stub, name, response) == 2
    assert states(stub, name) == []
    again = push(stub, name, group(0, 2), tombstones=[(failed, "environment crashed")])
    assert statuses(again) == [DUPLICATE] * 3


def test_a_late_member_is_refused_or_opens_a_new_group(stub: Stub, name: str) -> None:
    create(stub, name, group_size=2, consumers={"trainer": "group"})
    push(stub, name, group(0, 2))
    late = push(stub, name, [experience(0, 2), experience(1, 0)])
    assert statuses(late) == [REFUSED, STORED]
    assert late[0].reason == types_pb2.REFUSAL_REASON_LATE
    assert "'7/0' is whole with 2 of 2" in late[0].message
    ack(stub, name, sample(stub, name, 1))
    after = push(stub, name, [experience(0, 3)])
    assert after[0].reason == types_pb2.REFUSAL_REASON_LATE, "its group was consumed"
    update = service_pb2.UpdateBufferRequest()
    update.config.name = name
    update.config.late_members = config_pb2.LATE_POLICY_NEW_GROUP
    update.update_mask.paths.append("late_members")
    stub.UpdateBuffer(update)
    assert statuses(push(stub, name, [experience(0, 2), experience(0, 3)])) == [STORED] * 2
    assert [one.eid.run for one in decode(sample(stub, name, 1))] == [2, 3]


def test_a_push_states_the_size_of_its_groups(stub: Stub, name: str) -> None:
    create(stub, name, consumers={"trainer": "group"})
    push(stub, name, group(0, 2))
    assert statuses(push(stub, name, [experience(0, 2)], group_size=5)) == [STORED]
    other = push(stub, name, [experience(0, 3), experience(1, 0)], group_size=7)
    assert statuses(other) == [REFUSED, STORED]
    assert other[0].reason == types_pb2.REFUSAL_REASON_GROUP_SIZE
    assert statuses(push(stub, name, [experience(0, 3), experience(0, 4)])) == [STORED] * 2
    assert len(sample(stub, name, 1).experiences) == 5


def test_a_sealed_group_is_whole(stub: Stub, name: str) -> None:
    create(stub, name, group_size=7, estimator="grpo", consumers={"trainer": "group"})
    push(stub, name, group(0, 3))
    sealed = stub.SealGroup(service_pb2.SealGroupRequest(buffer=name, group="7/0"))
    assert (sealed.num_members, sealed.group_size) == (3, 3)
    assert len(sample(stub, name, 1).experiences) == 3
    push(stub, name, group(1, 2))
    sealed = stub.SealGroup(service_pb2.SealGroupRequest(buffer=name, group="7/1", group_size=3))
    assert (sealed.num_members, sealed.group_size) == (2, 3)
    assert not sample(stub, name, 1, timeout_seconds=0).experiences
    push(stub, name, [experience(1, 2)])
    assert len(sample(stub, name, 1).experiences) == 3
    with pytest.raises(grpc.RpcError) as caught:
        stub.SealGroup(service_pb2.SealGroupRequest(buffer=name, group="7/none"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_dropped_group_is_gone_and_stays_gone(stub: Stub, name: str) -> None:
    create(stub, name, group_size=3, consumers={"trainer": "group"})
    push(stub, name, group(0, 2))
    push(stub, name, group(1, 3))
    request = service_pb2.DropGroupRequest(buffer=name, group="7/0", reason="task aborted")
    assert stub.DropGroup(request).num_dropped == 2
    request.group = "7/1"
    assert stub.DropGroup(request).num_dropped == 3
    assert states(stub, name) == []
    assert not sample(stub, name, 1, timeout_seconds=0).experiences
    request.group = "7/2"
    assert stub.DropGroup(request).num_dropped == 0, "nothing of it came yet"
    outcomes = push(stub, name, [experience(0, 2), experience(2, 0), experience(3, 0)])
    assert statuses(outcomes) == [REFUSED, REFUSED, STORED]
    assert "was dropped" in outcomes[0].message


@pytest.mark.parametrize("policy", ["USE_PARTIAL", "DROP", "WAIT"])
def test_what_happens_at_the_deadline_of_a_group(stub: Stub, name: str, policy: str) -> None:
    create(
        stub,
        name,
        group_size=5,
        group_deadline_seconds=0.2,
        on_group_deadline=getattr(config_pb2, f"DEADLINE_POLICY_{policy}"),
        min_group_size=2,
        estimator="grpo",
        consumers={"trainer": "group"},
    )
    push(stub, name, [*group(0, 3), *group(1, 1)])
    if policy == "USE_PARTIAL":
        assert [one.eid.task for one in decode(sample(stub, name, 1))] == [0, 0, 0]
        eventually(lambda: len(states(stub, name)) == 3, "the group below min_group_size to go")
    elif policy == "DROP":
        eventually(lambda: states(stub, name) == [], "the groups to be dropped")
    else:
        eventually(lambda: stats(stub, name).num_overdue_groups == 2, "the groups to be overdue")
        assert statuses(push(stub, name, [experience(0, 3), experience(0, 4)])) == [STORED] * 2
        assert len(sample(stub, name, 1).experiences) == 5
        assert stats(stub, name).num_overdue_groups == 1
    if policy != "WAIT":
        late = push(stub, name, [experience(0, 4)])
        assert late[0].reason == types_pb2.REFUSAL_REASON_LATE
