"""Turns on the event loop."""

from __future__ import annotations

import asyncio
import time

from experience_buffer_server import turns as turns_module
from experience_buffer_server.turns import Turns


async def test_others_get_their_turn_between_any_two() -> None:
    turns, seen = Turns(), list[str]()

    async def take(name: str) -> None:
        turn = await turns.take(name)
        seen.append(name)
        turn.end()

    async def other() -> None:
        for _ in range(40):
            seen.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(*(take(name) for name in "abc"), other())
    steps = [seen.index(name) for name in "abc"]
    assert steps == sorted(steps)
    # Who needs several steps in a row isn't held up before each of them.
    assert seen[steps[0] : steps[1]].count("other") >= 4
    assert seen[steps[1] : steps[2]].count("other") >= 4


async def test_lines_take_turns() -> None:
    turns, seen = Turns(), list[str]()

    async def take(name: str) -> None:
        turn = await turns.take(name[0])
        seen.append(name)
        turn.end()

    names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
    await asyncio.gather(*map(take, names))
    # One was alone when it came; whoever came later with little waits for one of each line.
    assert seen == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    assert not turns._lines


async def test_a_turn_of_several_slices_is_one_turn() -> None:
    turns, seen = Turns(), list[str]()

    async def take(name: str) -> None:
        turn = await turns.take(name)
        for _ in range(3):
            seen.append(name)
            await turn.pause()
        turn.end()

    async def other() -> None:
        for _ in range(40):
            seen.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(*(take(name) for name in "ab"), other())
    assert [name for name in seen if name != "other"] == ["a", "a", "a", "b", "b", "b"]
    first, second, third = (place for place, name in enumerate(seen) if name == "a")
    assert seen[first:second].count("other") >= 4
    assert seen[second:third].count("other") >= 4


async def test_a_turn_becomes_long() -> None:
    turn = await Turns().take("a")
    assert not turn.is_long
    end = time.perf_counter() + 2e-3
    while time.perf_counter() < end:
        pass
    assert turn.is_long
    await turn.pause()
    assert not turn.is_long
    turn.end()


async def test_one_alone_waits_for_nothing() -> None:
    turns = Turns()
    for _ in range(3):
        taking = turns.take("")
        try:
            taking.send(None)
        except StopIteration as taken:
            taken.value.end()
        else:
            raise AssertionError("it waited")
        for _ in range(turns_module._NUM_STEPS + 2):
            await asyncio.sleep(0)


async def test_who_is_cancelled_keeps_nobody_waiting() -> None:
    turns, seen = Turns(), list[str]()

    async def take(name: str) -> None:
        turn = await turns.take(name)
        seen.append(name)
        turn.end()

    tasks = {name: asyncio.create_task(take(name)) for name in "abcd"}
    (await turns.take("")).end()
    await asyncio.sleep(0)
    while len(turns._lines) == 4:
        await asyncio.sleep(0)
    # The first was given its turn just now, and the second still waits for it.
    tasks["a"].cancel()
    tasks["b"].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 5)
    assert seen == ["c", "d"]
    (await asyncio.wait_for(turns.take(""), 5)).end()
