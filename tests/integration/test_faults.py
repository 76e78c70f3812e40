"""A full, read-only, failing or slow disk, and clocks that jump, under a real server.

The faults come from a small library in front of the C library, see `tests/faults`: they are switched
on and off while the server runs.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from experience_buffer import EID, Experience
from experience_buffer.v1 import config_pb2, service_pb2
from tests.faults.full_disk import MEBI, check_full, large
from tests.faults.shim import Faults, build
from tests.integration.plain import (
    NONE,
    STORED,
    ack,
    create,
    error_of,
    group,
    push,
    push_request,
    sample,
    states,
    statuses,
    uids,
)
from tests.integration.server import MakeServer, Server, eventually

DAY_SECONDS = 86_400.0
Ailing = Callable[..., tuple[Server, Faults]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fault library."""
    return build(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def ailing(tmp_path: Path, library: Path, make_server: MakeServer) -> Iterator[Ailing]:
    """Makes a server and its faults; it is started unless told otherwise."""
    made: list[Faults] = []

    def make(**options: Any) -> tuple[Server, Faults]:
        # `make_server` has this folder for its first server.
        faults = Faults(library, tmp_path / "server-0" / "data", tmp_path / "faults")
        made.append(faults)
        options["environment"] = faults.environment() | options.get("environment", {})
        return make_server(**options), faults

    yield make
    for faults in made:
        faults.close()


# --- no room


def test_a_full_disk_refuses_pushes_until_there_is_space(ailing: Ailing) -> None:
    server, faults = ailing()
    pid = server.pid
    faults.fill_disk()
    with server.stub() as stub:
        # The first space was set aside when the store was made.
        faults.fill_disk(full=False)
        create(stub, "first", group_by=NONE)
        assert statuses(push(stub, "first", [large(9999)])) == [STORED]
        # Large payloads take theirs when they come.
        faults.fill_disk(left_bytes=8 * MEBI)
        check_full(stub, lambda: faults.fill_disk(full=False), "the disk is full")
    assert server.pid == pid
    server.restart()
    with server.stub() as stub:
        assert uids(sample(stub, "first", 1)) == [large(9999).eid.uid]


def test_a_full_map_refuses_pushes_until_there_is_space(make_server: MakeServer) -> None:
    limit = {"EXPERIENCE_BUFFER_STORE__MAX_MAP_BYTES": str(16 * MEBI)}
    server = make_server(environment=limit)
    with server.stub() as stub:
        # Three experiences are consumed by then: that is the space.
        check_full(stub, lambda: None, "max_map_bytes")


# --- a disk that fails


def test_a_read_only_disk_stops_the_server_with_the_reason(ailing: Ailing) -> None:
    server, faults = ailing()
    with server.stub() as stub:
        create(stub, "b", group_by=NONE)
        assert statuses(push(stub, "b", group(0, 3))) == [STORED] * 3
        faults.fail_writes(errno.EROFS)
        code, _, _ = error_of(lambda: push(stub, "b", group(1, 3)))
        # A write of the server's own may have met the disk first, and the push its end.
        assert code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED")
        error_of(lambda: sample(stub, "b", 1))
    assert server.wait() == 1, "a supervisor is to start it again"
    assert any("the store has failed" in line and "Read-only" in line for line in server.log)
    with pytest.raises(AssertionError, match="it ended at once"):
        server.start()
    assert "Read-only" in server.log[-1]
    faults.fail_writes(0)
    server.start()
    with server.stub() as stub:
        assert uids(sample(stub, "b", 3)) == [one.eid.uid for one in group(0, 3)]


@pytest.mark.parametrize("times", [0, 1])
def test_nothing_is_acknowledged_after_a_failed_sync(ailing: Ailing, times: int) -> None:
    # What the system failed to write it may have forgotten: a second sync would find nothing to do.
    server, faults = ailing()
    acked: list[int] = []

    def push_on(first: int) -> str:
        with server.stub() as own:
            for task in range(first, first + 2000):
                try:
                    push(own, "b", group(task, 2))
                except grpc.RpcError as error:
                    return error.code().name
                acked.append(task)
        return "OK"

    with server.stub() as stub:
        create(stub, "b", group_by=NONE)
    with ThreadPoolExecutor(4) as pool:
        pushers = [pool.submit(push_on, 2000 * number) for number in range(4)]
        eventually(lambda: len(acked) > 20, "pushes")
        faults.fail_syncs(errno.EIO, times=times)
        assert server.wait() == 1, "a supervisor is to start it again"
        assert {pusher.result() for pusher in pushers} <= {"UNAVAILABLE", "CANCELLED"}
    [reason] = [line for line in server.log if "the store has failed" in line]
    assert "Input/output error" in reason
    faults.fail_syncs(0)
    server.start()
    with server.stub() as stub:
        everything = sample(stub, "b", 10_000, min_batch_size=1, timeout_seconds=0)
        stored = set(uids(everything))
        assert {one.eid.uid for task in acked for one in group(task, 2)} <= stored


@pytest.mark.parametrize("num_tokens", [10, 100_000], ids=["map", "file"])
def test_a_last_sync_that_fails_is_told(ailing: Ailing, num_tokens: int) -> None:
    later = '[store]\ndurability = "interval"\nsync_interval_seconds = 3600\n'
    server, faults = ailing(toml=later)
    with server.stub() as stub:
        create(stub, "b", group_by=NONE)
        one = Experience(
            eid=EID(task=1), tokens=torch.zeros(num_tokens, dtype=torch.int32), prompt_length=1
        )
        assert statuses(push(stub, "b", [one])) == [STORED]
    faults.fail_syncs(errno.EIO)
    assert server.stop() == 1, "what was acknowledged may be lost"
    [reason] = [line for line in server.log if "the store has failed" in line]
    assert "acknowledged data may be lost" in reason


def test_a_slow_disk_delays_what_it_has_to_keep_and_nothing_else(ailing: Ailing) -> None:
    delay_seconds = 0.5
    server, faults = ailing()
    with server.stub() as stub:
        create(stub, "b", group_by=NONE)
        push(stub, "b", group(0, 4))
        faults.delay_syncs(delay_seconds)

        def timed(call: Callable[[], object]) -> float:
            started = time.monotonic()
            call()
            return time.monotonic() - started

        assert timed(lambda: push(stub, "b", group(1, 1))) >= delay_seconds
        busy = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            pushes = pool.submit(_push_until, server, busy)
            name = group(0, 1)[0].eid.uid
            reads: list[Callable[[], object]] = [
                lambda: stub.Get(service_pb2.GetRequest(buffer="b", uid=name)),
                lambda: states(stub, "b"),
                lambda: stub.GetStats(service_pb2.GetStatsRequest(buffer="b")),
            ]
            for read in reads:
                assert min(timed(read) for _ in range(5)) < delay_seconds / 2
            # A lease and an acknowledgement are kept on disk; each waits for at most two commits.
            held = sample(stub, "b", 2)
            assert ack(stub, "b", held) == 2
            busy.set()
            assert pushes.result() > 0


def _push_until(server: Server, done: threading.Event) -> int:
    """Push all the time; how often."""
    count = 0
    with server.stub() as stub:
        while not done.is_set():
            stub.Push(push_request("b", group(100 + count, 2)))
            count += 1
    return count


# --- clocks


@pytest.mark.parametrize("jump_seconds", [DAY_SECONDS, -DAY_SECONDS])
def test_leases_and_deadlines_don_t_notice_that_the_clock_was_set(
    ailing: Ailing, jump_seconds: float
) -> None:
    server, faults = ailing()
    with server.stub() as stub:
        create(stub, "b", group_by=NONE)
        create(
            stub,
            "groups",
            consumers={"trainer": "group"},
            group_size=3,
            group_deadline_seconds=2.0,
            on_group_deadline=config_pb2.DEADLINE_POLICY_USE_PARTIAL,
        )
        push(stub, "b", group(0, 3))
        kept = sample(stub, "b", 2, lease_seconds=60)
        short = sample(stub, "b", 1, lease_seconds=1.5)
        push(stub, "groups", group(1, 2))
        faults.set_clock(jump_seconds)
        nothing = sample(stub, "b", 1, timeout_seconds=0.4)
        assert not nothing.experiences, "neither has expired"
        incomplete = sample(stub, "groups", 1, timeout_seconds=0)
        assert not incomplete.experiences
        began = time.monotonic()
        again = sample(stub, "b", 1, timeout_seconds=20)
        assert uids(again) == uids(short), "what was due expires in time"
        assert time.monotonic() - began < 10
        partial = sample(stub, "groups", 1, timeout_seconds=20)
        assert len(partial.experiences) == 2, "its deadline has passed"
        assert ack(stub, "b", kept) == 2


def test_a_clock_set_back_between_two_lives_keeps_no_lease_for_longer(ailing: Ailing) -> None:
    server, faults = ailing()
    with server.stub() as stub:
        create(stub, "b", group_by=NONE)
        push(stub, "b", group(0, 3))
        kept = sample(stub, "b", 1, lease_seconds=60)
        short = sample(stub, "b", 1, lease_seconds=3)
    server.die()
    faults.set_clock(-DAY_SECONDS)
    server.start()
    assert any("may have been set back" in line for line in server.log)
    with server.stub() as stub:
        assert uids(sample(stub, "b", 1)) == [group(0, 3)[2].eid.uid]
        assert uids(sample(stub, "b", 1, timeout_seconds=20)) == uids(short)
        assert ack(stub, "b", kept) == 1


def test_a_clock_set_forward_between_two_lives_loses_nothing(ailing: Ailing) -> None:
    server, faults = ailing()
    with server.stub() as stub:
        create(stub, "b", group_by=NONE)
        push(stub, "b", group(0, 3))
        held = sample(stub, "b", 2, lease_seconds=60)
    server.die()
    faults.set_clock(DAY_SECONDS)
    server.start()
    with server.stub() as stub:
        # For all that the server knows it was away for a day: the lease has expired.
        again = sample(stub, "b", 3, timeout_seconds=20)
        assert sorted(uids(again)) == sorted(one.eid.uid for one in group(0, 3))
        code, _, _ = error_of(lambda: ack(stub, "b", held))
        assert code == "NOT_FOUND"
        assert ack(stub, "b", again) == 3
