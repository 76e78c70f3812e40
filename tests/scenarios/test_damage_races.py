"""What the owner itself has just removed or replaced is no damage, and real damage outlives it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from experience_buffer import errors
from experience_buffer.v1 import types_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.damage import LEFT
from experience_buffer_server.buffer.intake.annotation import Annotation
from experience_buffer_server.buffer.registry import Registry
from experience_buffer_server.rpc.batch_assembly import Unreadable, read_payload, sampled
from experience_buffer_server.settings.server import ConfigurationError, Settings
from tests.refusing_store import Refusals
from tests.unit.buffer.delivery.test_damage import lose
from tests.unit.buffer.intake.test_annotate import RLOO, annotate
from tests.unit.buffer_verbs import entry_of, leased, pushed
from tests.unit.builders import World, push, settings, settle, uid
from tests.unit.sample_calls import granting, serving

pytestmark = pytest.mark.on_disk

CONSUMERS = [{"name": "critic", "raw": True}, {"name": "actor", "unit": "group"}]


async def computed(world: World) -> Buffer:
    """A group of two experiences with their advantages."""
    buffer = await world.computing(consumers=CONSUMERS, **RLOO)
    await buffer.push(pushed((1, 0)))
    await buffer.push(pushed((1, 1)))
    await settle(buffer)
    assert all(entry.available and entry.magnitude for entry in buffer.state.contents)
    return buffer


async def begun(buffer: Buffer, reward: float) -> asyncio.Task[Any]:
    """An annotation of the first experience whose commit is under way."""
    task = asyncio.create_task(buffer.annotate([Annotation(uid=uid(1, 0), reward=reward)]))
    # For some turns only where it is refused.
    while not entry_of(buffer, 1, 0).changing:
        await asyncio.sleep(0)
    return task


async def test_an_annotated_group_is_read_before_it_is_computed_again(world: World) -> None:
    buffer = await computed(world)
    assert await annotate(buffer, uid(1, 0), reward=5.0) == (None, "")
    for run in (0, 1):
        payload, row = read_payload(world.store, buffer, entry_of(buffer, 1, run))
        assert (bool(payload), row) == (True, None)
    lease = await leased(buffer, 2, "critic")
    unreadable = Unreadable()
    assert sampled(world.store, buffer, lease.units, unreadable, len) == 2
    assert not unreadable
    await settle(buffer)
    assert buffer.stats().num_damaged == 0
    assert len((await leased(buffer, 1, "actor")).units[0].seqs) == 2


async def test_while_an_annotation_is_under_way_nothing_is_missed(world: World) -> None:
    """The disk may know of it before the answer has got here."""
    buffer = await computed(world)
    held = Refusals(world.store).held = asyncio.Event()
    task = await begun(buffer, 5.0)
    while any(world.store.advantages(buffer.id, [1, 2])):
        await asyncio.sleep(0)
    read_payload(world.store, buffer, entry_of(buffer, 1, 1))
    held.set()
    await task
    assert buffer.stats().num_damaged == 0
    await settle(buffer)


async def test_after_a_refused_annotation_what_was_computed_is_missed_again(world: World) -> None:
    buffer = await computed(world)
    before = [entry.magnitude for entry in buffer.state.contents]
    Refusals(world.store).num_next = 1
    with pytest.raises(errors.BufferFullError):
        await annotate(buffer, uid(1, 0), reward=5.0)
    assert [entry.magnitude for entry in buffer.state.contents] == before
    batch = world.store.batch()
    batch.delete_advantages(buffer.id, entry_of(buffer, 1, 1).record.seq)
    await world.store.commit(batch)
    with pytest.raises(errors.DataLossError, match="its advantages are gone"):
        read_payload(world.store, buffer, entry_of(buffer, 1, 1))
    await settle(buffer)


@pytest.mark.parametrize("refused", [False, True])
async def test_what_is_set_aside_while_it_is_annotated_stays_so(
    world: World, refused: bool
) -> None:
    """With the annotation, or without it where it couldn't be stored: never half of each."""
    refusals = Refusals(world.store)
    buffer = await world.create()
    await buffer.push(push((1, 0)))
    old = world.payload(buffer, uid(1, 0))
    refusals.num_next = int(refused)
    refusals.held = asyncio.Event()
    task = await begun(buffer, 9.0)
    buffer.set_aside({1: "its advantages are gone"})
    await asyncio.sleep(0)
    await world.store.prune(buffer.id, 0.0)  # All that was submitted is on disk.
    # The server may end here.
    (state,) = world.store.load()
    assert state.records[0].reward == (0.0 if refused else 9.0)
    refusals.held.set()
    await asyncio.wait([task])
    assert isinstance(task.exception(), errors.BufferFullError) == refused
    for place in (buffer, await world.restart(buffer)):
        entry = entry_of(place, 1, 0)
        assert entry.damage.startswith("its advantages are gone; delete it")
        assert entry.record.reward == (0.0 if refused else 9.0)
        payload = world.payload(place, uid(1, 0))
        assert (payload == old) == refused
        assert entry.record.payload_bytes == len(payload)
        assert place.stats().num_damaged == 1
        assert not place.state.consumers["trainer"].ready
        await place.drain()


