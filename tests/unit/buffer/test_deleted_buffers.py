"""What a deleted buffer held is let go of at once: nothing waits for the collector of garbage."""

from __future__ import annotations

import gc
from collections import Counter

import pytest

from experience_buffer.errors import LeaseNotFoundError
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.state.group_table import Entry, Group
from experience_buffer_server.runtime.memory import sweep
from experience_buffer_server.store.interface import ProgressRow, StoreFullError
from tests.refusing_store import Held, Refusals, begin
from tests.unit.buffer_verbs import leased
from tests.unit.builders import World, push, settings, settle


def _num_objects() -> Counter[type]:
    return Counter(
        type(one) for one in gc.get_objects() if type(one) in (Entry, Group, ProgressRow)
    )


async def test_its_leases_mean_nothing_to_the_next_of_its_name(world: World) -> None:
    registry = world.registry()
    lives = []
    for life in range(2):
        buffer = await registry.create("b", settings(), exist_ok=False)
        await buffer.push(push((life, 0), (life, 1)))
        lease = await leased(buffer, 2)
        lives.append(lease.id)
        if not life:
            await registry.delete("b", force=True)
    assert lives[0] < lives[1] < 2**53
    with pytest.raises(LeaseNotFoundError):
        await buffer.ack(lives[0])
    await buffer.ack(lives[1])
    assert len(buffer.state.contents) == 0


@pytest.mark.parametrize("group_by", ["none", "task"])
async def test_its_experiences_are_freed(world: World, group_by: str) -> None:
    registry = world.registry()
    consumers = ({"name": "trainer"}, {"name": "critic"})
    chosen = settings(group_by=group_by, group_size=2, consumers=consumers)
    gc.collect()
    before = _num_objects()
    gc.disable()
    try:
        buffer = await registry.create("b", chosen, exist_ok=False)
        await buffer.push(push((0, 0), (0, 1), (1, 0)))
        await settle(buffer)
        lease = await leased(buffer, 2)
        await buffer.ack(lease.id, step=3)
        assert (_num_objects() - before)[Entry] == 3
        del buffer, lease
        assert await registry.delete("b", force=True) == 3
        assert _num_objects() - before == Counter()
    finally:
        gc.enable()


async def test_what_old_ones_were_made_of_is_collected(world: World) -> None:
    """Rooms hold each other, and the calm collector doesn't look where old objects are."""
    registry = world.registry()
    before = sum(type(one) is Buffer for one in gc.get_objects())
    threshold = gc.get_threshold()
    gc.set_threshold(0)
    try:
        for number in range(5):
            await registry.create(f"b-{number}", settings(), exist_ok=False)
            # Twice survived: old.
            gc.collect(0)
            gc.collect(1)
            await registry.delete(f"b-{number}", force=False)
        # The last one is still in the hands of who deletes it.
        assert sum(type(one) is Buffer for one in gc.get_objects()) - before <= 1
    finally:
        gc.set_threshold(*threshold)


def test_a_large_store_isnt_looked_through_for_one_buffer() -> None:
    assert sweep(num_leftovers=1, num_entries=5_000)
    assert not sweep(num_leftovers=1, num_entries=5_001)
    assert not sweep(num_leftovers=199, num_entries=1_000_000)
    assert sweep(num_leftovers=200, num_entries=1_000_000)


async def test_what_finds_no_room_is_not_put_right_once_the_buffer_was_deleted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A row that is stored after the buffer's removal would bring the buffer back."""
    buffer = await world.create()
    held = Held(world.store)
    publishing = await begin(buffer.publish(3))
    buffer.close()
    Refusals(world.store).num_next = 1
    held.refuse()
    with pytest.raises(StoreFullError):
        await publishing
    await buffer.drain()
    assert not caplog.records, "nothing was tried"
