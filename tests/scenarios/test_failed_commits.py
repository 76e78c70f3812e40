"""Commits that fail for want of room: memory, and the disk after a restart, tell the same."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from experience_buffer import errors
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.timeline import Timeline
from experience_buffer_server.store.interface import StoreFullError
from tests.refusing_store import Refusals, begin
from tests.unit.buffer_verbs import consume, leased
from tests.unit.builders import World, push, uid, want

pytestmark = pytest.mark.on_disk

TWO = [{"name": "c"}, {"name": "d"}]


async def refuse_ack(buffer: Buffer, refusals: Refusals, lease: Lease, step: int | None) -> None:
    refusals.num_next = 1
    with pytest.raises(StoreFullError):
        await buffer.ack(lease.id, step=step)
    assert lease.state == "open"


def open_on_disk(world: World) -> list[int]:
    """The leases that are open on disk."""
    (state,) = world.store.load()
    return [row.id for row in state.leases if row.state == "open"]


# --- acknowledgements and rewinds that never happened


async def test_a_refused_ack_is_not_stored_later(world: World, refusals: Refusals) -> None:
    buffer = await world.create(consumers=TWO)
    await buffer.push(push((0, 0)))
    lease = await leased(buffer, 1, "c")
    await refuse_ack(buffer, refusals, lease, 1)
    await buffer.nack(lease.id, reason="no room")
    for place in (buffer, await world.restart(buffer)):
        assert len(place.state.consumer("c").ready) == 1
        assert not place.state.consumer("c").finished


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("was_rewound", [False, True])
async def test_a_refused_ack_is_no_rewind(
    world: World, refusals: Refusals, was_rewound: bool, restarts: bool
) -> None:
    """What is to come again after a rewind isn't evicted; what never was acknowledged is."""
    consumers = [{"name": "c", "retain_steps": 5}]
    buffer = await world.create(group_by="none", consumers=consumers, max_items=1, on_full="evict")
    await buffer.push(push((0, 0)))
    if was_rewound:
        await consume(buffer, 1, "c", step=1)
        await buffer.rewind("c", 0)
    lease = await leased(buffer, 1, "c")
    await refuse_ack(buffer, refusals, lease, 1)
    await buffer.nack(lease.id, reason="no room")
    if restarts:
        buffer = await world.restart(buffer)
    if was_rewound:
        with pytest.raises(errors.BufferFullError):
            await buffer.push(push((1, 0)))
    else:
        (outcome,) = await buffer.push(push((1, 0)))
        assert outcome.status == "stored"


async def test_a_refused_rewind_is_not_stored_later(world: World, refusals: Refusals) -> None:
    buffer = await world.create(consumers=TWO)
    await buffer.push(push((0, 0)))
    await consume(buffer, 1, "c", step=1)
    refusals.num_next = 1
    with pytest.raises(StoreFullError):
        await buffer.rewind("c", 0)
    await buffer.nack((await leased(buffer, 1, "d")).id, reason="other")
    for place in (buffer, await world.restart(buffer)):
        consumer = place.state.consumer("c")
        assert len(consumer.ready) == 0
        assert consumer.finished == {1}
        assert consumer.timeline.num_retained == 1


async def test_an_ack_on_its_way_takes_nothing_with_it(world: World, refusals: Refusals) -> None:
    buffer = await world.create(consumers=TWO)
    await buffer.push(push((0, 0)))
    first, second = await leased(buffer, 1, "c"), await leased(buffer, 1, "d")
    refusals.num_next = 1
    refused = await begin(buffer.ack(first.id))
    await buffer.ack(second.id)
    with pytest.raises(StoreFullError):
        await refused
    assert len(buffer.state.contents) == 1
    await buffer.nack(first.id, reason="no room")
    again = await leased(buffer, 1, "c")
    await buffer.ack(again.id)
    assert len(buffer.state.contents) == 0


