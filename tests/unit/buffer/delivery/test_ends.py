"""Ends of deliveries that meet: stale and retained, dropped and drawn twice, rewound and limited."""

from __future__ import annotations

from typing import Any

from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.push_reading import Push
from tests.models.buffer_port import payload
from tests.unit.buffer_verbs import consume, leased, sampled
from tests.unit.builders import World, uid
from tests.unit.builders import push as push_of

QUEUE = {"min_size": 1, "samples_per_insert": 1, "min_diff": 0, "max_diff": 7}


async def create(world: World, *consumers: dict[str, Any]) -> Buffer:
    return await world.create(group_size=2, consumers=list(consumers))


async def push_versions(buffer: Buffer, *versions: int) -> None:
    items = [(1, run, version) for run, version in enumerate(versions)]
    await buffer.push(Push(payloads=[payload(items)]))


async def nothing_comes(buffer: Buffer, name: str) -> bool:
    lease, _ = await sampled(buffer, 1, name)
    await buffer.drain()
    return lease is None


async def test_what_a_rewind_may_bring_back_is_not_dropped_as_stale(world: World) -> None:
    fresh = {"name": "fresh", "staleness": {"max_lag": 1}}
    buffer = await create(world, {"name": "a"}, fresh)
    await push_versions(buffer, 3, 3)
    await consume(buffer, 2, "a", step=1)
    buffer.row.policy_version = 5
    assert await nothing_comes(buffer, "fresh")
    await buffer.flow.timelines.rewind(buffer.state.consumers["a"], 0)
    assert len((await leased(buffer, 2, "a")).units) == 2
    assert await nothing_comes(buffer, "fresh")


async def test_what_a_rewind_has_brought_back_is_not_dropped_as_stale(world: World) -> None:
    fresh = {"name": "fresh", "staleness": {"max_lag": 1}}
    buffer = await create(world, {"name": "a"}, fresh)
    await push_versions(buffer, 3, 3)
    await consume(buffer, 2, "a", step=1)
    await buffer.flow.timelines.rewind(buffer.state.consumers["a"], 0)
    buffer.row.policy_version = 5
    assert await nothing_comes(buffer, "fresh")
    await consume(buffer, 2, "a")
    await buffer.drain()
    assert len(buffer.state.contents) == 0


async def test_what_the_judge_itself_was_rewound_to_is_dropped_as_stale(world: World) -> None:
    buffer = await create(world, {"name": "fresh", "staleness": {"max_lag": 1}}, {"name": "other"})
    await push_versions(buffer, 3, 3)
    await consume(buffer, 2, "fresh", step=1)
    await buffer.flow.timelines.rewind(buffer.state.consumers["fresh"], 0)
    buffer.row.policy_version = 5
    assert await nothing_comes(buffer, "fresh")
    assert len(buffer.state.contents) == 0


async def test_a_group_keeps_the_member_that_was_too_stale_for_another(world: World) -> None:
    fresh = {"name": "fresh", "staleness": {"max_lag": 1}}
    buffer = await create(world, {"name": "groups", "unit": "group"}, fresh)
    await push_versions(buffer, 3, 5)
    buffer.row.policy_version = 5
    assert len((await leased(buffer, 2, "fresh")).units) == 1
    await buffer.drain()
    (unit,) = (await leased(buffer, 1, "groups")).units
    assert len(unit.seqs) == 2


async def test_what_was_rewound_can_be_sampled_in_spite_of_a_limiter(world: World) -> None:
    buffer = await create(world, {"name": "a", "limiter": QUEUE})
    await buffer.push(push_of((1, 0), (1, 1)))
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
    await buffer.push(push_of(*((task, run) for task in (1, 2, 3) for run in (0, 1))))
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
    await buffer.push(push_of((1, 0), (1, 1)))
    lease = await leased(buffer, 2, "a")
    await buffer.drop("2/1", "aborted")
    await buffer.nack(lease.id, reason="x")
    await buffer.drain()
    assert not len(buffer.state.contents)
    assert not len(buffer.state.contents.groups)


async def test_a_restart_counts_every_time_that_a_unit_is_in_a_batch(world: World) -> None:
    buffer = await create(world, REPLAY)
    await buffer.push(push_of((1, 0), (1, 1)))
    await leased(buffer, 2, "a")
    before = buffer.state.consumers["a"].tally.counts()
    assert before.samples == 2
    assert world.reload(buffer).state.consumers["a"].tally.counts() == before


async def test_what_is_deleted_is_not_retained_and_the_last_step_stays(world: World) -> None:
    buffer = await create(world, {"name": "a"})
    await buffer.push(push_of((1, 0), (1, 1)))
    await consume(buffer, 2, "a", step=4)
    await buffer.delete(list(buffer.state.contents))
    for one in (buffer, world.reload(buffer)):
        timeline = one.state.consumers["a"].timeline
        assert (timeline.num_retained, timeline.last_step) == (0, 4)


async def test_a_rewind_counts_what_leaves_with_the_lease_that_it_returns(world: World) -> None:
    """Its acks were undone as others' were; that its group had been dropped is another matter."""
    buffer = await create(world, {"name": "a", "replay": True, "max_times_sampled": 2})
    await buffer.push(push_of((1, 0), (2, 0)))
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
    await buffer.push(push_of((1, 0)))
    await consume(buffer, 1, "a", step=3)
    await consume(buffer, 2, "a")
    await buffer.flow.timelines.rewind(buffer.state.consumers["a"], 0)
    assert await nothing_comes(buffer, "a")
    await buffer.drain()
    assert await nothing_comes(world.reload(buffer), "a")
