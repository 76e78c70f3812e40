"""Workers, trainers and the server die by SIGKILL; nothing that was promised breaks.

What the processes knew is in journals outside the server. Every acknowledged push, every delivery
and every acknowledgement is checked against them, one by one.
"""

from __future__ import annotations

import functools
import random
import signal
from collections.abc import Callable
from pathlib import Path

from experience_buffer.v1 import config_pb2
from tests.integration import kill_worker
from tests.integration.journals import (
    GROUP_SIZE,
    LEASE_SECONDS,
    Process,
    acked_pushes,
    check_contents,
    check_deliveries,
    member,
    wait_for_more,
    write_work,
)
from tests.integration.plain import DUPLICATE, create, push, sample, states, stats, statuses
from tests.integration.server import Server, eventually

# --- P1, P2: what was acknowledged is there, whole and once


def test_no_acknowledged_push_is_lost(
    make_server: Callable[..., Server], spawn: Callable[..., Process], tmp_path: Path
) -> None:
    chance = random.Random(20261121)
    server = make_server()
    with server.stub() as stub:
        create(stub, "b", group_by=config_pb2.GROUP_BY_NONE)
    num_pushes, num_members = 350, 2
    works = [
        write_work(
            tmp_path / f"work-{worker}",
            [
                [member(1000 * worker + i, run) for run in range(num_members)]
                for i in range(num_pushes)
            ],
        )
        for worker in range(3)
    ]
    workers = [
        spawn("push", server.address, "b", tmp_path / f"work-{worker}") for worker in range(3)
    ]
    checked: set[str] = set()
    for number in range(5):
        wait_for_more(lambda: len(acked_pushes(workers)), chance.randint(20, 90), "pushes")
        server.die(with_children=number % 2 == 0)
        if number in (1, 3):
            workers[number % 3].kill()
        # They stand still while what they know is compared with what is there.
        for worker in workers:
            worker.signal(signal.SIGSTOP)
        server.start()
        with server.stub() as stub:
            check_contents(stub, works, acked_pushes(workers), checked)
        for worker in workers:
            worker.signal(signal.SIGCONT)
        if number in (1, 3):
            workers[number % 3].start()
    for worker in workers:
        eventually(functools.partial(worker.events, "done"), "the worker to be done", seconds=60)
    for worker in workers:
        worker.kill()
    refused = [entry for worker in workers for entry in worker.events("acked") if entry["messages"]]
    assert not refused
    server.restart()
    with server.stub() as stub:
        check_contents(stub, works, acked_pushes(workers), checked)
        assert stats(stub, "b").num_items == 3 * num_pushes * num_members
    repeats = [
        entry
        for worker in workers
        for entry in worker.events("acked")
        if "PUSH_STATUS_DUPLICATE" in entry["statuses"]
    ]
    assert repeats, "no push was repeated: the test has shown nothing of P2"


# --- P2 to P4 with everything dying


def test_delivery_survives_the_death_of_everyone(
    make_server: Callable[..., Server], spawn: Callable[..., Process], tmp_path: Path
) -> None:
    chance = random.Random(19)
    num_groups = 600
    server = make_server()
    consumers = {"actor": "group", "critic": "item"}
    with server.stub() as stub:
        create(stub, "b", group_size=GROUP_SIZE, estimator="grpo", consumers=consumers)
    for half in range(2):
        # Two workers hold two members each of every group; a push has members of three groups.
        pushes = [
            [member(task, run) for task in range(first, first + 3) for run in (half, half + 2)]
            for first in range(0, num_groups, 3)
        ]
        write_work(tmp_path / f"work-{half}", pushes)
    trainers = {
        "actor": [spawn("train", server.address, "b", "actor", 3, LEASE_SECONDS) for _ in range(2)],
        "critic": [spawn("train", server.address, "b", "critic", 11, LEASE_SECONDS)],
    }
    everyone = [*trainers["actor"], *trainers["critic"]]
    eventually(lambda: all(one.events("ready") for one in everyone), "the trainers to be there")
    workers = [spawn("push", server.address, "b", tmp_path / f"work-{half}") for half in range(2)]

    def num_acks() -> int:
        return sum(len(one.events("acked")) for one in everyone)

    victims: list[list[Process]] = [
        [],
        [everyone[0]],
        [workers[0]],
        [everyone[2], workers[1]],
        [everyone[1]],
    ]
    for number in range(5):
        wait_for_more(lambda: len(acked_pushes(workers)), chance.randint(30, 60), "pushes")
        server.die(with_children=number % 2 == 0)
        for victim in victims[number]:
            victim.kill()
        # They stand still until the trainers have caught up: each round is to find work left.
        for worker in workers:
            worker.signal(signal.SIGSTOP)
        server.start()
        for victim in victims[number]:
            victim.start()
        wait_for_more(num_acks, chance.randint(3, 9), "acks")
        for worker in workers:
            worker.signal(signal.SIGCONT)
    for worker in workers:
        eventually(functools.partial(worker.events, "done"), "the worker to be done", seconds=60)
    with server.stub() as stub:
        eventually(lambda: stats(stub, "b").num_items == 0, "everything consumed", seconds=60)
        assert states(stub, "b") == []
    for process in everyone:
        process.kill()
    for consumer, processes in trainers.items():
        check_deliveries(processes, num_groups, by_group=consumers[consumer] == "group")
    server.restart()
    with server.stub() as stub:
        for half in range(2):
            for payload in kill_worker.read_work(tmp_path / f"work-{half}"):
                assert set(statuses(push(stub, "b", payload))) == {DUPLICATE}
        assert stats(stub, "b").num_items == 0
        for consumer in consumers:
            nothing = sample(stub, "b", 1, consumer=consumer, timeout_seconds=0)
            assert not nothing.experiences
