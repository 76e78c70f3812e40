"""What memory takes back when a commit is refused, the disk takes back, too, and the other way round."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.rank_batches import RankOf
from experience_buffer_server.runtime import clock
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.store.interface import StoreFullError
from tests.refusing_store import Held, Refusals, begin
from tests.unit.buffer_verbs import consume, leased
from tests.unit.builders import World, push, settings, uid, want

pytestmark = pytest.mark.on_disk

REPLAY = {"name": "c", "replay": True, "max_times_sampled": 2}
LIMITER = {"min_size": 1, "min_diff": -10.0, "max_diff": 50.0}


async def refused(refusals: Refusals, work: Any) -> None:
    refusals.num_next = 1
    with pytest.raises(StoreFullError):
        await work


async def catch_up(buffer: Buffer) -> None:
    """Let time pass in which what was refused is stored after all."""
    buffer.tick(clock.now() + 2.0)
    await buffer.drain()


async def change(buffer: Buffer, *consumers: dict[str, Any], **others: Any) -> None:
    await buffer.change_settings(settings(consumers=list(consumers), **others))
    await buffer.drain()


async def test_what_others_store_does_not_hold_a_refused_ack(
    world: World, refusals: Refusals
) -> None:
    buffer = await world.create(consumers=[{"name": "c"}, {"name": "d"}])
    await buffer.push(push((0, 0)))
    ours, others = await leased(buffer, 1, "c"), await leased(buffer, 1, "d")
    refusals.num_next = 1
    ack = asyncio.ensure_future(buffer.ack(ours.id, step=1))
    await asyncio.sleep(0)
    assert not refusals.num_next
    # The row of the experience says by now that both have it.
    nack = asyncio.ensure_future(buffer.nack(others.id, reason="other"))
    assert isinstance((await asyncio.gather(ack, return_exceptions=True))[0], StoreFullError)
    await nack
    await catch_up(buffer)
    buffer = await world.restart(buffer)
    assert await buffer.nack(ours.id, reason="no room") == 1
    consumer = buffer.state.consumer("c")
    assert len(consumer.ready) == 1
    assert not consumer.finished
    assert not consumer.timeline.num_retained


async def test_a_refused_ack_forgives_nothing(world: World, refusals: Refusals) -> None:
    buffer = await world.create(consumers=[{"name": "c", "max_deliveries": 2}])
    await buffer.push(push((0, 0)))
    await buffer.nack((await leased(buffer, 1, "c")).id, reason="bad")
    await refused(refusals, buffer.ack((await leased(buffer, 1, "c")).id))
    await catch_up(buffer)
    (lease,) = (await world.restart(buffer)).state.consumer("c").leases.values()
    assert [unit.num_deliveries for unit in lease.units] == [2]


async def test_a_refused_rewind_releases_nothing(world: World, refusals: Refusals) -> None:
    buffer = await world.create(consumers=[REPLAY | {"max_deliveries": 1}])
    await buffer.push(push((0, 0)))
    consumer = buffer.state.consumer("c")
    await consume(buffer, 1, "c", step=1)
    await buffer.nack((await leased(buffer, 1, "c")).id, reason="bad")
    await refused(refusals, buffer.flow.timelines.rewind(consumer, 0))
    assert len(consumer.quarantined) == 1
    await catch_up(buffer)
    buffer = await world.restart(buffer)
    consumer = buffer.state.consumer("c")
    assert await buffer.release(consumer.name, []) == 1
    assert len(consumer.ready) == 1


async def test_what_a_refused_rewind_leaves_unconsumed_is_offered(
    world: World, refusals: Refusals
) -> None:
    buffer = await world.create(consumers=[{"name": "c"}])
    await buffer.push(push((0, 0)))
    await consume(buffer, 1, "c", step=1)
    await change(buffer, REPLAY)
    await refused(refusals, buffer.rewind("c", 0))
    await catch_up(buffer)
    for place in (buffer, await world.restart(buffer)):
        consumer = place.state.consumer("c")
        assert len(consumer.ready) + len(consumer.finished) == 1
        assert [bool(entry.acked) for entry in place.state.contents] == [bool(consumer.finished)]


async def test_samples_of_one_that_has_replayed_count_after_a_restart(world: World) -> None:
    first = REPLAY | {"max_times_sampled": 3, "limiter": LIMITER}
    buffer = await world.create(consumers=[first])
    await buffer.push(push((0, 0)))
    await consume(buffer, 1, "c", step=1)
    await change(buffer, {"name": "c", "limiter": LIMITER})
    await consume(buffer, 1, "c", step=2)
    counted = buffer.state.consumer("c").counts()
    buffer = await world.restart(buffer)
    consumer = buffer.state.consumer("c")
    assert (counted.samples, consumer.counts()) == (2, counted)
    await buffer.flow.timelines.rewind(consumer, 1)
    assert consumer.counts().samples == 1


async def test_another_ratio_holds_after_a_restart(world: World, refusals: Refusals) -> None:
    buffer = await world.create(consumers=[{"name": "c", "limiter": LIMITER}, {"name": "d"}])
    await buffer.push(push((0, 0), (1, 0)))
    await consume(buffer, 1, "c")
    changed = buffer.change_settings(
        settings(
            consumers=[
                {"name": "c", "limiter": LIMITER | {"samples_per_insert": 0.5}},
                {"name": "d"},
            ]
        )
    )
    await asyncio.sleep(0)
    refusals.num_next = 1
    await changed
    await buffer.drain()
    assert not refusals.num_next
    counted = buffer.state.consumer("c").counts()
    await catch_up(buffer)
    assert (await world.restart(buffer)).state.consumer("c").counts() == counted


async def test_a_groups_row_stays_with_the_member_that_could_not_leave(
    world: World, refusals: Refusals
) -> None:
    buffer = await world.create(group_size=2, consumers=[{"name": "c", "unit": "group"}])
    await buffer.push(push((0, 0), (0, 1)))
    first, second = buffer.state.contents
    refusals.num_next = 1
    deleting = await begin(buffer.delete([first]))
    await buffer.delete([second])
    with pytest.raises(StoreFullError):
        await deleting
    await catch_up(buffer)
    for place in (buffer, await world.restart(buffer)):
        (group,) = place.state.contents.groups
        assert (group.row.size, [entry.record.uid for entry in group.members]) == (1, [uid(0, 0)])
        assert not group.damage
        assert len(place.state.consumer("c").ready) == 1


async def test_steps_of_a_consumer_that_was_removed_keep_nothing(
    world: World, refusals: Refusals
) -> None:
    buffer = await world.create(consumers=[{"name": "c"}, {"name": "d"}])
    await buffer.push(push((0, 0)))
    lease = await leased(buffer, 1, "c")
    refusals.held = asyncio.Event()
    changed = buffer.change_settings(settings(consumers=[{"name": "d"}]))
    ack = await begin(buffer.ack(lease.id, step=1))
    refusals.held.set()
    refusals.held, refusals.num_next = None, 1
    await asyncio.gather(changed, ack)
    await buffer.drain()
    assert not refusals.num_next
    await catch_up(buffer)
    buffer = await world.restart(buffer)
    await change(buffer, {"name": "c"}, {"name": "d"})
    assert not [e for e in buffer.state.contents if buffer.state.progress.is_retained(e)]


async def test_a_group_counts_the_bytes_of_the_members_that_are_left(world: World) -> None:
    buffer = await world.create(
        group_size=2, consumers=[{"name": "c", "unit": "group", "limiter": LIMITER}]
    )
    await buffer.push(push((0, 0), (0, 1)))
    first, _ = buffer.state.contents
    await buffer.delete([first])
    counted = buffer.state.consumer("c").counts()
    assert counted.ahead_bytes == buffer.num_bytes
    assert (await world.restart(buffer)).state.consumer("c").counts() == counted


async def test_what_is_left_of_a_group_and_consumed_is_finished(world: World) -> None:
    consumers = [{"name": "c"}, {"name": "d"}]
    buffer = await world.create(group_size=2, consumers=consumers)
    await buffer.push(push((0, 0), (0, 1)))
    await consume(buffer, 1, "c", step=1)
    await change(buffer, {"name": "c", "unit": "group"}, {"name": "d"}, group_size=2)
    _, second = buffer.state.contents
    await buffer.delete([second])
    for place in (buffer, await world.restart(buffer)):
        assert len(place.state.consumer("c").finished) == 1


async def shared(buffer: Buffer) -> Lease:
    rank_of = RankOf(rank=0, world_size=3, after_lease_id=0)
    lease, shortfall = await buffer.sample("c", want(3), asyncio.Event(), rank_of=rank_of)
    assert lease is not None, shortfall
    return lease


async def test_a_refused_ack_of_a_part_is_not_stored_by_another_rank(
    world: World, refusals: Refusals
) -> None:
    buffer = await world.create(consumers=[{"name": "c"}])
    await buffer.push(push((0, 0), (1, 0), (2, 0)))
    lease = await shared(buffer)
    refusals.num_next = 1
    acks = [asyncio.ensure_future(buffer.ack(lease.id, rank=rank)) for rank in (0, 1)]
    first, second = await asyncio.gather(*acks, return_exceptions=True)
    assert (type(first), second) == (StoreFullError, lease)
    await catch_up(buffer)
    for place in (buffer, await world.restart(buffer)):
        (lease,) = place.state.consumer("c").leases.values()
        assert lease.acked_parts == {1: None}


async def test_an_ack_of_a_part_that_comes_again_ends_alike(
    world: World, refusals: Refusals
) -> None:
    buffer = await world.create(consumers=[{"name": "c"}])
    await buffer.push(push((0, 0), (1, 0), (2, 0)))
    lease = await shared(buffer)
    refusals.num_next = 1
    acks = [asyncio.ensure_future(buffer.ack(lease.id, step=1, rank=0)) for _ in range(2)]
    answers = await asyncio.gather(*acks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [StoreFullError] * 2
    await buffer.ack(lease.id, step=2, rank=0)
    await buffer.ack(lease.id, step=3, rank=0)
    for place in (buffer, await world.restart(buffer)):
        (lease,) = place.state.consumer("c").leases.values()
        assert lease.acked_parts == {0: 2}


async def test_a_row_that_is_owed_waits_for_the_ack_that_may_end_its_lease(world: World) -> None:
    buffer = await world.create(consumers=[{"name": "c"}])
    await buffer.push(push((0, 0), (1, 0), (2, 0)))
    lease = await shared(buffer)
    held = [Held(world.store)]
    first = await begin(buffer.ack(lease.id, rank=0))
    # Its row says that the first rank has acknowledged its part, too.
    await buffer.ack(lease.id, rank=1)
    held.append(Held(world.store))
    last = await begin(buffer.ack(lease.id, rank=2))
    for ack, commit in zip((first, last), held, strict=True):
        commit.refuse()
        with pytest.raises(StoreFullError):
            await ack
        buffer.tick(clock.now() + 4.0)
    assert lease.state == "open"
    buffer.tick(clock.now() + 9.0)
    await buffer.drain()
    for place in (buffer, await world.restart(buffer)):
        (lease,) = place.state.consumer("c").leases.values()
        assert lease.acked_parts == {1: None}
