"""Ends of deliveries that meet: stale and retained, dropped and drawn twice, rewound and limited."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer_server.buffer.buffer import Buffer
from tests.unit.buffer_verbs import consume, leased, of_version, sampled
from tests.unit.builders import World, push, uid

FRESH = {"name": "fresh", "staleness": {"max_lag": 1}}
PICKY = {"name": "picky", "staleness": {"max_lag": 0, "on_stale": "drop"}}
QUEUE = {"min_size": 1, "samples_per_insert": 1, "min_diff": 0, "max_diff": 7}


async def create(world: World, *consumers: dict[str, Any]) -> Buffer:
    return await world.create(group_size=2, consumers=list(consumers))


async def push_versions(buffer: Buffer, *versions: int, first: int = 0) -> None:
    """Members of one group, each of a version."""
    for run, version in enumerate(versions, first):
        await buffer.push(of_version(version, (1, run)))


async def nothing_comes(buffer: Buffer, name: str) -> bool:
    lease, _ = await sampled(buffer, 1, name)
    await buffer.drain()
    return lease is None


async def test_what_a_rewind_may_bring_back_is_not_dropped_as_stale(world: World) -> None:
    buffer = await create(world, {"name": "a"}, FRESH)
    await push_versions(buffer, 3, 3)
    await consume(buffer, 2, "a", step=1)
    buffer.row.policy_version = 5
    assert await nothing_comes(buffer, "fresh")
    await buffer.flow.timelines.rewind(buffer.state.consumers["a"], 0)
    assert len((await leased(buffer, 2, "a")).units) == 2
    assert await nothing_comes(buffer, "fresh")


async def test_what_a_rewind_has_brought_back_is_not_dropped_as_stale(world: World) -> None:
    buffer = await create(world, {"name": "a"}, FRESH)
    await push_versions(buffer, 3, 3)
    await consume(buffer, 2, "a", step=1)
    await buffer.flow.timelines.rewind(buffer.state.consumers["a"], 0)
    buffer.row.policy_version = 5
    assert await nothing_comes(buffer, "fresh")
    await consume(buffer, 2, "a")
    await buffer.drain()
    assert len(buffer.state.contents) == 0


async def test_what_the_judge_itself_was_rewound_to_is_dropped_as_stale(world: World) -> None:
    buffer = await create(world, FRESH, {"name": "other"})
    await push_versions(buffer, 3, 3)
    await consume(buffer, 2, "fresh", step=1)
    await buffer.flow.timelines.rewind(buffer.state.consumers["fresh"], 0)
    buffer.row.policy_version = 5
    assert await nothing_comes(buffer, "fresh")
    assert len(buffer.state.contents) == 0


async def test_a_group_keeps_the_member_that_was_too_stale_for_another(world: World) -> None:
    buffer = await create(world, {"name": "groups", "unit": "group"}, FRESH)
    await push_versions(buffer, 3, 5)
    buffer.row.policy_version = 5
    assert len((await leased(buffer, 2, "fresh")).units) == 1
    await buffer.drain()
    (unit,) = (await leased(buffer, 1, "groups")).units
    assert len(unit.seqs) == 2


async def test_what_was_rewound_can_be_sampled_in_spite_of_a_limiter(world: World) -> None:
    buffer = await create(world, {"name": "a", "limiter": QUEUE})
    await buffer.push(push((1, 0), (1, 1)))
    await consume(buffer, 2, "a", step=1)
    assert await nothing_comes(buffer, "a")
    await buffer.flow.timelines.rewind(buffer.state.consumers["a"], 0)
    assert len((await leased(buffer, 2, "a")).units) == 2


async def test_what_is_passed_over_does_not_keep_pushes_out(world: World) -> None:
    picky = {"name": "b", "staleness": {"max_lag": 1, "on_stale": "keep"}, "limiter": QUEUE}
    buffer = await create(world, {"name": "a"}, picky)
    await push_versions(buffer, 1, 1)
    buffer.row.policy_version = 5
    assert await nothing_comes(buffer, "b")
    counts = buffer.state.consumers["b"].tally.counts()
    assert (counts.inserts, counts.samples) == (0, 0)
    assert world.reload(buffer).state.consumers["b"].tally.counts() == counts


async def test_a_smaller_batch_goes_where_a_larger_one_exceeds_the_window(world: World) -> None:
    consumer = {"name": "a", "unit": "group", "max_leased_experiences": 5}
    buffer = await create(world, consumer)
    await buffer.push(push(*((task, run) for task in (1, 2, 3) for run in (0, 1))))
    assert len((await leased(buffer, 1, "a")).units) == 1
    assert len((await leased(buffer, 2, "a")).units) == 1
    assert await nothing_comes(buffer, "a")


REPLAY = {
    "name": "a",
    "unit": "group",
    "replay": True,
    "with_replacement": True,
    "limiter": {"min_size": 1, "samples_per_insert": 3, "min_diff": 0},
}


async def test_a_dropped_group_that_was_drawn_twice_leaves_once(world: World) -> None:
    buffer = await create(world, REPLAY)
    await buffer.push(push((1, 0), (1, 1)))
    lease = await leased(buffer, 2, "a")
    await buffer.drop("2/1", "aborted")
    await buffer.nack(lease.id, reason="x")
    await buffer.drain()
    assert not len(buffer.state.contents)
    assert not len(buffer.state.contents.groups)


async def test_a_restart_counts_every_time_that_a_unit_is_in_a_batch(world: World) -> None:
    buffer = await create(world, REPLAY)
    await buffer.push(push((1, 0), (1, 1)))
    await leased(buffer, 2, "a")
    before = buffer.state.consumers["a"].tally.counts()
    assert before.samples == 2
    assert world.reload(buffer).state.consumers["a"].tally.counts() == before


async def test_what_is_deleted_is_not_retained_and_the_last_step_stays(world: World) -> None:
    buffer = await create(world, {"name": "a"})
    await buffer.push(push((1, 0), (1, 1)))
    await consume(buffer, 2, "a", step=4)
    await buffer.delete(list(buffer.state.contents))
    for one in (buffer, world.reload(buffer)):
        timeline = one.state.consumers["a"].timeline
        assert (timeline.num_retained, timeline.last_step) == (0, 4)


async def test_a_rewind_counts_what_leaves_with_the_lease_that_it_returns(world: World) -> None:
    """Its acks were undone as others' were; that its group had been dropped is another matter."""
    buffer = await create(world, {"name": "a", "replay": True, "max_times_sampled": 2})
    await buffer.push(push((1, 0), (2, 0)))
    await consume(buffer, 2, "a", step=3)
    await leased(buffer, 2, "a")
    await buffer.drop("2/1", "aborted")
    found = await buffer.flow.timelines.rewind(buffer.state.consumers["a"], 0)
    assert found == (2, 1)
    await buffer.drain()
    assert [entry.record.uid for entry in buffer.state.contents] == [uid(2, 0)]
    assert len((await leased(buffer, 1, "a")).units) == 1
    assert await nothing_comes(buffer, "a")


