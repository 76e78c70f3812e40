"""Groups that are closed or dropped while nothing can be written."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from experience_buffer import trxp
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.store.interface import StoreFullError
from tests.refusing_store import Refusals
from tests.unit.buffer.compute.test_races import PARTIAL
from tests.unit.buffer_verbs import dropped, pushed
from tests.unit.builders import World, experience, push, settle, uid

WITHHOLD: dict[str, Any] = {
    "group_size": 2,
    "advantage": {"estimator": "grpo", "zero_variance": "withhold"},
}
DEADLINE: dict[str, Any] = {
    "group_size": 3,
    "group_deadline_seconds": 60,
    "on_group_deadline": "drop",
}
Go = Callable[[World, Buffer], Awaitable[None]]


@contextlib.contextmanager
def full_disk(world: World) -> Iterator[None]:
    """No byte can be written to the store, as on a disk that others have filled."""
    assert world.lmdb._process is not None
    pid = world.lmdb._process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


async def compute(world: World, buffer: Buffer) -> None:
    """All rewards are equal: nothing to teach."""
    world.computer.start()
    await settle(buffer)


async def expire(world: World, buffer: Buffer) -> None:
    await settle(buffer, after=61)


async def command(world: World, buffer: Buffer) -> None:
    with pytest.raises(StoreFullError):
        await buffer.drop("2/0", "no use")


@pytest.mark.on_disk
@pytest.mark.parametrize(
    ("settings", "go"), [(WITHHOLD, compute), (DEADLINE, expire), (DEADLINE, command)]
)
async def test_a_drop_that_finds_no_room_is_done_when_there_is_some(
    world: World, settings: dict[str, Any], go: Go
) -> None:
    buffer = await world.create(**settings)
    equal = [experience(0, run, reward=0.3) for run in range(2)]
    await buffer.push(Push(payloads=[trxp.encode(equal)]))
    now = time.time() + 100
    with full_disk(world):
        await go(world, buffer)
        for seconds in (0, 10):
            buffer.tick(now + seconds)
            await buffer.drain()
        assert [entry.record.uid for entry in buffer.state.contents] == [uid(0, 0), uid(0, 1)]
        assert not any(entry.is_staying for entry in buffer.state.contents), "nobody is to get them"
    buffer.tick(now + 10.5)
    await buffer.drain()
    assert len(buffer.state.contents) == 2, "not tried again at once"
    buffer.tick(now + 20)
    await buffer.drain()
    assert not list(buffer.state.contents)
    (late,) = await buffer.push(push((0, 2)))
    assert (late.status, late.reason) == ("refused", "late")
    fresh = await world.restart(buffer)
    assert not list(fresh.state.contents)
    assert not list(fresh.state.contents.groups)
    (late,) = await fresh.push(push((0, 2)))
    assert (late.status, late.reason) == ("refused", "late")
    for place in (fresh, buffer):
        assert not place.flow.state.changes.num_owed
        assert not place.flow.grouping._undone


@pytest.mark.on_disk
async def test_all_that_was_dropped_meanwhile_is_done(world: World) -> None:
    buffer = await world.create(**DEADLINE)
    await buffer.push(push(*((task, run) for task in range(7) for run in range(2))))
    with full_disk(world):
        for seconds in (0, 10, 20):
            await settle(buffer, after=61 + seconds)
        assert len(buffer.state.contents) == 14
    await settle(buffer, after=100)
    assert not list(buffer.state.contents)
    assert dropped(world, buffer, "group_dropped") == 14


async def test_a_seal_that_finds_no_room_leaves_the_group_open(world: World) -> None:
    buffer = await world.holding(push((0, 0), (0, 1)), group_size=3)
    Refusals(world.store).num_next = 1
    with pytest.raises(StoreFullError):
        await buffer.seal("2/0")
    for place in (buffer, await world.restart(buffer)):
        (group,) = place.state.contents.groups
        assert (group.is_open, group.describe()) == (True, "2 of 3")
    await place.push(push((0, 2)))
    assert (group.row.closed, group.available) == ("whole", True)


async def test_a_deadline_whose_row_finds_no_room_is_looked_at_again(world: World) -> None:
    buffer = await world.computing(pushed((0, 0), (0, 1)), **PARTIAL | {"group_size": 4})
    await buffer.push(pushed((0, 2), reward=None))
    (group,) = buffer.state.contents.groups
    Refusals(world.store).num_next = 1
    await settle(buffer, after=61)
    assert group.is_open
    assert len(buffer.state.contents) == 2, "what lacks a field has gone, and is counted"
    assert dropped(world, buffer, "missing_field") == 1
    await settle(buffer, after=100)
    for place in (buffer, await world.restart(buffer)):
        (group,) = place.state.contents.groups
        assert (group.row.closed, group.available) == ("deadline", True)