async def test_two_acks_at_once_remove_together(world: World) -> None:
    buffer = await world.create(consumers=TWO)
    await buffer.push(push((0, 0), (0, 1)))
    first, second = await leased(buffer, 2, "c"), await leased(buffer, 2, "d")
    await asyncio.gather(buffer.ack(first.id), buffer.ack(second.id))
    assert len(buffer.state.contents) == 0
    assert len((await world.restart(buffer)).state.contents) == 0


async def test_what_all_consumed_leaves_once_there_is_room(
    world: World, refusals: Refusals, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = await world.create(consumers=TWO)
    await buffer.push(push((0, 0)))
    first, second = await leased(buffer, 1, "c"), await leased(buffer, 1, "d")
    refusals.held = asyncio.Event()
    acks = [await begin(buffer.ack(lease.id)) for lease in (first, second)]
    refusals.num_next = 1
    refusals.held.set()
    await asyncio.gather(*acks)
    assert len(buffer.state.contents) == 1
    assert "1 consumed experiences can't be removed yet" in caplog.text
    refusals.held = None
    buffer.tick(time.time() + 11.0)
    await buffer.drain()
    assert len(buffer.state.contents) == 0


async def test_a_rewind_waits_for_every_ack(world: World, refusals: Refusals) -> None:
    buffer = await world.create(consumers=[{"name": "c"}])
    await buffer.push(push((0, 0), (0, 1)))
    first, second = await leased(buffer, 1, "c"), await leased(buffer, 1, "c")
    consumer = buffer.state.consumer("c")
    refusals.held = one = asyncio.Event()
    acks = [await begin(buffer.ack(first.id, step=1))]
    rewind = await begin(buffer.flow.timelines.rewind(consumer, 0))
    refusals.held = other = asyncio.Event()
    acks.append(await begin(buffer.ack(second.id, step=1)))
    refusals.held = None
    one.set()
    await acks[0]
    for _ in range(7):
        await asyncio.sleep(0)
    assert consumer.timeline.num_retained == 2, "the second ack is on its way"
    other.set()
    await acks[1]
    assert (await rewind).num_experiences == 2
    for place in (buffer, await world.restart(buffer)):
        assert len(place.state.consumer("c").ready) == 2


# --- ends of leases


@pytest.mark.parametrize("how", ["nack", "rewind", "expire"])
async def test_a_unit_is_in_one_open_lease_on_disk(
    world: World, refusals: Refusals, how: str
) -> None:
    buffer = await world.create(consumers=[{"name": "c"}])
    await buffer.push(push((0, 0)))
    lease = await leased(buffer, 1, "c")
    refusals.num_next = 1
    if how == "expire":
        buffer.flow.leasing.expire(time.time() + 1000.0)
        await buffer.drain()
    else:
        consumer = buffer.state.consumer("c")
        with pytest.raises(StoreFullError):
            await (
                buffer.nack(lease.id, reason="x")
                if how == "nack"
                else buffer.flow.timelines.rewind(consumer, -1)
            )
    again = await leased(buffer, 1, "c")
    assert open_on_disk(world) == [again.id]
    fresh = await world.restart(buffer)
    await fresh.ack(again.id)
    assert len(fresh.state.contents) == 0


async def test_a_lease_that_finds_no_room_was_never_given(world: World, refusals: Refusals) -> None:
    buffer = await world.create(consumers=[{"name": "c"}])
    await buffer.push(push((0, 0)))
    refusals.num_next = 1
    with pytest.raises(StoreFullError):
        await leased(buffer, 1, "c")
    await buffer.drain()
    consumer = buffer.state.consumer("c")
    assert (len(consumer.ready), len(consumer.leases)) == (1, 0)
    labels = {"buffer": buffer.name, "consumer": "c", "reason": "undeliverable"}
    name = "experience_buffer_redelivered_experiences_total"
    assert world.metrics.registry.get_sample_value(name, labels) is None
    assert open_on_disk(world) == []


async def test_an_end_under_way_may_fail_after_the_next_grant(
    world: World, refusals: Refusals
) -> None:
    buffer = await world.create(consumers=[{"name": "c"}])
    await buffer.push(push((0, 0)))
    lease = await leased(buffer, 1, "c")
    refusals.num_next = 1
    nack = await begin(buffer.nack(lease.id, reason="x"))
    again = await leased(buffer, 1, "c")
    with pytest.raises(StoreFullError):
        await nack
    assert open_on_disk(world) == [again.id]


async def test_an_end_is_stored_when_there_is_room(world: World, refusals: Refusals) -> None:
    buffer = await world.create(consumers=[{"name": "c", "max_deliveries": 2}])
    await buffer.push(push((0, 0)))
    lease = await leased(buffer, 1, "c", lease_seconds=5000.0)
    refusals.num_next = 2
    with pytest.raises(StoreFullError):
        await buffer.nack(lease.id, reason="x")
    for seconds in (0.0, 0.5, 11.0):
        buffer.tick(time.time() + seconds)
        await buffer.drain()
    fresh = await world.restart(buffer)
    consumer = fresh.state.consumer("c")
    assert (len(consumer.ready), len(consumer.leases)) == (1, 0)
    again = await leased(fresh, 1, "c")
    assert again.units[0].num_deliveries == 2
    await fresh.nack(again.id, reason="x")
    assert list(consumer.quarantined) == [1]


async def test_a_lease_that_was_returned_before_it_was_sent(world: World) -> None:
    buffer = await world.create(consumers=[{"name": "c"}])
    await buffer.push(push((0, 0)))
    call = await begin(buffer.sample("c", want(1), asyncio.Event()))
    rewound = await buffer.rewind("c", -1)
    assert rewound.num_leases == 1
    lease, why = await call
    assert lease is None
    assert "returned before it was sent" in why


# --- deliveries that count


async def test_rewinds_and_cancelled_calls_are_nobodys_fault(world: World) -> None:
    buffer = await world.create(consumers=[{"name": "c", "max_deliveries": 2}])
    await buffer.push(push((0, 0)))
    consumer = buffer.state.consumer("c")
    for _ in range(3):
        await leased(buffer, 1, "c")
        await buffer.flow.timelines.rewind(consumer, -1)
        call = await begin(leased(buffer, 1, "c"))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await buffer.drain()
        assert (len(consumer.ready), len(consumer.leases)) == (1, 0)
    redelivered = consumer.num_redelivered
    assert redelivered == 3, "a cancelled call got nothing"
    await buffer.nack((await leased(buffer, 1, "c")).id, reason="x")
    assert not consumer.quarantined
    fresh = await world.restart(buffer)
    assert not fresh.state.consumer("c").leases
    last = await leased(fresh, 1, "c")
    assert last.units[0].num_deliveries == 2
    await fresh.nack(last.id, reason="x")
    assert list(fresh.state.consumer("c").quarantined) == [1]


# --- quarantine


async def quarantined(world: World, **changes: Any) -> Buffer:
    """A buffer whose one group its consumer doesn't get any more."""
    consumers = [{"name": "c", "unit": "group", "max_deliveries": 1}, {"name": "d"}]
    buffer = await world.create(group_size=2, consumers=consumers, **changes)
    await buffer.push(push((0, 0), (0, 1)))
    await buffer.nack((await leased(buffer, 1, "c")).id, reason="x")
    assert list(buffer.state.consumer("c").quarantined) == [1]
    return buffer


async def test_a_refused_release_keeps_the_quarantine(world: World, refusals: Refusals) -> None:
    buffer = await quarantined(world)
    consumer = buffer.state.consumer("c")
    refusals.num_next = 1
    with pytest.raises(StoreFullError):
        await buffer.release(consumer.name, [])
    assert list(consumer.quarantined) == [1]
    assert len(consumer.ready) == 0
    again, twice = buffer.release("c", [uid(0, 1)]), buffer.release("c")
    assert list(await asyncio.gather(again, twice)) == [1, 0]
    for place in (buffer, await world.restart(buffer)):
        consumer = place.state.consumer("c")
        assert (len(consumer.ready), len(consumer.quarantined)) == (1, 0)


async def test_what_is_left_of_a_quarantined_group_stays_there(
    world: World, refusals: Refusals
) -> None:
    buffer = await quarantined(world)
    first, second = list(buffer.state.contents)
    await buffer.delete([second])
    for place in (buffer, await world.restart(buffer)):
        assert list(place.state.consumer("c").quarantined) == [1]
        assert len(place.state.consumer("c").ready) == 0
    fresh = place
    refusals = Refusals(world.store)
    (first,) = fresh.state.contents
    refusals.num_next = 1
    with pytest.raises(StoreFullError):
        await fresh.delete([first])
    consumer = fresh.state.consumer("c")
    assert list(consumer.quarantined) == [1]
    assert len(consumer.ready) == 0
    await fresh.delete([first])
    assert not consumer.quarantined


async def test_an_ack_ends_the_quarantine(world: World) -> None:
    buffer = await world.create(consumers=[{"name": "c", "max_deliveries": 1}, {"name": "d"}])
    await buffer.push(push((0, 0)))
    lease = await leased(buffer, 1, "c")
    consumer = buffer.state.consumer("c")
    batch = world.store.batch()
    buffer.state.progress.quarantine(batch, lease.units[0], consumer, "by another lease")
    await buffer.ack(lease.id)
    assert not consumer.quarantined
    fresh = await world.restart(buffer)
    assert not fresh.state.consumer("c").quarantined


# --- rows of what leaves


async def test_a_row_does_not_outlive_its_experience(world: World) -> None:
    buffer = await world.create(consumers=TWO)
    await buffer.push(push((0, 0), (0, 1)))
    await consume(buffer, 2, "c", step=1)
    entry = buffer.state.contents.by_uid(uid(0, 1))
    assert entry is not None
    delete = await begin(buffer.delete([entry]))
    await buffer.declare_safe("c", 1)
    await delete
    (state,) = world.store.load()
    assert [row.seq for row in state.progress] == [1]


async def test_a_row_is_stored_after_all_if_the_removal_fails(
    world: World, refusals: Refusals
) -> None:
    buffer = await world.create(consumers=TWO)
    await buffer.push(push((0, 0)))
    await consume(buffer, 1, "c", step=1)
    refusals.num_next = 1
    delete = await begin(buffer.delete(list(buffer.state.contents)))
    await buffer.declare_safe("c", 1)
    with pytest.raises(StoreFullError):
        await delete
    buffer.tick(time.time())
    await buffer.drain()
    (state,) = world.store.load()
    assert [row.steps["c"] for row in state.progress] == [[]]


async def test_deleting_what_is_retained_looks_once_at_a_step(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await world.create(consumers=[{"name": "c"}])
    await buffer.push(push(*((0, run) for run in range(31))))
    await consume(buffer, 17, "c", step=1)
    await consume(buffer, 14, "c", step=2)
    forgotten: list[tuple[int, int]] = []
    forget = Timeline.forget

    def counted(self: Timeline, step: int, seqs: list[int]) -> None:
        forgotten.append((step, len(seqs)))
        forget(self, step, seqs)

    monkeypatch.setattr(Timeline, "forget", counted)
    await buffer.delete(list(buffer.state.contents))
    assert sorted(forgotten) == [(1, 17), (2, 14)]
    timeline = buffer.state.consumer("c").timeline
    assert (timeline.num_retained, timeline.last_step) == (0, 2)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Failures in the background are logged; they are what these tests are about."""
    caplog.set_level(logging.WARNING)
