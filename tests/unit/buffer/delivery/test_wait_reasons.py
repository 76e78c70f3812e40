"""Why a batch is short, or a call or a push waits: said in words, and truly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from experience_buffer.errors import ResourceExhaustedError
from experience_buffer_server.buffer.buffer import Buffer
from tests.unit.builders import World, begun, push, until, want


async def sample(buffer: Buffer, size: int, seconds: float = 0.0) -> tuple[int, str]:
    """How many units come, which stay leased, and why there are no more."""
    call = want(size, timeout_seconds=seconds)
    lease, why = await buffer.sample("trainer", call, asyncio.Event())
    return 0 if lease is None else lease.num_units, why


async def still_waits(call: asyncio.Task[Any]) -> None:
    """Nothing came to it; it goes away."""
    assert not call.done()
    call.cancel()
    await asyncio.wait([call])


async def filled(world: World, count: int, **consumer: Any) -> Buffer:
    """A buffer of single experiences."""
    trainer = {"name": "trainer"} | consumer
    buffer = await world.create(group_by="none", consumers=[trainer])
    await buffer.push(push(*((1, run) for run in range(count))))
    return buffer


async def test_a_limiter_that_cuts_a_batch_is_named(world: World) -> None:
    limiter = {"samples_per_insert": 0.5, "min_diff": 0}
    buffer = await filled(world, 8, limiter=limiter)
    found = await sample(buffer, 8)
    assert found == (
        4,
        "4 of 8 items after waiting 0 s: 4 ready of 8 items; samples_per_insert 0.5 allows 4 more "
        "samples, a batch needs 8",
    )


async def test_who_waits_behind_others_is_told(world: World) -> None:
    buffer = await filled(world, 10)
    first = await begun(sample(buffer, 16, 0.2), 9)
    found = await sample(buffer, 4)
    assert found == (
        0, "0 of 4 items after waiting 0 s: 10 ready of 4 items; other calls came earlier",
    )  # fmt: skip
    assert (await first)[0] == 10


async def test_a_batch_that_never_goes_keeps_nobody_waiting(world: World) -> None:
    buffer = await filled(world, 6, max_leased_experiences=4)
    first = await begun(sample(buffer, 8, 5.0), 9)
    assert await sample(buffer, 2) == (2, "")
    second = await begun(sample(buffer, 3, 5.0), 9)
    await buffer.ack(next(iter(buffer.state.consumers["trainer"].leases)))
    assert await second == (3, "")
    await still_waits(first)


async def test_bytes_that_keep_pushes_out_are_named(world: World) -> None:
    buffer = await filled(world, 4, limiter={"max_ahead_bytes": 3000})
    with pytest.raises(ResourceExhaustedError, match="max_ahead_bytes 3000") as refused:
        await buffer.push(push((2, 0)))
    waits = buffer.stats().consumers[0].pushes_wait_for
    assert waits
    assert waits in str(refused.value)


async def test_a_batch_that_never_goes_keeps_nobody_from_a_smaller_one(world: World) -> None:
    buffer = await filled(world, 2, max_leased_experiences=4)
    first = await begun(sample(buffer, 8, 5.0), 9)
    found = [await sample(buffer, 3, seconds) for seconds in (0.01, 0.0)]
    assert [count for count, _ in found] == [2, 0]
    assert "other calls" not in found[1][1]
    await still_waits(first)


BEYOND = "a batch of that size has more experiences than max_leased_experiences, 7, allows"


async def grouped(world: World, count: int) -> Buffer:
    """Groups of 3, of which two may be leased at once."""
    trainer = {"name": "trainer", "unit": "group", "max_leased_experiences": 7}
    buffer = await world.create(group_size=3, consumers=[trainer])
    await push_groups(buffer, range(count))
    return buffer


async def push_groups(buffer: Buffer, tasks: range) -> None:
    for task in tasks:
        await buffer.push(push(*((task, run) for run in range(3))))


@pytest.mark.parametrize("num_before", [0, 4])
async def test_groups_that_are_more_than_may_be_leased_go_short_at_once(
    world: World, num_before: int
) -> None:
    buffer = await grouped(world, num_before)
    call = await begun(sample(buffer, 3, 3600.0), 9)
    await push_groups(buffer, range(num_before, 4))
    assert await asyncio.wait_for(call, 30.0) == (2, f"2 of 3 groups: {BEYOND}; ask for fewer")


async def test_who_wants_more_groups_than_may_be_leased_or_none_is_told(world: World) -> None:
    buffer = await grouped(world, 4)
    all_or_none = want(3, min_batch_size=3)
    found = await buffer.sample("trainer", all_or_none, asyncio.Event())
    assert found == (None, f"0 of 3 groups: {BEYOND}; ask for fewer")


@pytest.mark.parametrize("num_before", [0, 4])
async def test_groups_that_can_not_be_leased_together_keep_nobody_waiting(
    world: World, num_before: int
) -> None:
    buffer = await grouped(world, num_before)
    all_or_none = want(3, min_batch_size=3, timeout_seconds=3600.0)
    first = await begun(buffer.sample("trainer", all_or_none, asyncio.Event()), 9)
    await push_groups(buffer, range(num_before, 4))
    assert BEYOND in buffer.stats().consumers[0].waiting_for
    assert await sample(buffer, 1, 60.0) == (1, "")
    second = await begun(sample(buffer, 2, 60.0), 9)
    await buffer.ack(next(iter(buffer.state.consumers["trainer"].leases)))
    assert await second == (2, "")
    await still_waits(first)


async def test_leases_that_leave_no_room_for_another_group_are_named(world: World) -> None:
    buffer = await grouped(world, 4)
    assert (await sample(buffer, 1))[0] == 1
    count, why = await sample(buffer, 2)
    assert count == 1
    assert "3 experiences are leased and max_leased_experiences is 7; acknowledge some" in why


@pytest.mark.parametrize("first_goes_away", [False, True])
async def test_calls_that_are_served_at_once_keep_to_the_window_together(
    world: World, first_goes_away: bool
) -> None:
    buffer = await filled(world, 0, max_leased_experiences=4)
    first, second = (asyncio.create_task(sample(buffer, 3, 3600.0)) for _ in range(2))
    await asyncio.sleep(0.01)
    pushing = asyncio.create_task(buffer.push(push(*((1, run) for run in range(8)))))
    trainer = buffer.state.consumers["trainer"]
    await until(lambda: trainer.promised)
    if first_goes_away:
        first.cancel()
    else:
        assert await first == (3, "")
    await pushing
    if not first_goes_away:
        assert trainer.num_leased_experiences == 3
        await buffer.ack(next(iter(trainer.leases)))
    assert await asyncio.wait_for(second, 30.0) == (3, "")
    assert not trainer.promised
    await asyncio.wait([first])
