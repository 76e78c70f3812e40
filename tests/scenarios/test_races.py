"""Two calls at once on the same group or experience: one order or the other, never a mixture."""

from __future__ import annotations

import asyncio

import pytest

from experience_buffer import errors, trxp
from experience_buffer_server.buffer.intake.push_reading import Push, PushStatus
from experience_buffer_server.buffer.state.entries import Reason
from tests.refusing_store import Refusals, begin
from tests.unit.buffer_verbs import leased
from tests.unit.builders import World, eid, experience, push, want


async def test_members_on_their_way_out_count_once(world: World) -> None:
    buffer = await world.create(group_size=4)
    await buffer.push(push((1, 0), (1, 1)))
    lease = await leased(buffer, 2)
    _, third = await asyncio.gather(buffer.ack(lease.id), buffer.push(push((1, 2))))
    fourth = await buffer.push(push((1, 3)))
    assert [outcome.status for outcome in (*third, *fourth)] == [PushStatus.STORED] * 2
    (late,) = await buffer.push(push((1, 4)))
    assert late.reason is Reason.LATE


@pytest.mark.parametrize("drop_first", [True, False])
async def test_a_dropped_group_stays_dropped(world: World, drop_first: bool) -> None:
    buffer = await world.create(group_size=3)
    await buffer.push(push((1, 0), (1, 1)))
    group = buffer.state.contents.groups.get("2/1")
    assert group is not None
    calls = [buffer.drop("2/1", "no use"), buffer.seal("2/1", 0)]
    await asyncio.gather(*(calls if drop_first else reversed(calls)))
    assert group.row.closed == "dropped"
    assert len(buffer.state.contents) == 0


async def test_nothing_that_is_leased_is_deleted(world: World) -> None:
    for sample_first in (True, False):
        buffer = await world.create(1 + sample_first)
        await buffer.push(push((1, 0)))
        sample = buffer.sample("trainer", want(1), asyncio.Event())
        delete = buffer.delete(list(buffer.state.contents))
        if sample_first:
            (lease, _), (held, num_deleted) = await asyncio.gather(sample, delete)
            assert lease is not None
            assert (len(held), num_deleted) == (1, 0)
        else:
            (held, num_deleted), (lease, _) = await asyncio.gather(delete, sample)
            assert (lease, len(held), num_deleted) == (None, 0, 1)


async def test_numbers_beyond_64_bits_cost_their_neighbours_nothing(world: World) -> None:
    buffer = await world.create(group_size=2)
    far = experience(1, 7)
    far.eid.run = 2**64
    payload = trxp.encode([experience(1, 0), far, experience(1, 1)])
    first, refused, second = await buffer.push(Push(payloads=[payload]))
    assert (first.status, second.status) == (PushStatus.STORED, PushStatus.STORED)
    assert refused.reason is Reason.INVALID
    assert "run is 18446744073709551616; it must fit into 64 bits" in refused.message
    assert buffer.num_items == 2


async def test_tombstones_need_groups(world: World) -> None:
    buffer = await world.create(group_by="none")
    (refused,) = await buffer.push(push(dead=[(1, 0)]))
    assert refused.reason is Reason.INVALID
    assert refused.uid == eid(1, 0).uid
    assert "leave it out" in refused.message


@pytest.mark.parametrize("key", ["", "k" * 501])
async def test_keys_that_no_group_can_have(world: World, key: str) -> None:
    buffer = await world.create()
    with pytest.raises(errors.InvalidRequestError, match="group key"):
        await buffer.drop(key, "no use")


async def test_a_group_is_whole_once_all_of_it_is_on_disk(world: World, refusals: Refusals) -> None:
    actor = {"name": "actor", "unit": "group", "raw": True}
    buffer = await world.create(group_size=2, consumers=[actor])
    refusals.held = heard = asyncio.Event()
    first = await begin(buffer.push(push((0, 0))))
    refusals.held = asyncio.Event()
    last = await begin(buffer.push(push((0, 1))))
    heard.set()
    await first
    assert [group.row.closed for group in buffer.state.contents.groups] == ["whole"]
    assert not len(buffer.state.consumers["actor"].ready), "its last member may still be refused"
    refusals.held.set()
    await last
    assert len(buffer.state.consumers["actor"].ready) == 1
