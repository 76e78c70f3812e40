"""Looking at single experiences while they leave, and removing many of them."""

from __future__ import annotations

import time

import pytest

from experience_buffer import ExperienceNotFoundError, trxp
from experience_buffer.v1 import service_pb2
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.rpc import inspection, messages
from tests.unit.builders import World, experience, push, settle, uid


async def test_what_is_leaving_is_not_found_rather_than_damaged(world: World) -> None:
    """The store's own process removes payloads before the server hears of it."""
    buffer = await world.create(group_by="none", max_items=1, on_full="evict")
    await buffer.push(push((0, 0)))
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
    buffer = await world.create(group_size=1)
    for first in range(0, 5000, 1000):
        members = [experience(first + task, 0) for task in range(1000)]
        await buffer.push(Push(payloads=[trxp.encode(members)]))
    state = messages.state_number(buffer.state_of(next(iter(buffer.state.contents))))
    wanted = service_pb2.DeleteRequest(filter=service_pb2.Filter(state=state))
    started = time.thread_time()
    assert (await inspection.delete(buffer, wanted)).num_deleted == 5000
    assert time.thread_time() - started < 0.25, "5000 groups, and 5000 to look at for each"
