"""Turns on the event loop."""

from __future__ import annotations

import asyncio

from experience_buffer_server.turns import Turns


async def test_others_get_their_turn_between_any_two() -> None:
    turns, seen = Turns(), list[str]()

    async def take(name: str) -> None:
        await turns.take()
        seen.append(name)

    async def other() -> None:
        for _ in range(20):
            seen.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(*(take(name) for name in "abc"), other())
    steps = [seen.index(name) for name in "abc"]
    assert steps == sorted(steps)
    assert "other" in seen[steps[0] : steps[1]]
    assert "other" in seen[steps[1] : steps[2]]


async def test_one_alone_waits_for_nothing() -> None:
    turns = Turns()
    for _ in range(3):
        taking = turns.take()
        try:
            taking.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waited")
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_who_is_cancelled_keeps_nobody_waiting() -> None:
    turns, seen = Turns(), list[str]()

    async def take(name: str) -> None:
        await turns.take()
        seen.append(name)

    tasks = {name: asyncio.create_task(take(name)) for name in "abcd"}
    await turns.take()
    await asyncio.sleep(0)
    # The first was given its turn just now, and the second still waits for it.
    tasks["a"].cancel()
    tasks["b"].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 5)
    assert seen == ["c", "d"]
    await asyncio.wait_for(turns.take(), 5)
