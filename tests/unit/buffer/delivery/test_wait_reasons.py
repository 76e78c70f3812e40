"""Why a batch is short, or a call or a push waits: said in words, and truly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from experience_buffer.errors import ResourceExhaustedError
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.stats import buffer_stats
from tests.unit.builders import World, push, want


async def sample(buffer: Buffer, size: int, seconds: float = 0.0) -> tuple[int, str]:
    """How many units come, which stay leased, and why there are no more."""
    call = want(size, timeout_seconds=seconds)
    lease, why = await buffer.desk.sample("trainer", call, asyncio.Event())
    return 0 if lease is None else lease.num_units, why


async def filled(world: World, count: int, **consumer: Any) -> Buffer:
    """A buffer of single experiences."""
    trainer = {"name": "trainer"} | consumer
    buffer = await world.create(group_by="none", consumers=[trainer])
    await buffer.ingest.push(push(*((1, run) for run in range(count))))
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
    first = asyncio.create_task(sample(buffer, 16, 0.2))
    await asyncio.sleep(0.01)
    found = await sample(buffer, 4)
    assert found == (
        0, "0 of 4 items after waiting 0 s: 10 ready of 4 items; other calls came earlier",
    )  # fmt: skip
    assert (await first)[0] == 10


async def test_a_batch_that_never_goes_keeps_nobody_waiting(world: World) -> None:
    buffer = await filled(world, 6, max_leased_experiences=4)
    first = asyncio.create_task(sample(buffer, 8, 5.0))
    await asyncio.sleep(0.01)
    assert await sample(buffer, 2) == (2, "")
    second = asyncio.create_task(sample(buffer, 3, 5.0))
    await asyncio.sleep(0.01)
    lease_id = next(iter(buffer.delivery.consumers["trainer"].leases))
    await buffer.desk.ack(lease_id)
    assert await second == (3, "")
    assert not first.done()
    first.cancel()
    await asyncio.wait([first])


async def test_bytes_that_keep_pushes_out_are_named(world: World) -> None:
    buffer = await filled(world, 4, limiter={"max_ahead_bytes": 3000})
    with pytest.raises(ResourceExhaustedError, match="max_ahead_bytes 3000") as refused:
        await buffer.ingest.push(push((2, 0)))
    waits = buffer_stats(buffer).consumers[0].pushes_wait_for
    assert waits
    assert waits in str(refused.value)


async def test_a_batch_that_never_goes_keeps_nobody_from_a_smaller_one(world: World) -> None:
    buffer = await filled(world, 2, max_leased_experiences=4)
    first = asyncio.create_task(sample(buffer, 8, 5.0))
    await asyncio.sleep(0.01)
    found = [await sample(buffer, 3, seconds) for seconds in (0.01, 0.0)]
    assert [count for count, _ in found] == [2, 0]
    assert "other calls" not in found[1][1]
    assert not first.done()
    first.cancel()
    await asyncio.wait([first])