async def test_what_is_being_removed_is_not_damaged(world: World) -> None:
    buffer = await world.create()
    await buffer.push(push((1, 0), (1, 1)))
    lease = await leased(buffer, 2)
    entry = entry_of(buffer, 1, 1)
    await lose(world, buffer, (1, 1))
    entry.leaving = True
    with pytest.raises(errors.ExperienceNotFoundError, match="is being removed"):
        read_payload(world.store, buffer, entry)
    unreadable = Unreadable()
    assert sampled(world.store, buffer, lease.units, unreadable, len) == 1
    assert unreadable.reasons == {2: LEFT}
    assert unreadable.explain("why") == "why; 1 more was removed meanwhile"
    entry.leaving = False
    buffer.set_aside(unreadable.reasons)
    assert buffer.stats().num_damaged == 0


async def test_nothing_is_stored_for_a_deleted_buffer(world: World) -> None:
    buffer = await world.create()
    await buffer.push(push((1, 0)))
    entry = entry_of(buffer, 1, 0)
    buffer.close()
    batch = world.store.batch()
    batch.delete_buffer(buffer.id)
    await world.store.commit(batch)
    with pytest.raises(errors.ExperienceNotFoundError):
        read_payload(world.store, buffer, entry)
    buffer.set_aside({1: "its payload is gone"})
    await buffer.drain()
    assert list(world.store.load()) == []
    batch = world.store.batch()
    batch.put_buffer(buffer.row)
    await world.store.commit(batch)
    (state,) = world.store.load()
    assert state.records == []


async def test_a_packed_stream_keeps_to_the_smallest_batch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many frames it takes: a packed batch is read before anything of it is sent."""
    monkeypatch.setattr("experience_buffer_server.rpc.batch_sender.FRAME_BYTES", 200)
    backend, buffer = await serving(world)
    await buffer.push(push((1, 0), (1, 1), (1, 2)))
    await lose(world, buffer, (1, 1), (1, 2))

    asked = {"batch_size": 3, "min_batch_size": 2, "timeout_seconds": 0.01}
    stream = granting(backend, 1, format=types_pb2.SAMPLE_FORMAT_PACKED, **asked)
    first = await anext(stream)
    assert first.WhichOneof("message") == "waiting"
    await buffer.push(push((1, 3)))
    while first.WhichOneof("message") == "waiting":
        first = await anext(stream)
    frames = [first.frame]
    while not frames[-1].last:
        frames.append((await anext(stream)).frame)
    assert (len(frames) > 1, frames[-1].num_units) == (True, 2)
    await stream.aclose()
    await buffer.drain()


async def test_a_refused_override_changes_no_buffer(world: World) -> None:
    registry = world.registry()
    await registry.create("a", settings())
    second = await registry.create("b", settings(group_size=2))
    await second.push(push((1, 0)))
    await registry.drain()
    given = {"a": {"max_items": 7}, "b": {"group_by": "none"}}
    config = Settings.model_validate({"server": {"update_buffers": True}, "buffers": given})
    await world.store.close()
    await world.open()
    fresh = Registry(config, world.store, world.computer, world.metrics)
    with pytest.raises(ConfigurationError, match=r"buffers\.b: .* while it is empty"):
        await fresh.load()
    await fresh.drain()
    stored = {state.row.name: state.row.config for state in world.store.load()}
    assert '"max_items":7' not in stored["a"]
    del given["b"]
    config = Settings.model_validate({"server": {"update_buffers": True}, "buffers": given})
    await world.store.close()
    await world.open()
    last = Registry(config, world.store, world.computer, world.metrics)
    await last.load()
    assert last.get("a").settings.max_items == 7
    await last.drain()
