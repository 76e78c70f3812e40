"""Looking at single experiences while they leave, and removing many of them."""

from __future__ import annotations

import pytest

from experience_buffer import EID, ExperienceNotFoundError, InvalidRequestError, trxp
from experience_buffer.v1 import service_pb2
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.rpc import inspection, messages
from tests.unit.buffer_verbs import pushed
from tests.unit.builders import World, experience, push, settle, uid
from tests.unit.work import counted_lines


async def test_what_is_leaving_is_not_found_rather_than_damaged(world: World) -> None:
    """The store's own process removes payloads before the server hears of it."""
    buffer = await world.holding(push((0, 0)), group_by="none", max_items=1, on_full="evict")
    await settle(buffer)
    name = uid(0, 0)
    assert (await inspection.get(world.store, buffer, name)).payload
    buffer.flow.eviction.make_room(1, 0)
    # Nothing here lets the event loop run, so the end of the removal isn't noticed.
    while world.store.payloads(buffer.id, [name])[0] is not None:
        pass
    assert buffer.state.contents.by_uid(name) is not None
    with pytest.raises(ExperienceNotFoundError, match="holds no experience"):
        await inspection.get(world.store, buffer, name)


async def test_what_leaves_together_takes_time_by_its_number_alone(world: World) -> None:
    world.limits = world.limits.model_copy(update={"max_push_items": 4096})
    few, many = [await lines_of_a_deletion(world, num) for num in (500, 2000)]
    assert many < 5 * few, "2000 groups, and 2000 to look at for each"


async def test_whoever_writes_a_task_as_it_is_is_told_its_key(world: World) -> None:
    member = experience(0, 0)
    member.eid = EID("a/b", "c/7", 3, 5, "mine")
    buffer = await world.holding(Push(payloads=[trxp.encode([member])]), group_by="none")
    for name, end in {"tid": "", "rid": "/3", "sid": "/5"}.items():
        wanted = by_key(name, f"a/b/c/7{end}")
        words = f"holds nothing with {name} 'a/b/c/7{end}'; 'a/b/c%2F7{end}' is here"
        with pytest.raises(InvalidRequestError, match=words):
            await inspection.list_page(buffer, service_pb2.ListRequest(filter=wanted))
        with pytest.raises(InvalidRequestError, match=words):
            await inspection.delete(buffer, service_pb2.DeleteRequest(filter=wanted))
        here = by_key(name, getattr(member.eid, name))
        assert (
            await inspection.list_page(buffer, service_pb2.ListRequest(filter=here))
        ).experiences
        nothing = by_key(name, f"a/b/c/8{end}")
        assert not (
            await inspection.list_page(buffer, service_pb2.ListRequest(filter=nothing))
        ).experiences
        assert not (
            await inspection.delete(buffer, service_pb2.DeleteRequest(filter=nothing))
        ).num_deleted


def by_key(name: str, key: str) -> service_pb2.Filter:
    wanted = service_pb2.Filter()
    setattr(wanted, name, key)
    return wanted


async def lines_of_a_deletion(world: World, num_groups: int) -> int:
    buffer = await world.create(num_groups, group_size=1)
    await buffer.push(pushed(*((task, 0) for task in range(num_groups))))
    state = messages.state_number(buffer.state_of(next(iter(buffer.state.contents))))
    wanted = service_pb2.DeleteRequest(filter=service_pb2.Filter(state=state))
    with counted_lines() as lines:
        assert (await inspection.delete(buffer, wanted)).num_deleted == num_groups
    return lines.num
