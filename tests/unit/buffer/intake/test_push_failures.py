"""Pushes whose commit finds no room, and what happened to their groups meanwhile."""

from __future__ import annotations

import asyncio
import time

import pytest

from experience_buffer import errors
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.buffer.state.entries import Reason
from tests.refusing_store import Held, Refusals
from tests.unit.buffer.compute.test_races import PARTIAL
from tests.unit.buffer_verbs import counted, pushed
from tests.unit.builders import World, begun, push, settle, uid


class Pushing:
    """A push whose commit is under way, and that will find no room."""

    def __init__(self, world: World, buffer: Buffer, push: Push) -> None:
        self._commit = Held(world.store)
        self._task = asyncio.ensure_future(buffer.push(push))
        self._buffer = buffer

    async def fail(self) -> None:
        """The commit ends."""
        self._commit.refuse()
        with pytest.raises(errors.BufferFullError):
            await self._task
        await self._buffer.drain()


async def pushing(world: World, buffer: Buffer, push: Push) -> Pushing:
    """Begin a push; it has come as far as its commit when this returns."""
    begun = Pushing(world, buffer, push)
    await asyncio.sleep(0)
    return begun


async def test_a_dropped_group_stays_dropped(world: World) -> None:
    buffer = await world.create(group_size=3)
    member = await pushing(world, buffer, push((1, 0)))
    await buffer.drop("2/1", "no use")
    await member.fail()
    assert not len(buffer.state.contents.groups)
    for restarts in (False, True):
        place = await world.restart(buffer) if restarts else buffer
        (late,) = await place.push(push((1, 0)))
        assert late.reason is Reason.LATE


async def test_a_sealed_group_is_as_large_as_it_is(world: World) -> None:
    buffer = await world.holding(push((1, 0)), group_size=3)
    member = await pushing(world, buffer, push((1, 1)))
    await buffer.seal("2/1", 0)
    await member.fail()
    for place in (buffer, await world.restart(buffer)):
        (group,) = place.state.contents.groups
        assert (group.row.closed, group.describe()) == ("sealed", "1 of 1")
        assert (group.available, group.has_consumed) == (True, False)


async def test_what_lacks_a_field_at_its_deadline_may_be_on_its_way(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = await world.computing(pushed((1, 0)), **PARTIAL)
    member = await pushing(world, buffer, pushed((1, 1), reward=None))
    buffer.tick(time.time() + 61)
    await member.fail()
    await settle(buffer, after=100)
    assert not caplog.records
    for place in (buffer, await world.restart(buffer)):
        (left,) = place.state.contents
        assert (left.record.uid, left.available) == (uid(1, 0), True)
        (group,) = place.state.contents.groups
        assert (group.row.closed, group.num_durable, group.available) == ("deadline", 1, True)


def num_counted(world: World, buffer: Buffer, outcome: str) -> float:
    return counted(world, buffer, "pushed_experiences", outcome=outcome, reason="")


async def test_what_is_stored_is_counted_though_its_call_was_given_up(world: World) -> None:
    buffer = await world.create()
    refusals = Refusals(world.store)
    refusals.held = asyncio.Event()
    call = await begun(buffer.push(push((1, 0), (1, 1))))
    call.cancel()
    await asyncio.sleep(0)
    assert num_counted(world, buffer, "stored") == 0
    refusals.held.set()
    await buffer.drain()
    assert num_counted(world, buffer, "stored") == 2
    await buffer.push(push((1, 1), (1, 2)))
    assert num_counted(world, buffer, "stored") == 3
    assert num_counted(world, buffer, "duplicate") == 1


async def test_what_finds_no_room_is_not_counted(world: World) -> None:
    buffer = await world.create()
    member = await pushing(world, buffer, push((1, 0)))
    await member.fail()
    assert num_counted(world, buffer, "stored") == 0
