"""Buffers that are created, deleted and told of versions while something else happens, or is refused."""

from __future__ import annotations

import asyncio

import pytest

from experience_buffer import errors
from experience_buffer_server.buffer.intake.annotation import Annotation
from experience_buffer_server.buffer.intake.push_room import Patience
from experience_buffer_server.buffer.registry import Registry
from experience_buffer_server.runtime.tuning import TUNING
from experience_buffer_server.settings.server import Settings
from experience_buffer_server.store.interface import StoreFullError
from tests.refusing_store import Refusals, begin
from tests.unit.builders import World, push, settings, turns, uid, until

pytestmark = pytest.mark.on_disk


@pytest.fixture
def registry(world: World) -> Registry:
    return world.registry()


async def restarted(world: World) -> Registry:
    await world.store.close()
    await world.open()
    again = world.registry()
    await again.load()
    return again


async def test_nobody_finds_a_buffer_before_it_is_on_disk(
    world: World, registry: Registry, refusals: Refusals
) -> None:
    """What is pushed to one that can't be stored would be lost, or be another's after a restart."""
    refusals.held = asyncio.Event()
    creations = [
        asyncio.ensure_future(registry.create("math", settings(), exist_ok=True)) for _ in "ab"
    ]
    await turns(5)
    assert registry.all() == []
    with pytest.raises(errors.BufferNotFoundError):
        registry.get("math")
    refusals.held.set()
    assert (await creations[0]) is (await creations[1]) is registry.get("math")


async def test_a_refused_creation_leaves_nothing(
    world: World, registry: Registry, refusals: Refusals
) -> None:
    refusals.num_next = 1
    first, second = [
        asyncio.ensure_future(registry.create("math", settings(), exist_ok=True)) for _ in "ab"
    ]
    with pytest.raises(StoreFullError):
        await first
    buffer = await second
    assert registry.all() == [buffer]
    await buffer.push(push((0, 0)))
    await registry.drain()
    found = (await restarted(world)).get("math")
    assert [entry.record.uid for entry in found.state.contents] == [uid(0, 0)]


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_creation_goes_on_when_its_caller_has_gone(
    world: World, registry: Registry, refusals: Refusals, is_refused: bool
) -> None:
    refusals.num_next = int(is_refused)
    creation = asyncio.ensure_future(registry.create("math", settings()))
    await asyncio.sleep(0)
    creation.cancel()
    await registry.drain()
    names = [] if is_refused else ["math"]
    assert [buffer.name for buffer in registry.all()] == names
    assert [state.row.name for state in world.store.load()] == names


async def test_buffers_that_come_at_once_keep_to_their_limit(
    world: World, refusals: Refusals
) -> None:
    limits = Settings.model_validate({"server": {"max_buffers": 2}})
    registry = Registry(limits, world.store, world.computer, world.metrics)
    results = await asyncio.gather(
        *(registry.create(f"b-{number}", settings()) for number in range(4)),
        return_exceptions=True,
    )
    assert [isinstance(one, errors.ResourceExhaustedError) for one in results] == [False] * 2 + [
        True
    ] * 2
    assert len({buffer.id for buffer in registry.all()}) == 2


async def test_a_refused_version_is_published_nowhere(
    world: World, registry: Registry, refusals: Refusals
) -> None:
    buffer = await registry.create("math", settings())
    assert await registry.get("math").publish(1) is None
    told = buffer.version_changed
    refusals.num_next = 1
    with pytest.raises(StoreFullError):
        await registry.get("math").publish(2)
    await registry.drain()
    assert (buffer.row.policy_version, told.is_set()) == (1, False)
    assert (await restarted(world)).get("math").row.policy_version == 1


async def test_a_refused_version_stays_refused_though_the_row_is_stored_with_it(
    world: World, registry: Registry, refusals: Refusals
) -> None:
    """Settings are stored in the same row; and the first attempt to correct it finds no room."""
    buffer = await registry.create("math", settings())
    refusals.num_next = 1
    publishing = asyncio.ensure_future(registry.get("math").publish(2))
    while not buffer.row.policy_version:
        await asyncio.sleep(0)
    update = asyncio.ensure_future(registry.update("math", {"group_size": 7}))
    while buffer.settings.group_size != 7:
        await asyncio.sleep(0)
    refusals.num_next = 1
    with pytest.raises(StoreFullError):
        await publishing
    await update
    await registry.drain()
    (state,) = world.store.load()
    assert state.row.policy_version == 2, "the correction was refused"
    registry.tick(1e12)
    await registry.drain()
    again = (await restarted(world)).get("math")
    assert (again.settings.group_size, again.row.policy_version) == (7, None)


