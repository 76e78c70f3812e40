"""What leaves a full buffer: what is spared, what goes first, and how much of it is looked at."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from experience_buffer import errors
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.annotation import Annotation
from experience_buffer_server.runtime.tuning import TUNING
from tests.unit.buffer.leaving.test_group_closing import full_disk
from tests.unit.buffer.leaving.test_retention import CLOCK, clock, sample
from tests.unit.buffer_verbs import change, dropped, leased, pushed, stored, take
from tests.unit.builders import World, push, settle, uid

__all__ = ["clock"]


async def evicting(world: World, max_items: int, **changes: Any) -> Buffer:
    given: dict[str, Any] = {"group_by": "none", "on_full": "evict", "max_items": max_items}
    return await world.create(**(given | changes))


async def make_room_for(buffer: Buffer, *members: tuple[int, int]) -> None:
    await buffer.push(push(*members))
    await buffer.drain()


async def test_what_a_rewind_has_brought_back_stays_until_it_is_consumed(world: World) -> None:
    buffer = await evicting(world, 3)
    await buffer.push(push((1, 0), (2, 0), (3, 0)))
    await buffer.ack(await sample(buffer, 1), step=5)
    await buffer.rewind("trainer", 1)
    await make_room_for(buffer, (4, 0))
    assert stored(buffer) == [(1, 0), (3, 0), (4, 0)]
    lease_id = await sample(buffer, 1)
    await buffer.nack(lease_id, reason="test")
    await make_room_for(buffer, (5, 0))
    assert stored(buffer) == [(1, 0), (4, 0), (5, 0)]


@pytest.mark.parametrize("group_by", ["none", "task"])
async def test_the_damaged_leave_first_and_are_counted_apart(world: World, group_by: str) -> None:
    consumers = [{"name": "trainer", "unit": "item" if group_by == "none" else "group"}]
    buffer = await evicting(world, 6, group_by=group_by, group_size=2, consumers=consumers)
    await buffer.push(push(*((task, run) for task in range(3) for run in range(2))))
    buffer.set_aside({3: "its payload is gone", 4: "its payload is gone"})
    await make_room_for(buffer, (7, 0), (7, 1))
    assert stored(buffer) == [(0, 0), (0, 1), (2, 0), (2, 1), (7, 0), (7, 1)]
    assert (dropped(world, buffer, "damaged"), dropped(world, buffer, "evicted")) == (2, 0)
    buffer.set_aside({6: "its payload is gone"})
    buffer = await world.restart(buffer)
    await make_room_for(buffer, (8, 0), (8, 1))
    rest = [(2, 0)] if group_by == "none" else []
    before = [(0, 1)] if group_by == "none" else [(0, 0), (0, 1)]
    assert stored(buffer) == [*before, *rest, (7, 0), (7, 1), (8, 0), (8, 1)]


async def test_a_call_looks_at_a_bounded_number_of_what_cannot_leave(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TUNING, "vain_looks", 10)
    buffer = await evicting(world, 60)
    await buffer.push(push(*((1, run) for run in range(60))))
    await sample(buffer, 35)
    looked: list[int] = []
    is_idle = buffer.state.is_idle

    def counting(entry: Any) -> bool:
        looked.append(entry.record.seq)
        return is_idle(entry)

    monkeypatch.setattr(buffer.state, "is_idle", counting)
    for _ in range(3):
        with pytest.raises(errors.BufferFullError, match="max_items = 60"):
            await buffer.push(push((2, 0)))
    assert looked == list(range(1, 31))
    await make_room_for(buffer, (2, 0))
    assert looked == list(range(1, 37)), "each goes on where the one before has ended"
    buffer.tick(CLOCK.now)
    assert len(looked) == 36, "not again so soon"
    CLOCK.now += 1.0
    monkeypatch.setattr(TUNING, "parked_looks_per_tick", 4)
    buffer.tick(CLOCK.now)
    assert looked[36:] == [1, 2, 3, 4]


def grouped(unit: str = "group") -> dict[str, Any]:
    consumers = [{"name": "trainer", "unit": unit}]
    return {"group_by": "task", "group_size": 2, "consumers": consumers}


async def test_open_groups_leave_last_and_the_oldest_first(world: World) -> None:
    buffer = await evicting(world, 4, **grouped())
    await buffer.push(push((1, 0), (2, 0), (3, 0), (3, 1)))
    await make_room_for(buffer, (4, 0))
    assert stored(buffer) == [(1, 0), (2, 0), (4, 0)], "what is whole makes room before"
    await make_room_for(buffer, (5, 0))
    await make_room_for(buffer, (6, 0), (2, 1))
    assert stored(buffer) == [(2, 0), (5, 0), (6, 0), (2, 1)], "4 would have been torn after 1"
    assert dropped(world, buffer, "evicted") == 4
    (late,) = await buffer.push(push((1, 1)))
    assert "group '2/1' was dropped" in late.message
    assert buffer.flow.eviction.num_items == 0


async def test_an_open_group_that_somebody_holds_stays(world: World) -> None:
    buffer = await evicting(world, 2, **grouped("item"))
    await buffer.push(push((1, 0), (2, 0)))
    await sample(buffer, 1)
    await make_room_for(buffer, (3, 0))
    assert stored(buffer) == [(1, 0), (3, 0)]


@pytest.mark.on_disk
async def test_an_open_group_is_dropped_once_there_is_room_on_the_disk(world: World) -> None:
    buffer = await evicting(world, 2, **grouped())
    await buffer.push(push((1, 0), (2, 0)))
    with full_disk(world), pytest.raises(errors.BufferFullError):
        await make_room_for(buffer, (3, 0))
    await settle(buffer, after=1)
    assert stored(buffer) == [(2, 0)]
    buffer = await world.restart(buffer)
    assert [group.row.key for group in buffer.state.contents.groups] == ["2/2"]


@pytest.mark.parametrize("end", ["ack", "nack"])
async def test_what_comes_back_can_be_chosen_at_once(world: World, end: str) -> None:
    """The end of a lease says so: neither a tick nor a second has to pass."""
    buffer = await evicting(world, 3, consumers=[{"name": "trainer", "replay": True}])
    await buffer.push(push((1, 0), (2, 0), (3, 0)))
    lease_id = await sample(buffer, 3)
    with pytest.raises(errors.BufferFullError):
        await buffer.push(push((4, 0)))
    if end == "ack":
        await buffer.ack(lease_id)
    else:
        await buffer.nack(lease_id, reason="test")
    await make_room_for(buffer, (4, 0))
    assert stored(buffer) == [(2, 0), (3, 0), (4, 0)]


async def test_a_lowered_limit_is_reached_step_by_step(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TUNING, "shed_per_tick", 5)
    buffer = await evicting(world, 60)
    await buffer.push(push(*((1, run) for run in range(12))))
    size = sum(entry.record.payload_bytes for entry in buffer.state.contents)
    await change(buffer, max_items=0, max_bytes=size // 6)
    left = []
    for _ in range(3):
        await settle(buffer, after=0)
        left.append(len(buffer.state.contents))
    assert left == [7, 2, 2], "by bytes too: small ones are many"


@pytest.mark.on_disk
async def test_what_found_no_room_to_leave_can_be_chosen_again(world: World) -> None:
    buffer = await evicting(world, 6)
    await buffer.push(push((1, 0), (1, 1), (1, 2)))
    await change(buffer, max_items=1)
    with full_disk(world):
        await settle(buffer, after=0)
    assert len(buffer.state.contents) == 3
    assert dropped(world, buffer, "evicted") == 0
    await settle(buffer, after=0)
    assert stored(buffer) == [(1, 2)]
    assert dropped(world, buffer, "evicted") == 2


@pytest.mark.parametrize("group_by", ["none", "task"])
async def test_what_was_consumed_is_not_remembered(world: World, group_by: str) -> None:
    buffer = await evicting(world, 60, group_by=group_by, group_size=2)
    for task in range(4):
        await buffer.push(push((task, 0), (task, 1)))
        await buffer.ack(await sample(buffer, 2))
    await buffer.push(push((9, 0), (9, 1)))
    assert buffer.flow.eviction._units is not None
    assert len(buffer.flow.eviction._units) == len(
        {entry.group or entry for entry in buffer.state.contents}
    )


async def test_an_annotated_value_counts(world: World) -> None:
    buffer = await evicting(world, 3, remover={"kind": "min", "key": "reward"})
    for run in range(3):
        await buffer.push(pushed((1, run), reward=run + 1.0))
    await buffer.annotate([Annotation(uid=uid(1, 2), reward=-1.0)])
    await make_room_for(buffer, (2, 0))
    assert stored(buffer) == [(1, 0), (1, 1), (2, 0)]


async def test_a_consumer_chooses_by_an_annotated_value(world: World) -> None:
    trainer = {"name": "trainer", "raw": True, "selector": {"kind": "max", "key": "reward"}}
    buffer = await world.holding(push((1, 0), (1, 1)), group_by="none", consumers=[trainer])
    await buffer.annotate([Annotation(uid=uid(1, 0), reward=9.0)])
    lease = await leased(buffer)
    assert lease.units[0].seqs == (1,)


@pytest.mark.parametrize("on_full", ["evict", "refuse", "block"])
@pytest.mark.parametrize("seed", range(3))
async def test_groups_of_any_mixture_stay_whole_and_within_bounds(
    world: World, on_full: str, seed: int
) -> None:
    chance = random.Random(seed)
    buffer = await evicting(world, 6, **grouped() | {"on_full": on_full, "group_size": 3})
    most = 0
    for task in range(80):
        members = {
            (task - chance.randrange(min(task + 1, 6)), chance.randrange(3)) for _ in range(3)
        }
        pushes = [buffer.push(push(*members)), buffer.push(push((task, 0)))]
        for found in await asyncio.gather(*pushes, return_exceptions=True):
            assert isinstance(found, list | errors.BufferFullError), found
        if chance.random() < 0.4:
            lease_id = await take(buffer, chance.randint(1, 2))
            if lease_id and chance.random() < 0.7:
                await buffer.ack(lease_id)
        await buffer.drain()
        buffer.state.check()
        most = max(most, buffer.num_items)
        assert (buffer.flow.eviction.num_items, buffer.flow.eviction.num_bytes) == (0, 0)
        assert all(group.num_members <= 3 for group in buffer.state.contents.groups)
    assert most <= 6 * 3
    assert most > 6, "what completes groups goes beyond"
    fresh = world.reload(buffer)
    assert stored(fresh) == stored(buffer)
