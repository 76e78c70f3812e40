"""What a server finds in its store after it was killed, beside what the model of a buffer compares."""

from __future__ import annotations

from experience_buffer import trxp
from experience_buffer.v1 import service_pb2
from tests.integration.plain import (
    DUPLICATE,
    NONE,
    REFUSED,
    STORED,
    ack,
    create,
    experience,
    group,
    push,
    sample,
    states,
    statuses,
    uids,
)
from tests.integration.server import MakeServer, command


def test_sets_are_the_same_to_the_next_process(make_server: MakeServer) -> None:
    """Of texts they come in another order in each process, and so the payload that it writes."""
    server = make_server()
    info = {"tags": set("abcdefghij"), "more": [frozenset(("x", "y", 1, None, (2, "z")))]}
    repeated = [experience(1, run, info=info) for run in range(3)]
    with server.stub() as stub:
        create(stub, "b", group_by=NONE)
        assert statuses(push(stub, "b", repeated[:2])) == [STORED] * 2
        ack(stub, "b", sample(stub, "b", 1))
    server.restart()
    with server.stub() as stub:
        assert statuses(push(stub, "b", repeated)) == [DUPLICATE, DUPLICATE, STORED]
        kept = stub.Get(service_pb2.GetRequest(buffer="b", uid=repeated[1].eid.uid))
        assert trxp.decode(kept.payload)[0].info == info
        other = experience(1, 1, info=info | {"tags": set("abcdefghik")})
        assert statuses(push(stub, "b", [other])) == [REFUSED]
    server.stop()
    done = command("verify", "--data", server.data)
    assert done.returncode == 0, done.stdout + done.stderr


# --- advantages over a crash


def test_whole_groups_without_advantages_are_computed_after_a_crash(
    make_server: MakeServer,
) -> None:
    # The first life waits a minute for more groups to share a launch with.
    slow = {"EXPERIENCE_BUFFER_COMPUTE__MAX_LATENCY_SECONDS": "60"}
    server = make_server(environment=slow)
    with server.stub() as stub:
        create(stub, "b", group_size=3, estimator="rloo", consumers={"trainer": "group"})
        push(stub, "b", [*group(0, 3), *group(1, 2)])
        assert states(stub, "b") == ["computing"] * 3 + ["waiting_for_group"] * 2
    server.environment = {}
    server.restart()
    with server.stub() as stub:
        assert uids(sample(stub, "b", 1)) == [one.eid.uid for one in group(0, 3)]
        assert statuses(push(stub, "b", [experience(1, 2)])) == [STORED]
        assert len(sample(stub, "b", 1).experiences) == 3
    server.restart()
    with server.stub() as stub:
        assert states(stub, "b") == ["leased"] * 6