async def test_versions_at_once_start_from_what_was_stored(
    world: World, registry: Registry, refusals: Refusals
) -> None:
    buffer = await registry.create("math", settings())
    await registry.get("math").publish(1)
    refusals.num_next = 3  # One is to correct the row.
    calls = (registry.get("math").publish(version) for version in (2, 3))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in results] == [StoreFullError] * 2
    assert buffer.row.policy_version == 1
    await registry.drain()
    first, second = await asyncio.gather(
        registry.get("math").publish(4), registry.get("math").publish(5)
    )
    assert (first, second) == (1, 4)


async def test_a_version_on_its_way_does_not_bring_a_deleted_buffer_back(
    world: World, registry: Registry, refusals: Refusals
) -> None:
    buffer = await registry.create("math", settings())
    refusals.num_next = 1
    publishing = [
        asyncio.ensure_future(registry.get("math").publish(version)) for version in (2, 3)
    ]
    while not buffer.row.policy_version:
        await asyncio.sleep(0)
    deletion = asyncio.ensure_future(registry.delete("math", force=True))
    results = await asyncio.gather(*publishing, deletion, return_exceptions=True)
    assert [type(one) for one in results] == [StoreFullError, errors.BufferNotFoundError, int]
    await registry.drain()
    assert list(world.store.load()) == []


async def test_nothing_is_annotated_in_a_buffer_that_is_being_deleted(
    world: World, registry: Registry, refusals: Refusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What were stored then would stay for ever."""
    monkeypatch.setattr(TUNING, "annotated_at_once_bytes", 1)
    buffer = await registry.create("math", settings(group_by="none"))
    await buffer.push(push((0, 0), (0, 1)))
    refusals.held = asyncio.Event()
    annotations = [Annotation(uid=uid(0, run), reward=3.0) for run in range(2)]
    annotating = asyncio.ensure_future(buffer.annotate(annotations))
    await turns(5)
    deletion = asyncio.ensure_future(registry.delete("math", force=True))
    await turns(5)
    refusals.held.set()
    with pytest.raises(errors.BufferNotFoundError):
        await annotating
    assert await deletion == 2
    fresh = await registry.create("math", settings(group_by="none"))
    (state,) = world.store.load()
    assert (state.row.id, state.records, list(world.store.payload_uids(buffer.id))) == (2, [], [])
    assert fresh.id == 2


async def test_series_of_a_deleted_buffer_end_though_its_pushes_end_later(
    world: World, registry: Registry
) -> None:
    chosen = settings(group_by="none", max_items=1, on_full="block", full_timeout_seconds=100)
    buffer = await registry.create("math", chosen)
    await buffer.push(push((0, 0)))
    patience = Patience(deadline=float("inf"), stop=asyncio.Event())
    waiting = [asyncio.ensure_future(buffer.push(push((run, 1)), patience)) for run in range(50)]
    await until(lambda: buffer.flow.push_room.num_waiting >= 50)
    await registry.delete("math", force=True)
    await asyncio.gather(*waiting, return_exceptions=True)
    world.metrics.push_waited("math", "max_items", 1.0)
    registry.tick(0.0)
    labels = [
        sample.labels.get("buffer")
        for family in world.metrics.registry.collect()
        for sample in family.samples
    ]
    assert "math" not in labels


async def test_a_refused_deletion_is_done_when_asked_again(
    world: World, registry: Registry, refusals: Refusals
) -> None:
    """The name is free only once the rows have gone: of two with one name, a restart finds one."""
    buffer = await registry.create("math", settings())
    await buffer.push(push((0, 0)))
    refusals.num_next = 1
    with pytest.raises(StoreFullError):
        await registry.delete("math", force=True)
    assert registry.all() == []
    with pytest.raises(errors.ResourceExhaustedError, match="delete the buffer again"):
        await registry.create("math", settings())
    assert await registry.delete("math", force=False) == 1
    with pytest.raises(errors.BufferNotFoundError):
        await registry.delete("math", force=True)
    fresh = await registry.create("math", settings())
    assert [state.row.id for state in world.store.load()] == [fresh.id] != [buffer.id]


async def test_a_buffer_is_created_after_another_of_its_name_has_gone(
    world: World, registry: Registry, refusals: Refusals
) -> None:
    await registry.create("math", settings())
    stored = [[state.row.id for state in world.store.load()]]
    refusals.held = asyncio.Event()
    deletion = await begin(registry.delete("math", force=False))
    creations = [await begin(registry.create("math", settings(), exist_ok=True)) for _ in "ab"]
    assert registry.all() == []
    again = await begin(registry.delete("math", force=False))
    refusals.held.set()
    assert await again == 0 == await deletion
    first, second = [await creation for creation in creations]
    assert first is second is registry.get("math")
    stored.append([state.row.id for state in world.store.load()])
    assert stored == [[1], [2]]
