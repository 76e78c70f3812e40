"""What a sampling client is ready to receive."""

from __future__ import annotations

import asyncio

from experience_buffer_server.rpc.flow_control import Credits


async def test_batches_count_until_they_are_sent() -> None:
    credits = Credits()
    assert credits.num_batches == 0
    credits.grant(num_batches=2)
    credits.grant(num_batches=1)
    credits.take()
    assert (credits.num_batches, credits.is_taken) == (2, True)
    credits.put_back()
    assert (credits.num_batches, credits.is_taken) == (3, False)
    for left in (2, 1, 0):
        assert await credits.wait()
        credits.take()
        credits.spend(10**9)
        assert credits.num_batches == left


async def test_where_bytes_count_one_batch_follows_the_other() -> None:
    credits = Credits()
    credits.grant(num_batches=5)
    credits.grant(num_bytes=100)
    assert credits.num_batches == 1
    credits.take()
    # What it spends isn't known yet.
    assert credits.num_batches == 0
    credits.spend(99)
    assert credits.num_batches == 1
    credits.take()
    credits.spend(50)
    assert credits.num_batches == 0
    credits.grant(num_bytes=49)
    assert credits.num_batches == 0
    credits.grant(num_bytes=1)
    assert credits.num_batches == 1


async def test_a_wait_ends_with_a_credit_or_with_the_end() -> None:
    credits = Credits()
    waits = [asyncio.ensure_future(credits.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    credits.grant(num_bytes=10)
    await asyncio.sleep(0)
    assert not any(wait.done() for wait in waits)
    credits.grant(num_batches=1)
    assert await asyncio.wait_for(asyncio.gather(*waits), 10) == [True, True]
    credits.take()
    credits.spend(10)
    wait = asyncio.ensure_future(credits.wait())
    await asyncio.sleep(0)
    credits.end()
    assert not await asyncio.wait_for(wait, 10)
    credits.grant(num_batches=1, num_bytes=100)
    assert not await credits.wait()
