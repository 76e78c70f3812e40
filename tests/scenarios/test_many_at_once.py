"""What is asked for many at once is done step by step, and counted once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from experience_buffer import errors, trxp
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake import task_pacing
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.buffer.settings_checks import checked_settings
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.contents import Contents, num_deliverable
from experience_buffer_server.rpc import inspection
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.tuning import TUNING
from experience_buffer_server.store.interface import StoreFullError
from tests.unit.buffer_verbs import change, consume, dropped, leased
from tests.unit.builders import World, experience, push, uid


def reserve(buffer: Buffer, *keys: str) -> list[str]:
    return buffer.flow.pacing.reserve(keys, now=clock.now(), ttl_seconds=100.0).granted


async def test_a_push_makes_room_for_itself_alone_where_a_limit_was_lowered(world: World) -> None:
    """All at once, everybody would wait behind it; the clock removes the rest."""
    buffer = await world.create(group_by="none", on_full="evict", max_items=90)
    await buffer.push(push(*((0, run) for run in range(90))))
    await change(buffer, max_items=10)
    await buffer.push(push((1, 0), (1, 1)))
    await buffer.drain()
    assert len(buffer.state.contents) == 90
    size = sum(entry.record.payload_bytes for entry in list(buffer.state.contents)[:20])
    await change(buffer, max_items=0, max_bytes=size)
    await buffer.push(push((2, 0)))
    await buffer.drain()
    assert 88 <= len(buffer.state.contents) <= 90
    buffer.tick(clock.now())
    await buffer.drain()
    assert buffer.num_bytes <= size
    await change(buffer, on_full="refuse")
    with pytest.raises(errors.BufferFullError):
        await buffer.push(push(*((3, run) for run in range(10))))


async def paced(world: World) -> Buffer:
    consumers = [{"name": "trainer", "unit": "group"}, {"name": "critic", "unit": "group"}]
    places = {"consumer": "trainer", "max_staleness": 0, "batch_size": 3}
    return await world.create(group_size=1, consumers=consumers, pacing=places)


async def test_places_are_counted_once_per_call(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of keys times thousands of experiences that can't be computed would take long."""
    buffer = await paced(world)
    counted: list[Consumer] = []

    def count(contents: Contents, consumer: Consumer) -> int:
        counted.append(consumer)
        return num_deliverable(contents, consumer)

    monkeypatch.setattr(task_pacing, "num_deliverable", count)
    assert reserve(buffer, "2/0", "2/1", "2/0", "2/2", "2/3", "2/4") == ["2/0", "2/1", "2/2"]
    assert reserve(buffer, "2/4", "2/1") == ["2/1"]
    assert len(counted) <= 4


async def test_what_was_consumed_and_is_damaged_gives_no_second_place(world: World) -> None:
    buffer = await paced(world)
    await buffer.push(push((0, 0)))
    await consume(buffer, 1)
    buffer.set_aside({1: "its payload is gone"})
    assert len(buffer.state.contents.quarantined) == 1
    assert len(reserve(buffer, *(f"2/{task}" for task in range(1, 9)))) == 3


async def test_what_was_to_be_evicted_and_stays_is_not_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings that came meanwhile hold for it as well."""
    buffer = await world.create(
        group_by="none", on_full="evict", max_items=1,
        advantage={"estimator": "reinforce"}, on_missing_field="wait",
    )  # fmt: skip
    await buffer.push(Push(payloads=[trxp.encode([experience(0, 0, reward=None)])]))
    (entry,) = buffer.state.contents
    changes: dict[str, Any] = {"advantage": {"estimator": ""}}
    update = buffer.change_settings(checked_settings(buffer.settings.model_dump() | changes))
    refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with monkeypatch.context() as patched:
        patched.setattr(world.store, "commit", lambda batch: refused)
        buffer.flow.eviction.make_room(1, 0)
    await update
    assert entry.leaving
    refused.set_exception(StoreFullError("the disk is full"))
    await buffer.drain()
    assert not entry.leaving
    assert entry.available
    assert len(buffer.state.consumer("trainer").ready) == 1


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many are removed with each commit, at least two."""
    sizes: list[int] = []
    monkeypatch.setattr(TUNING, "deleted_at_once", 2)
    return sizes


def watched(buffer: Buffer, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    remove = buffer.flow.removal._delete

    async def delete(entries: Any) -> Any:
        sizes.append(len(entries))
        return await remove(entries)

    monkeypatch.setattr(buffer.flow.removal, "_delete", delete)


async def test_many_are_deleted_part_by_part_and_groups_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch, in_parts: list[int]
) -> None:
    buffer = await world.create(group_size=3)
    await buffer.push(push(*((task, run) for run in range(3) for task in range(9))))
    watched(buffer, in_parts, monkeypatch)
    state = service_pb2.Filter(state=types_pb2.EXPERIENCE_STATE_READY)
    response = await inspection.delete(buffer, service_pb2.DeleteRequest(filter=state))
    assert (response.num_deleted, in_parts) == (27, [3] * 9)
    assert len(buffer.state.contents) == len(buffer.state.contents.groups) == 0


async def test_uids_are_deleted_part_by_part_while_others_are_held(
    world: World, monkeypatch: pytest.MonkeyPatch, in_parts: list[int]
) -> None:
    buffer = await world.create(group_by="none")
    await buffer.push(push(*((0, run) for run in range(7))))
    watched(buffer, in_parts, monkeypatch)
    await leased(buffer, 1)
    uids = [uid(0, run) for run in range(9)]
    response = await inspection.delete(buffer, service_pb2.DeleteRequest(uids=uids))
    assert in_parts == [2, 2, 2, 1]
    assert (response.num_deleted, list(response.leased_uids)) == (6, uids[:1])
    assert dropped(world, buffer, "deleted") == 6
    assert list(response.unknown_uids) == uids[7:]


async def test_nothing_more_is_deleted_of_a_buffer_that_has_gone(
    world: World, in_parts: list[int]
) -> None:
    buffer = await world.create(group_by="none")
    await buffer.push(push(*((0, run) for run in range(7))))
    tid = service_pb2.Filter(tid="2/0")
    deleting = asyncio.ensure_future(
        inspection.delete(buffer, service_pb2.DeleteRequest(filter=tid))
    )
    while len(buffer.state.contents) == 7:
        await asyncio.sleep(0)
    buffer.close()
    with pytest.raises(errors.BufferNotFoundError):
        await deleting


async def test_deleted_tombstones_are_no_dropped_experiences(world: World) -> None:
    """As when they leave in any other way."""
    buffer = await world.create(group_size=3)
    await buffer.push(push((0, 0), (0, 1), dead=[(0, 2)]))
    response = await inspection.delete(
        buffer, service_pb2.DeleteRequest(uids=[uid(0, run) for run in range(3)])
    )
    assert (response.num_deleted, dropped(world, buffer, "deleted")) == (3, 2)
