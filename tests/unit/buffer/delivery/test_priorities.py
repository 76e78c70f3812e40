"""Priorities: capped, so that no sum of them overflows, and set in memory and on disk or in neither."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest

from experience_buffer import trxp
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.priorities import PriorityUpdate
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.settings.buffer import MAX_GROUP_SIZE
from experience_buffer_server.store.interface import MAX_PRIORITY, StoreFullError
from tests.refusing_store import Refusals, begin
from tests.unit.buffer_verbs import leased
from tests.unit.builders import World, experience, push, uid

PRIORITIZED = [{"name": "trainer", "unit": "group", "selector": {"kind": "prioritized"}}]
HUGE = 1.7e308


def update(priority: float, *runs: int) -> list[PriorityUpdate]:
    return [PriorityUpdate(uid=uid(1, run), priority=priority, generation=0) for run in runs]


def priorities(buffer: Buffer) -> list[float]:
    return [entry.record.priority for entry in buffer.state.contents]


async def sampled(buffer: Buffer) -> int:
    lease = await leased(buffer)
    return lease.num_experiences


def test_the_cap_leaves_room_for_the_largest_group() -> None:
    assert math.isfinite(math.fsum([MAX_PRIORITY] * 1000) * (MAX_GROUP_SIZE / 1000))


async def test_a_group_of_huge_priorities_becomes_whole_and_is_sampled(world: World) -> None:
    buffer = await world.create(group_size=3, consumers=PRIORITIZED, on_full="evict")
    await buffer.push(push((1, 0), (1, 1)))
    updated = await buffer.update_priorities(update(HUGE, 0, 1))
    assert updated.num_updated == 2
    assert priorities(buffer) == [MAX_PRIORITY] * 2
    await buffer.push(push((1, 2)))
    assert (await buffer.update_priorities(update(HUGE, 0, 1, 2))).num_updated == 3
    buffer = await world.restart(buffer)
    assert await sampled(buffer) == 3


async def test_an_integer_beyond_floats_is_capped_at_the_push(world: World) -> None:
    buffer = await world.create(group_size=2, consumers=PRIORITIZED)
    pushed = [experience(1, run, info={"priority": 10 ** (20 + run * 280)}) for run in (0, 1)]
    await buffer.push(Push(payloads=[trxp.encode(pushed)]))
    assert priorities(buffer) == [1e20, MAX_PRIORITY]


async def test_a_store_that_holds_larger_priorities_is_opened(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)), group_size=2, consumers=PRIORITIZED)
    batch = world.store.batch()
    for entry in buffer.state.contents:
        batch.put_record(buffer.id, dataclasses.replace(entry.record, priority=HUGE))
    await world.store.commit(batch)
    buffer = await world.restart(buffer)
    assert priorities(buffer) == [HUGE] * 2
    assert await sampled(buffer) == 2


async def test_what_cannot_be_taken_into_account_is_not_set(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)), group_size=2, consumers=PRIORITIZED)
    failures = [ValueError("no such weight")]

    def revalue(entries: Sequence[Entry]) -> None:
        if failures:
            raise failures.pop()
        real(entries)

    real = buffer.flow.offers.revalue
    monkeypatch.setattr(buffer.flow.offers, "revalue", revalue)
    with pytest.raises(ValueError, match="no such weight"):
        await buffer.update_priorities(update(5.0, 0, 1))
    assert priorities(buffer) == [1.0] * 2
    assert (await buffer.update_priorities(update(5.0, 0))).num_updated == 1
    assert priorities(buffer) == priorities(await world.restart(buffer)) == [5.0, 1.0]


async def test_what_finds_no_room_is_as_before_but_for_what_was_set_since(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)), group_size=2, consumers=PRIORITIZED)
    refusals = Refusals(world.store)
    refusals.num_next = 1
    refused = await begin(buffer.update_priorities(update(5.0, 0, 1)))
    assert priorities(buffer) == [5.0, 5.0], "the next call compares with these"
    assert (await buffer.update_priorities(update(3.0, 1))).num_updated == 1
    with pytest.raises(StoreFullError):
        await refused
    assert priorities(buffer) == priorities(await world.restart(buffer)) == [1.0, 3.0]
