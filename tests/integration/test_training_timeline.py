"""A trainer that dies by SIGKILL, anywhere, learns from every group once on the timeline that stays.

Real trainers with the real client, real checkpoints on disk. What the trainer knew is in journals
outside the server; what it has learned is in its last checkpoint.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from experience_buffer import (
    Client,
)
from experience_buffer.values import BufferStats, ConsumerStats
from tests.integration import plain
from tests.integration.buffers import create, stats, trainer
from tests.integration.server import MakeServer, Server, eventually
from tests.integration.timeline_job import Job
from tests.integration.timeline_trainer import (
    BATCH_GROUPS,
    FIRST_RANK_POINTS,
    GROUP_SIZE,
    NUM_STEPS,
    OPTIONS,
    POINTS,
)

NUM_GROUPS = NUM_STEPS * BATCH_GROUPS
STEP_EXPERIENCES = BATCH_GROUPS * GROUP_SIZE
MAX_SAVE_EVERY = 7


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes jobs with a folder of their own; all are ended."""
    made: list[Job] = []

    def make(address: str, buffer: str, **options: Any) -> Job:
        made.append(Job(address, buffer, tmp_path / f"job-{len(made)}", **options))
        return made[-1]

    yield make
    for job in made:
        job.close()


def push_all(client: Client, buffer: str) -> set[str]:
    """Push all groups, 20 at a time; their keys."""
    tasks = range(NUM_GROUPS)
    for first in range(0, NUM_GROUPS, 20):
        groups = [plain.group(task, GROUP_SIZE) for task in tasks[first : first + 20]]
        client.push([one for group in groups for one in group], buffer=buffer)
    return {plain.experience(task, 0).eid.tid for task in tasks}


def stats_of(client: Client, buffer: str) -> tuple[BufferStats, ConsumerStats]:
    """The buffer's statistics and its trainer's."""
    return stats(client, buffer), trainer(client, buffer)


def check_bounds(client: Client, buffer: str, *, keep: int) -> None:
    """Everything up to the safe step has left, all else is there, and it is not much."""

    def has_left() -> bool:
        stats, consumer = stats_of(client, buffer)
        safe = -1 if consumer.safe_step is None else consumer.safe_step
        return stats.num_items == STEP_EXPERIENCES * (NUM_STEPS - safe - 1)

    eventually(has_left, "what is safe to leave, and nothing else")
    _, consumer = stats_of(client, buffer)
    # It may have died before it declared safe what it kept, and did so before its last step.
    most_steps = (keep + 1) * MAX_SAVE_EVERY
    assert consumer.num_retained_experiences <= STEP_EXPERIENCES * most_steps


def check_nothing_is_left(client: Client, buffer: str) -> None:
    """All is consumed and nothing stored."""
    stats, consumer = stats_of(client, buffer)
    assert (consumer.last_step, consumer.safe_step) == (NUM_STEPS - 1, NUM_STEPS - 1)
    assert (consumer.num_ready_units, consumer.num_leased_units, consumer.num_leases) == (0, 0, 0)
    assert (consumer.num_retained_experiences, stats.num_items, stats.num_bytes) == (0, 0, 0)


def check_learned(job: Job, everything: set[str]) -> None:
    """Every group once."""
    learned = job.learned()
    assert len(learned) == len(set(learned)), "a group was trained twice on the surviving timeline"
    assert set(learned) == everything


def some_deaths(
    chance: random.Random, number: int, points: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Where a trainer dies, in order of the steps: at the points, or a while after them."""
    # The last steps are left for the life that comes to its end.
    steps = sorted(chance.randrange(NUM_STEPS - 2 * MAX_SAVE_EVERY) for _ in range(number))
    return [
        {
            "death_step": step,
            "death_point": chance.choice(points),
            "death_delay": chance.choice([0.0, chance.uniform(0.0002, 0.01)]),
            "save_every": chance.randint(1, MAX_SAVE_EVERY),
        }
        for step in steps
    ]


# --- the trainer dies


def test_a_trainer_killed_at_50_points_learns_from_every_group_once(
    shared_server: Server, make_job: Callable[..., Job], name: str
) -> None:
    chance = random.Random(50)
    with Client(shared_server.address) as client:
        for buffer in (name, f"{name}-undisturbed"):
            create(client, buffer, GROUP_SIZE)
            everything = push_all(client, buffer)
        undisturbed = make_job(shared_server.address, f"{name}-undisturbed")
        undisturbed.start(save_every=5, keep=1)
        undisturbed.expect_end()
        job = make_job(shared_server.address, name)
        for death in some_deaths(chance, 50, FIRST_RANK_POINTS):
            job.start(keep=2, is_spoiled=chance.random() < 0.2, **death)
            job.expect_death()
            check_bounds(client, name, keep=2)
        job.start(save_every=5, keep=2)
        job.expect_end()
        check_nothing_is_left(client, name)
    check_learned(undisturbed, everything)
    check_learned(job, set(undisturbed.learned()))
    lives = job.ranks[0].events("resumed")
    assert len({life["step"] for life in lives}) > 25, "it was hardly ever killed in between"
    assert job.num_trained() > NUM_STEPS + 25, "hardly a step was undone"


def test_trainer_and_server_killed_while_a_worker_pushes(
    make_server: MakeServer, make_job: Callable[..., Job]
) -> None:
    chance = random.Random(151)
    server = make_server()
    pushed: set[str] = set()
    with Client(server.address, options=OPTIONS) as client:
        create(client, "b", GROUP_SIZE)
        worker = threading.Thread(target=lambda: pushed.update(push_all(client, "b")))
        worker.start()
        job = make_job(server.address, "b")
        for number, death in enumerate(some_deaths(chance, 15, FIRST_RANK_POINTS)):
            job.start(keep=1, **death)
            if number % 2:
                kill_in_between(server, job, chance.randint(0, 6))
            job.expect_death()
            if number % 5 == 4:
                server.restart()
        job.start(save_every=5, keep=1)
        job.expect_end()
        worker.join()
        check_nothing_is_left(client, "b")
        server.restart()
        check_nothing_is_left(client, "b")
    check_learned(job, pushed)
    assert job.num_trained() > NUM_STEPS, "no step was undone"


def kill_in_between(server: Server, job: Job, num_steps: int) -> None:
    """Kill the server some steps from now; the trainer, if it still lives, goes on by itself."""

    def is_time() -> bool:
        return job.num_trained() >= goal or job.ranks[0].process.poll() is not None

    goal = job.num_trained() + num_steps
    eventually(is_time, f"{num_steps} steps", seconds=60)
    server.restart()


def test_two_ranks_killed_together_learn_from_every_group_once(
    make_server: MakeServer, make_job: Callable[..., Job]
) -> None:
    chance = random.Random(15)
    server = make_server()
    with Client(server.address, options=OPTIONS) as client:
        create(client, "b", GROUP_SIZE)
        everything = push_all(client, "b")
        job = make_job(server.address, "b", world_size=2)
        for number, death in enumerate(some_deaths(chance, 15, POINTS)):
            job.start(victim=number % 2, keep=1, **death)
            if number % 4 == 3:
                kill_in_between(server, job, chance.randint(0, 6))
            job.expect_death(number % 2)
            check_bounds(client, "b", keep=1)
        job.start(save_every=5, keep=1)
        job.expect_end()
        check_nothing_is_left(client, "b")
    check_learned(job, everything)
    assert job.num_trained() > NUM_STEPS, "no step was undone"
    for rank in job.ranks:
        assert sum(map(len, rank.timeline().values())) >= NUM_STEPS, "one rank had too little"
