"""What is too stale for one consumer, and what that leaves for others and for limiters."""

from __future__ import annotations

import pytest

from experience_buffer import trxp
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.push_reading import Push
from tests.unit.buffer_verbs import leased, sampled
from tests.unit.builders import World, experience


def of_version(version: int, run: int, task: int = 1) -> Push:
    one = experience(task, run, info={"model_version": version})
    return Push(payloads=[trxp.encode([one])])


async def take(buffer: Buffer, consumer: str, count: int) -> int:
    """How many units came, all of which are acknowledged."""
    lease, _ = await sampled(buffer, count, consumer)
    await buffer.drain()
    if lease is None:
        return 0
    await buffer.ack(lease.id)
    return lease.num_experiences


@pytest.mark.parametrize("num_first", [2, 4])
async def test_what_is_too_stale_for_one_consumer_tears_no_group_of_another(
    world: World, num_first: int
) -> None:
    picky = {"name": "picky", "staleness": {"max_lag": 0, "on_stale": "drop"}}
    consumers = [picky, {"name": "trainer", "unit": "group"}]
    buffer = await world.create(group_size=4, consumers=consumers)
    await buffer.publish(1)
    versions = [0, 0, 1, 1]
    for run, version in enumerate(versions[:num_first]):
        await buffer.push(of_version(version, run))
    assert await take(buffer, "picky", 4) == sum(versions[:num_first])
    for run, version in list(enumerate(versions))[num_first:]:
        await buffer.push(of_version(version, run))
    assert await take(buffer, "trainer", 1) == 4
    assert len(buffer.state.contents) == 4 - 2 - sum(versions[:num_first])


async def test_what_nobody_takes_as_a_group_is_dropped_alone(world: World) -> None:
    picky = {"name": "picky", "staleness": {"max_lag": 0, "on_stale": "drop"}}
    buffer = await world.create(group_size=2, consumers=[picky, "other"])
    await buffer.publish(1)
    for run in range(2):
        await buffer.push(of_version(run, run))
    assert await take(buffer, "picky", 2) == 1
    assert await take(buffer, "other", 2) == 1
    assert not len(buffer.state.contents)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("ratio", [0.5, 3.0])
async def test_a_limiter_waits_for_no_sample_of_what_was_passed_over(
    world: World, ratio: float, restarts: bool
) -> None:
    consumer = {
        "name": "trainer",
        "replay": True,
        "max_times_sampled": 3,
        "limiter": {"samples_per_insert": ratio, "min_diff": 0, "max_diff": 4 * max(ratio, 1)},
        "staleness": {"max_lag": 0, "on_stale": "keep"},
    }
    buffer = await world.create(group_by="none", consumers=[consumer, "other"])
    await buffer.publish(0)
    for run in range(4):
        await buffer.push(of_version(0, run))
    await buffer.publish(1)
    assert await take(buffer, "trainer", 2) == 0
    if restarts:
        buffer = await world.restart(buffer)
    for run in range(4, 8):
        await buffer.push(of_version(1, run))
    assert await take(buffer, "trainer", 2) == 2
    assert await take(buffer, "other", 9) == 8
    if restarts:
        buffer = await world.restart(buffer)
    counts = buffer.state.consumers["trainer"].counts()
    assert (counts.inserts, counts.samples) == (4, 2)


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_rewind_of_what_was_passed_over_counts_it_once(
    world: World, restarts: bool
) -> None:
    consumer = {
        "name": "trainer",
        "replay": True,
        "max_times_sampled": 9,
        "limiter": {"samples_per_insert": 0.5, "min_diff": -9, "max_diff": 9},
        "staleness": {"max_lag": 0, "on_stale": "keep"},
    }
    buffer = await world.create(group_by="none", consumers=[consumer, "other"])
    await buffer.publish(0)
    for run in range(2):
        await buffer.push(of_version(0, run))
    for step in (1, 2):
        lease = await leased(buffer, 2)
        await buffer.ack(lease.id, step=step)
    await buffer.publish(1)
    assert await take(buffer, "trainer", 2) == 0
    if restarts:
        buffer = await world.restart(buffer)
    trainer = buffer.state.consumers["trainer"]
    counts = trainer.counts()
    assert (counts.inserts, counts.samples) == (2, 4), "sampled more often than it was due"
    await buffer.flow.timelines.rewind(trainer, 0)
    counts = trainer.counts()
    assert (counts.inserts, counts.samples) == (2, 0)


async def test_items_of_groups_that_matter_to_nobody_are_dropped(world: World) -> None:
    picky = {"name": "picky", "staleness": {"max_lag": 0, "on_stale": "drop"}}
    buffer = await world.create(consumers=[picky, "other"])
    await buffer.publish(1)
    for run in range(4):
        await buffer.push(of_version(0, run))
    assert await take(buffer, "picky", 4) == 0
    assert not len(buffer.state.contents)
