"""Turns on the event loop."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from experience_buffer_server.runtime import loop_turns as turns_module
from experience_buffer_server.runtime.loop_turns import Turn, Turns


class Clock:
    """In the place of `time`: it stands still until somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turns_module, "time", clock)
    return clock


async def take(turns: Turns, seen: list[str], name: str, line: str | None = None) -> None:
    turn = await turns.take(name if line is None else line)
    seen.append(name)
    turn.end()


async def others(clock: Clock, seen: list[str], *, seconds: float = 0.0) -> None:
    """Everybody else: always ready, taking so long for each step."""
    for _ in range(40):
        seen.append("other")
        clock.work(seconds)
        await asyncio.sleep(0)


async def test_others_get_their_turn_between_any_two(clock: Clock) -> None:
    turns, seen = Turns(), list[str]()

    async def take(name: str) -> None:
        turn = await turns.take(name)
        seen.append(name)
        clock.work(2e-3)
        turn.end()

    await asyncio.gather(*(take(name) for name in "abc"), others(clock, seen))
    steps = [seen.index(name) for name in "abc"]
    assert steps == sorted(steps)
    # Who needs several steps in a row isn't held up before each of them.
    assert seen[steps[0] : steps[1]].count("other") >= 4
    assert seen[steps[1] : steps[2]].count("other") >= 4


async def test_short_turns_rest_together(clock: Clock) -> None:
    turns, seen = Turns(), list[str]()

    async def take(name: str) -> None:
        turn = await turns.take(name)
        seen.append(name)
        # What follows the end belongs to the turn, up to the next wait.
        turn.end()
        clock.work(0.12e-3)

    await asyncio.gather(*(take(name) for name in "abcdef"), others(clock, seen))
    steps = [seen.index(name) for name in "abcdef"]
    between = [end - start - 1 for start, end in itertools.pairwise(steps)]
    assert all(1 <= between[place] <= 3 for place in (0, 1, 3, 4)), between
    assert between[2] >= 4, "the first three have lasted for long enough together"


@pytest.mark.parametrize(
    ("of_others", "most"),
    [(0.0, 0.3e-3), (0.8e-3, 0.6e-3), (40e-3, 6e-3)],
    ids=["idle", "busy", "slow"],
)
async def test_turns_last_nearly_as_long_as_others_take(
    clock: Clock, of_others: float, most: float
) -> None:
    """About half of the loop for each side, but never long enough to be noticed."""
    turn = await Turns().take("")
    for _ in range(60):
        await rest(turn, clock, of_others)
    assert slice_of(turn, clock) == pytest.approx(most, abs=0.03e-3)
    turn.end()


async def test_one_long_rest_in_ten_counts_for_all_of_them(clock: Clock) -> None:
    """Or turns would be short after most, and others have the loop for most of the time."""
    turn = await Turns().take("")
    for _ in range(30):
        lasted = []
        for number in range(10):
            await rest(turn, clock, 0.0 if number else 8e-3)
            lasted.append(slice_of(turn, clock))
    assert sum(lasted) == pytest.approx(0.75 * 8e-3, rel=0.05)
    assert lasted == sorted(lasted, reverse=True)
    assert max(lasted) < 1e-3
    turn.end()


async def rest(turn: Turn, clock: Clock, of_others: float) -> None:
    """A pause in which everybody else takes so long."""
    busy = asyncio.create_task(others(clock, [], seconds=of_others / turns_module._NUM_STEPS))
    await turn.pause()
    busy.cancel()
    await asyncio.sleep(0)


def slice_of(turn: Turn, clock: Clock) -> float:
    """How long a turn lasts until the next pause is due."""
    began = clock.now
    while not turn.is_long:
        clock.work(0.01e-3)
    lasted, clock.now = clock.now - began, began
    return lasted


async def test_lines_take_turns() -> None:
    turns, seen = Turns(), list[str]()
    names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
    await asyncio.gather(*(take(turns, seen, name, name[0]) for name in names))
    # One was alone when it came; whoever came later with little waits for one of each line.
    assert seen == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    assert not turns._lines


async def test_a_turn_of_several_slices_is_one_turn(clock: Clock) -> None:
    turns, seen = Turns(), list[str]()

    async def take(name: str) -> None:
        turn = await turns.take(name)
        for _ in range(3):
            seen.append(name)
            await turn.pause()
        turn.end()

    await asyncio.gather(*(take(name) for name in "ab"), others(clock, seen))
    assert [name for name in seen if name != "other"] == ["a", "a", "a", "b", "b", "b"]
    first, second, third = (place for place, name in enumerate(seen) if name == "a")
    assert seen[first:second].count("other") >= 4
    assert seen[second:third].count("other") >= 4


async def test_a_turn_becomes_long(clock: Clock) -> None:
    turn = await Turns().take("a")
    assert not turn.is_long
    clock.work(2e-3)
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
    tasks = {name: asyncio.create_task(take(turns, seen, name)) for name in "abcd"}
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