async def test_final_acks_that_were_enough_outlive_a_rewind(world: World) -> None:
    """A unit whose final acks reach max_times_sampled stays consumed when one more is undone."""
    replay = {"name": "a", "replay": True, "max_times_sampled": 2, "with_replacement": True}
    buffer = await create(world, replay, {"name": "b"})
    await buffer.push(push((1, 0)))
    await consume(buffer, 1, "a", step=3)
    await consume(buffer, 2, "a")
    await buffer.flow.timelines.rewind(buffer.state.consumers["a"], 0)
    assert await nothing_comes(buffer, "a")
    await buffer.drain()
    assert await nothing_comes(world.reload(buffer), "a")


# --- what is too stale for one consumer


def passing(**changes: Any) -> dict[str, Any]:
    """A trainer that replays, and passes over what is too stale."""
    staleness = {"max_lag": 0, "on_stale": "keep"}
    return {"name": "trainer", "replay": True, "staleness": staleness} | changes


async def num_taken(buffer: Buffer, count: int, consumer: str = "trainer") -> int:
    """How many experiences came, all of which are acknowledged."""
    lease, _ = await sampled(buffer, count, consumer)
    await buffer.drain()
    return 0 if lease is None else (await buffer.ack(lease.id)).num_experiences


@pytest.mark.parametrize("num_first", [2, 4])
async def test_what_is_too_stale_for_one_consumer_tears_no_group_of_another(
    world: World, num_first: int
) -> None:
    consumers = [PICKY, {"name": "trainer", "unit": "group"}]
    buffer = await world.create(group_size=4, consumers=consumers)
    await buffer.publish(1)
    versions = [0, 0, 1, 1]
    await push_versions(buffer, *versions[:num_first])
    assert await num_taken(buffer, 4, "picky") == sum(versions[:num_first])
    await push_versions(buffer, *versions[num_first:], first=num_first)
    assert await num_taken(buffer, 1) == 4
    assert len(buffer.state.contents) == 4 - 2 - sum(versions[:num_first])


@pytest.mark.parametrize("group_size", [0, 2])
async def test_what_nobody_takes_as_a_group_is_dropped_alone(world: World, group_size: int) -> None:
    buffer = await world.create(group_size=group_size, consumers=[PICKY, "other"])
    await buffer.publish(1)
    await push_versions(buffer, 0, 1)
    assert await num_taken(buffer, 2, "picky") == 1
    assert await num_taken(buffer, 2, "other") == 1
    assert not len(buffer.state.contents)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("ratio", [0.5, 3.0])
async def test_a_limiter_waits_for_no_sample_of_what_was_passed_over(
    world: World, ratio: float, restarts: bool
) -> None:
    limiter = {"samples_per_insert": ratio, "min_diff": 0, "max_diff": 4 * max(ratio, 1)}
    consumers = [passing(max_times_sampled=3, limiter=limiter), "other"]
    buffer = await world.create(group_by="none", consumers=consumers)
    await buffer.publish(0)
    await push_versions(buffer, 0, 0, 0, 0)
    await buffer.publish(1)
    assert await num_taken(buffer, 2) == 0
    if restarts:
        buffer = await world.restart(buffer)
    await push_versions(buffer, 1, 1, 1, 1, first=4)
    assert await num_taken(buffer, 2) == 2
    assert await num_taken(buffer, 9, "other") == 8
    if restarts:
        buffer = await world.restart(buffer)
    counts = buffer.state.consumers["trainer"].counts()
    assert (counts.inserts, counts.samples) == (4, 2)


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_rewind_counts_what_was_passed_over_once(world: World, restarts: bool) -> None:
    limiter = {"samples_per_insert": 0.5, "min_diff": -9, "max_diff": 9}
    consumers = [passing(max_times_sampled=9, limiter=limiter), "other"]
    buffer = await world.create(group_by="none", consumers=consumers)
    await buffer.publish(0)
    await push_versions(buffer, 0, 0)
    for step in (1, 2):
        await consume(buffer, 2, step=step)
    await buffer.publish(1)
    assert await num_taken(buffer, 2) == 0
    if restarts:
        buffer = await world.restart(buffer)
    trainer = buffer.state.consumers["trainer"]
    counts = trainer.counts()
    assert (counts.inserts, counts.samples) == (2, 4), "sampled more often than it was due"
    await buffer.flow.timelines.rewind(trainer, 0)
    counts = trainer.counts()
    assert (counts.inserts, counts.samples) == (2, 0)
