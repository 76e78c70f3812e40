"""The advantage worker: what survives its death, and whom a failing job touches."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from experience_buffer import trxp
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.compute.worker import compute_launch
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.runtime.child_process import Child, ChildGoneError
from experience_buffer_server.settings.server import ComputeSection
from tests.unit.buffer_verbs import unlooked_at
from tests.unit.builders import NUM_RESPONSE, World, experience, payload, push, uid, until

RLOO: dict[str, Any] = {"group_size": 2, "advantage": {"estimator": "rloo"}}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """With a worker that can be killed."""
    world = World(tmp_path / "store", worker_process=True)
    await world.open()
    yield world
    await world.close()


async def idle_worker(world: World) -> tuple[Buffer, Child]:
    """A buffer, and the worker that has computed its first group."""
    buffer = await world.computing(push((0, 0), (0, 1)), **RLOO)
    await until(lambda: not buffer.flow.computing.num_jobs)
    child = world.computer._child
    assert child is not None
    return buffer, child


@pytest.mark.parametrize("end", ["is killed", "never ends"])
async def test_jobs_of_a_gone_worker_are_computed_by_the_next(world: World, end: str) -> None:
    buffer, child = await idle_worker(world)
    assert child._clock is None, "it is at work on nothing"
    if end == "never ends":
        child._limit_seconds = 0.2
    os.kill(child.pid, signal.SIGSTOP)
    for task in range(1, 5):
        await buffer.push(push((task, 0), (task, 1)))
    if end == "is killed":
        await until(lambda: len(child._unanswered) == 2)
        os.kill(child.pid, signal.SIGKILL)
    await until(lambda: not buffer.flow.computing.num_jobs)
    assert child.gone
    assert world.computer._child is not child
    assert len(buffer.state.consumers["trainer"].ready) == 10
    assert not any(entry.quarantine for entry in buffer.state.contents)


async def test_a_worker_that_compiles_is_not_taken_for_one_that_never_ends(world: World) -> None:
    buffer, child = await idle_worker(world)
    child._limit_seconds = 0.05
    child.be_patient(600.0)
    os.kill(child.pid, signal.SIGSTOP)
    await buffer.push(push((1, 0), (1, 1)))
    await until(lambda: child._clock is not None)
    assert child._clock is not None
    assert child._clock.when() - asyncio.get_running_loop().time() > 500
    os.kill(child.pid, signal.SIGCONT)
    await until(lambda: not buffer.flow.computing.num_jobs)
    assert not child.gone


async def test_a_worker_that_cannot_start_is_not_the_fault_of_the_groups(world: World) -> None:
    world.computer._settings = ComputeSection(device="no such device")
    buffer = await world.computing(push((0, 0), (0, 1)), **RLOO)
    starting = world.computer._starting
    await until(lambda: starting.locked())
    world.computer._settings = ComputeSection()
    await until(lambda: not buffer.flow.computing.num_jobs)
    assert not any(entry.quarantine for entry in buffer.state.contents)
    assert len(buffer.state.consumers["trainer"].ready) == 2


async def test_a_job_that_kills_the_worker_is_given_up_and_its_neighbours_go_on(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Whenever a worker is at work on the culprit alone, or in company, it dies."""
    buffer = await world.create(**RLOO)
    for task in range(3):
        await buffer.push(push((task, 0), (task, 1)))
    (lane,) = world.computer._lanes.values()
    (culprit,) = lane[1].jobs
    culprit.runs = [["no text"]] * 2  # type: ignore[list-item]  # the worker ends with a TypeError
    world.computer.start()
    with caplog.at_level(logging.ERROR):
        await until(lambda: not buffer.flow.computing.num_jobs)
    deaths = [text for text in caplog.messages if "the advantage worker died" in text]
    assert deaths
    assert all("ended with status 1" in text for text in deaths), deaths
    quarantined = [entry.record.tid for entry in buffer.state.contents if entry.quarantine]
    assert quarantined == ["2/1", "2/1"]
    assert len(buffer.state.consumers["trainer"].ready) == 4


async def test_a_group_that_cannot_be_computed_is_quarantined_alone(world: World) -> None:
    """Deleting the member at fault frees the rest."""
    buffer = await world.computing(group_size=2, advantage={"estimator": "reinforce"})
    bad = experience(5, 0, reward=None, token_level_reward=[float("nan")] * NUM_RESPONSE)
    with unlooked_at():
        await buffer.push(Push(payloads=[trxp.encode([bad, experience(6, 0)])]))
    await until(lambda: not buffer.flow.computing.num_jobs)
    entries = {entry.record.uid: entry for entry in buffer.state.contents}
    assert "token_level_reward" in entries[uid(5, 0)].quarantine
    assert entries[uid(6, 0)].available
    fresh: list[Entry] = list(world.reload(buffer).state.contents)
    assert [entry.available for entry in fresh] == [False, True]


async def test_a_damaged_or_missing_payload_fails_its_group_alone(world: World) -> None:
    buffer = await world.create()
    await buffer.push(Push(payloads=[payload((1, 0), (1, 1))]))
    request: dict[str, Any] = {
        "estimator": "rloo",
        "parameters": {},
        "groups": [[1, [(uid(9, 9), "")]], [1, [(uid(1, 0), ""), (uid(1, 1), "")]]],
        "batches": [0, 1],
        "counted": [True, True],
        "moments": None,
    }
    gone, sound = compute_launch(world.store, request, device="cpu", threads=1)["groups"]
    assert gone == {
        "error": f"its member '{uid(9, 9)}' can't be read: its payload is gone",
        "damaged": {uid(9, 9): "its payload is gone"},
    }
    assert len(sound["items"]) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "killed by SIGKILL"),
        (
            {"limit_seconds": 0.2},
            "for 0.2 s; the limit is compute.max_launch_seconds: raise it, or",
        ),
    ],
)
async def test_only_the_request_under_way_is_blamed_for_the_end(
    world: World, tmp_path: Path, options: dict[str, float], words: str
) -> None:
    module = "experience_buffer_server.buffer.compute.worker"
    child = await Child.start(module, str(tmp_path / "store"), "cpu", "1", "{}", **options)
    os.kill(child.pid, signal.SIGSTOP)
    requests = [asyncio.ensure_future(child.request({})) for _ in range(3)]
    await asyncio.sleep(0)
    if not options:
        os.kill(child.pid, signal.SIGKILL)
    ends = await asyncio.gather(*requests, return_exceptions=True)
    blamed = [end.was_running for end in ends if isinstance(end, ChildGoneError)]
    assert blamed == [True, False, False]
    assert words in str(ends[0])
    for _ in range(2):
        await child.close()
    assert child._clock is None
