"""Settings that change while something else happens, or while nothing can be stored."""

from __future__ import annotations

import asyncio

import pytest

from experience_buffer import errors
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.registry import Registry
from experience_buffer_server.buffer.state.departure import Cause
from experience_buffer_server.store.interface import StoreFullError
from tests.refusing_store import Refusals
from tests.unit.buffer_verbs import consume, of_version, take
from tests.unit.builders import World, begun, push, settings, settle, uid, until


async def registered(world: World, *consumers: str) -> tuple[Registry, Buffer]:
    registry = world.registry()
    return registry, await registry.create("math", settings(consumers=consumers))


async def restarted(world: World, registry: Registry) -> Buffer:
    await registry.drain()
    await world.store.close()
    await world.open()
    again = world.registry()
    await again.load()
    await again.drain()
    return again.get("math")


async def test_a_refused_removal_of_a_consumer_costs_nothing(world: World) -> None:
    registry, buffer = await registered(world, "actor", "critic")
    await buffer.push(push(*((0, run) for run in range(4))))
    await consume(buffer, 4, "actor")
    await consume(buffer, 1, "critic", step=5)
    held, returned = await take(buffer, 1, "critic"), await take(buffer, 1, "critic")
    Refusals(world.store).num_next = 1
    update = await begun(registry.update("math", {"consumers": ["actor"]}))
    await until(lambda: buffer.state.consumers["critic"].closed)
    with pytest.raises(errors.ConsumerNotFoundError, match=r"it has \['actor'\]"):
        await take(buffer, 1, "critic")
    await buffer.nack(returned, reason="too late")
    with pytest.raises(StoreFullError):
        await update
    await registry.drain()
    for now in (buffer, await restarted(world, registry)):
        critic = now.state.consumer("critic")
        assert len(now.state.contents) == 4
        assert sorted(consumer.name for consumer in now.settings.consumers) == ["actor", "critic"]
        assert (len(critic.ready), list(critic.leases)) == (2, [held])
        assert critic.timeline.num_retained == 1
    await now.ack(held)
    assert len(now.state.contents) == 3


async def test_an_ack_while_a_consumer_goes_costs_nothing_if_it_stays(world: World) -> None:
    buffer = await world.holding(push((0, 0)), consumers=["actor", "critic"])
    lease = await take(buffer, 1, "actor")
    Refusals(world.store).num_next = 1
    update = buffer.change_settings(settings(consumers=["actor"]))
    await buffer.ack(lease)
    with pytest.raises(StoreFullError):
        await update
    await buffer.drain()
    assert len(buffer.state.contents) == len(buffer.state.consumer("critic").ready) == 1


async def test_what_a_removed_consumer_was_is_forgotten_with_the_settings(world: World) -> None:
    registry, buffer = await registered(world, "actor", "critic")
    await buffer.push(push((0, 0), (0, 1), (0, 2)))
    await consume(buffer, 2, "actor")
    await consume(buffer, 1, "critic", step=5)
    lease = await take(buffer, 1, "critic")
    changing = buffer.change_settings(settings(consumers=["actor"]))
    assert len(buffer.state.contents) == 3, "not before the settings are on disk"
    await changing
    await buffer.drain()
    assert [entry.record.uid for entry in buffer.state.contents] == [uid(0, 2)]
    with pytest.raises(errors.LeaseNotFoundError, match="was nacked"):
        await buffer.ack(lease)
    await registry.update("math", {"consumers": ["actor", "critic"]})
    state = next(state for state in world.store.load() if state.row.name == "math")
    assert state.consumers == []
    critic = (await restarted(world, registry)).state.consumer("critic")
    assert (len(critic.ready), critic.timeline.last_step, critic.leases) == (1, None, {})


async def test_a_consumer_goes_with_one_batch(world: World) -> None:
    """A crash can't come between the settings and what is stored of a consumer that goes."""
    buffer = await world.holding(push((0, 0), (0, 1)), consumers=["actor", "critic"])
    await consume(buffer, 1, "critic", step=5)
    await take(buffer, 1, "critic")
    refusals = Refusals(world.store)
    changing = buffer.change_settings(settings(consumers=["actor"]))
    refusals.num_next = 100
    await changing
    await buffer.drain()
    (state,) = world.store.load()
    assert state.row.config == settings(consumers=["actor"]).model_dump_json()
    # An ack with a step keeps its units: in which order they were delivered.
    told = [(lease.state, lease.units) for lease in state.leases]
    assert told == [("acked", [[1]]), ("nacked", [])]
    assert (state.consumers, [row.steps for row in state.progress]) == ([], [{}])


