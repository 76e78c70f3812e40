"""Results that come back to a buffer that has changed since they were asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from experience_buffer import trxp
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.runtime.tuning import TUNING
from experience_buffer_server.store.interface import StoreFullError, WriteBatch
from tests.unit.buffer.compute.test_races import RUNNING, in_flight
from tests.unit.buffer_verbs import change
from tests.unit.builders import World, experience, push, settle, until

RLOO: dict[str, Any] = {"group_size": 2, "advantage": {"estimator": "rloo"}}

BATCH: dict[str, Any] = {
    "group_size": 2,
    "advantage": {"estimator": "rloo", "reward_norm_std": "batch", "batch_size": 2},
}


class Rides:
    """Rides of a world's store that end when the test says how."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[asyncio.Future[None]] = []
        monkeypatch.setattr(world.store, "ride", self._ride)

    def _ride(self, batch: WriteBatch) -> asyncio.Future[None]:
        ride: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(ride)
        return ride

    def refuse(self) -> None:
        self.waiting.pop(0).set_exception(StoreFullError("full"))


async def test_a_buffer_deleted_while_its_results_find_no_room_holds_nothing_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await world.computing(**RUNNING)
    with monkeypatch.context() as patch:
        rides = Rides(world, patch)
        await buffer.push(push((1, 0), (1, 1)))
        await until(lambda: rides.waiting)
        buffer.close()
        rides.refuse()
        await buffer.drain()
    await until(lambda: not world.computer._in_flight)
    assert not world.computer._held
    assert not buffer.flow.computing.num_jobs


async def test_nobody_waits_behind_a_deleted_buffer(world: World) -> None:
    buffer, other = await world.create(1, **RLOO), await world.create(2, **RLOO)
    for each in (buffer, other):
        await each.push(push((1, 0), (1, 1), (2, 0), (2, 1)))
    buffer.close()
    ((*left,),) = world.computer._lanes.values()
    assert [work.state for work in left] == [other.state] * 2
    assert not buffer.flow.computing.num_jobs
    world.computer.start()
    await settle(other)
    assert all(entry.available for entry in other.state.contents)


async def test_what_comes_back_to_a_deleted_buffer_is_counted_nowhere(world: World) -> None:
    buffer = await world.computing(push((1, 0), (1, 1)), **RLOO)
    await in_flight(world)
    buffer.close()
    world.metrics.forget_buffer(buffer.name)
    await settle(buffer)
    families = world.metrics.registry.collect()
    named = [s for family in families for s in family.samples if buffer.name in s.labels.values()]
    assert not named


async def test_a_batch_is_stored_part_by_part_before_the_next_is_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push waits for a part of it only; what finds no room stays under way."""
    monkeypatch.setattr(TUNING, "stored_at_once_bytes", 1)
    buffer = await world.computing(**BATCH)
    with monkeypatch.context() as patch:
        rides = Rides(world, patch)
        await buffer.push(push((1, 0), (1, 1), (2, 0), (2, 1)))
        await until(lambda: rides.waiting)
        rides.waiting.pop(0).set_result(None)
        await until(lambda: rides.waiting)
        assert [entry.available for entry in buffer.state.contents] == [True, True, False, False]
        rides.refuse()
        await buffer.drain()
        assert world.computer._in_flight
        assert buffer.flow.describe_wait() == "1 changes wait to be stored: full"
    await settle(buffer, after=2)
    await until(lambda: not world.computer._in_flight)
    assert all(entry.available for entry in buffer.state.contents)


async def test_what_failed_under_old_settings_is_computed_under_new_ones(world: World) -> None:
    buffer = await world.computing(
        group_size=2, advantage={"estimator": "rloo", "reward_scale": 1e9}
    )
    payloads = [trxp.encode([experience(1, 0, reward=3e38), experience(1, 1)])]
    await buffer.push(Push(payloads=payloads))
    await in_flight(world)
    await change(buffer, advantage={"estimator": "rloo"})
    await settle(buffer)
    assert not buffer.state.contents.quarantined
    assert all(entry.available for entry in buffer.state.contents)


async def test_what_old_settings_made_available_waits_for_no_new_field(world: World) -> None:
    buffer = await world.computing(
        **RLOO, group_deadline_seconds=60, on_group_deadline="drop", on_missing_field="wait"
    )
    await buffer.push(push((1, 0), (1, 1)))
    await in_flight(world)
    await change(buffer, advantage={"estimator": "gae"})
    await settle(buffer)
    assert all(entry.available for entry in buffer.state.contents)
    assert not buffer.state.contents.lacking
    await settle(buffer, after=61)
    assert len(buffer.state.contents) == 2


async def test_moments_of_another_estimator_stay_void(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await world.computed(push((1, 0), (1, 1)), **RUNNING)
    with monkeypatch.context() as patch:
        rides = Rides(world, patch)
        await buffer.push(push((2, 0), (2, 1)))
        await until(lambda: rides.waiting)
        await change(buffer, advantage={"estimator": "dr_grpo", "running_norm": "std"})
        assert not buffer.row.moments
        rides.refuse()
        await buffer.drain()
    assert not buffer.row.moments
