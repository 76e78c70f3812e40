"""Leases and advantages over the death of the server and of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import grpc
import pytest

from experience_buffer import trxp
from experience_buffer.v1 import config_pb2, service_pb2
from tests.integration.plain import (
    DUPLICATE,
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
from tests.integration.server import Server


def test_leases_hold_over_a_crash(make_server: Callable[..., Server]) -> None:
    server = make_server()
    with server.stub() as stub:
        create(stub, "b", group_size=2, consumers={"trainer": "group", "other": "item"})
        push(stub, "b", [one for task in range(5) for one in group(task, 2)])
        kept = sample(stub, "b", 2, lease_seconds=60)
        acked = sample(stub, "b", 1)
        assert ack(stub, "b", acked) == 2
        short = sample(stub, "b", 1, lease_seconds=5)
    server.restart()
    with server.stub() as stub:
        assert states(stub, "b") == ["ready"] * 10, "the other consumer has seen nothing"
        assert ack(stub, "b", acked) == 2, "an ack is idempotent over a crash"
        rest = sample(stub, "b", 3, min_batch_size=1, timeout_seconds=0)
        assert [one.group for one in rest.experiences] == ["7/4"] * 2
        assert "leased and not acknowledged" in rest.shortfall
        again = sample(stub, "b", 1)
        assert uids(again) == uids(short), "what expired comes again"
        assert [one.num_deliveries for one in again.experiences] == [2, 2]
        with pytest.raises(grpc.RpcError) as caught:
            ack(stub, "b", short)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert ack(stub, "b", kept) == 4, "granted before the crash"
        assert again.lease.id > rest.lease.id > short.lease.id, "ids are never used again"
    server.restart()
    with server.stub() as stub:
        nothing = sample(stub, "b", 1, timeout_seconds=0)
        assert not nothing.experiences
        assert "2 leased" in nothing.shortfall
        assert len(sample(stub, "b", 10, consumer="other").experiences) == 10


def test_sets_are_the_same_to_the_next_process(make_server: Callable[..., Server]) -> None:
    """Of texts they come in another order in each process, and so the payload that it writes."""
    server = make_server()
    info = {"tags": set("abcdefghij"), "more": [frozenset(("x", "y", 1, None, (2, "z")))]}
    repeated = [experience(1, run, info=info) for run in range(3)]
    with server.stub() as stub:
        create(stub, "b", group_by=config_pb2.GROUP_BY_NONE)
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
    command = [sys.executable, "-m", "experience_buffer_server", "verify", "--data"]
    done = subprocess.run([*command, str(server.data)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- advantages over a crash


def test_whole_groups_without_advantages_are_computed_after_a_crash(
    make_server: Callable[..., Server],
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


def test_the_process_that_computes_may_die(make_server: Callable[..., Server]) -> None:
    server = make_server()
    with server.stub() as stub:
        create(stub, "b", group_size=3, estimator="rloo")
        for task in range(3):
            push(stub, "b", group(task, 3))
            assert len(sample(stub, "b", 3).experiences) == 3
            for pid in server.children("compute.worker"):
                os.kill(pid, signal.SIGKILL)


def test_the_process_that_writes_may_die(make_server: Callable[..., Server]) -> None:
    server = make_server()
    with server.stub() as stub:
        create(stub, "b", group_by=config_pb2.GROUP_BY_NONE)
        push(stub, "b", group(0, 3))
        [writer] = server.children("lmdb.writer_process")
        os.kill(writer, signal.SIGKILL)
        assert server.wait() == 1, "a supervisor is to start it again"
    assert any("the store has failed" in line for line in server.log)
    server.start()
    with server.stub() as stub:
        assert uids(sample(stub, "b", 3)) == [one.eid.uid for one in group(0, 3)]
