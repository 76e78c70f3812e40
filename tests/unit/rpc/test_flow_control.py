"""What a sampling client is ready to receive; batches asked for ahead: in order, or given back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from experience_buffer_server.rpc.flow_control import Ahead, Credits, Leased


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


class Desk:
    """Grants a lease whenever it is told to."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Event] = []
        self.given_back: list[Any] = []

    async def sample(self) -> Leased:
        number = len(self.asked)
        self.asked.append(asyncio.Event())
        await self.asked[number].wait()
        return f"lease {number}", ""  # type: ignore[return-value]


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def ahead(desk: Desk) -> Ahead:
    return Ahead(desk.sample, desk.given_back.append)


async def test_they_come_in_the_order_they_were_asked_for(desk: Desk, ahead: Ahead) -> None:
    for _ in range(3):
        ahead.ask()
    await asyncio.sleep(0)
    for granted in reversed(desk.asked):
        granted.set()
    came: list[Any] = [(await ahead.next())[0] for _ in range(3)]
    assert came == ["lease 0", "lease 1", "lease 2"]
    assert len(ahead) == 0


async def test_what_is_not_sent_is_given_back(desk: Desk, ahead: Ahead) -> None:
    for _ in range(3):
        ahead.ask()
    await asyncio.sleep(0)
    desk.asked[1].set()
    await asyncio.sleep(0)
    ahead.close()
    ahead.ask()
    for _ in range(3):
        await asyncio.sleep(0)
    assert desk.given_back == ["lease 1"]
    assert (len(ahead), len(desk.asked)) == (0, 3)


async def test_a_cancelled_wait_leaves_its_batch_in_line(desk: Desk, ahead: Ahead) -> None:
    ahead.ask()
    waiting = asyncio.ensure_future(ahead.next())
    await asyncio.sleep(0)
    desk.asked[0].set()
    await asyncio.sleep(0)
    # It is there, and who waits for it doesn't know yet.
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    ahead.close()
    await asyncio.sleep(0)
    assert desk.given_back == ["lease 0"]


async def test_a_batch_that_comes_after_the_end_is_not_sent() -> None:
    given_back: list[Any] = []

    async def deaf() -> Leased:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "lease", ""  # type: ignore[return-value]
        raise AssertionError

    ahead = Ahead(deaf, given_back.append)
    ahead.ask()
    waiting = asyncio.ensure_future(ahead.next())
    await asyncio.sleep(0)
    ahead.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert given_back == ["lease"]