async def test_a_refused_new_consumer_goes_again(world: World) -> None:
    buffer = await world.holding(push((0, 0), (0, 1)), consumers=["actor"])
    lease = await take(buffer, 1, "actor")
    Refusals(world.store).num_next = 1
    changing = buffer.change_settings(settings(consumers=["actor", "late"]))
    late = await take(buffer, 2, "late")
    await buffer.ack(lease)
    with pytest.raises(StoreFullError):
        await changing
    await buffer.drain()
    assert list(buffer.state.consumers) == ["actor"]
    assert [entry.record.uid for entry in buffer.state.contents] == [uid(0, 1)]
    with pytest.raises(errors.LeaseNotFoundError):
        await buffer.ack(late)


async def test_updates_at_once_start_from_what_was_stored(world: World) -> None:
    registry, buffer = await registered(world, "actor")
    Refusals(world.store).num_next = 1
    refused, done = await asyncio.gather(
        registry.update("math", {"group_size": 7}),
        registry.update("math", {"lease_seconds": 11.0}),
        return_exceptions=True,
    )
    assert isinstance(refused, StoreFullError)
    assert isinstance(done, Buffer)
    await registry.drain()
    expected = settings(consumers=["actor"], lease_seconds=11.0)
    assert buffer.settings == expected
    assert (await restarted(world, registry)).settings == expected


async def test_a_refused_change_stays_refused_though_the_row_is_stored_again(world: World) -> None:
    registry, buffer = await registered(world, "actor")
    Refusals(world.store).num_next = 1
    update = asyncio.ensure_future(registry.update("math", {"group_size": 7}))
    await until(lambda: buffer.settings.group_size == 7)
    await buffer.publish(3)
    with pytest.raises(StoreFullError):
        await update
    again = await restarted(world, registry)
    assert (again.settings.group_size, again.row.policy_version) == (0, 3)


async def test_what_is_done_and_found_no_room_is_not_taken_from_newcomers(world: World) -> None:
    buffer = await world.holding(push((0, 0)), consumers=["actor", "critic"])
    await consume(buffer, 1, "actor")
    refusals = Refusals(world.store)
    changing = buffer.change_settings(settings(consumers=["actor"]))
    refusals.num_next = 2
    await changing
    await buffer.drain()
    assert len(buffer.state.contents) == 1
    await buffer.change_settings(settings(consumers=["actor", "late"]))
    await settle(buffer, after=10)
    assert len(buffer.state.contents) == 1
    await consume(buffer, 1, "late")
    assert len(buffer.state.contents) == 0


async def test_nobody_leases_what_is_being_discarded(world: World) -> None:
    """What too stale means for one consumer is decided and submitted at once."""
    old = {"max_lag": 0, "on_stale": "drop"}
    consumers = [{"name": "fresh", "staleness": old}, "any"]
    buffer = await world.holding(of_version(0, (0, 0)), consumers=consumers)
    buffer.row.policy_version = 3
    assert await take(buffer, 1, "fresh") == 0
    buffer.flow.removal.drop(list(buffer.state.contents), Cause("stale"))
    assert not any(entry.is_staying for entry in buffer.state.contents)
    await buffer.drain()
    assert len(buffer.state.contents) == 0


async def test_what_is_left_of_a_group_is_offered_once_the_rest_is_dropped(world: World) -> None:
    buffer = await world.create(group_size=2, consumers=[{"name": "all", "unit": "group"}, "any"])
    await buffer.push(push((0, 0), (0, 1)))
    refusals = Refusals(world.store)
    refusals.num_next = 1
    buffer.flow.removal.drop([next(iter(buffer.state.contents))], Cause("stale"))
    await buffer.drain()
    assert len(buffer.state.contents) == 2
    await settle(buffer, after=10)
    assert [entry.record.uid for entry in buffer.state.contents] == [uid(0, 1)]
    assert len(buffer.state.consumer("all").ready) == 1


async def test_what_was_passed_over_leaves_once_there_is_room(world: World) -> None:
    old = {"max_lag": 0, "on_stale": "keep"}
    consumers = [{"name": "fresh", "staleness": old}]
    buffer = await world.holding(of_version(0, (0, 0)), consumers=consumers)
    buffer.row.policy_version = 3
    Refusals(world.store).num_next = 1
    assert await take(buffer, 1, "fresh") == 0
    await buffer.drain()
    assert len(buffer.state.contents) == 1
    await settle(buffer, after=10)
    assert len(buffer.state.contents) == 0
