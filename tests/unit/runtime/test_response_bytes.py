"""How many bytes of responses may be under way, and who waits for whom."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress

import pytest

from experience_buffer import errors
from experience_buffer_server.runtime.response_bytes import Hold, Responses
from experience_buffer_server.settings.buffer import MEBI
from experience_buffer_server.settings.server import ServerSection


class Counted:
    """What was refused."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def push_refused(self, buffer: str, reason: str) -> None:
        raise AssertionError("no push was refused")

    def call_refused(self, reason: str) -> None:
        self.reasons.append(reason)


def make(counted: Counted | None = None, *, mebi: int = 100) -> Responses:
    limits = ServerSection(max_response_bytes=mebi * MEBI)
    return Responses(limits, counted or Counted())


async def begun(responses: Responses, client: str, num_bytes: int) -> asyncio.Task[Hold]:
    """A wait that has come as far as it can."""
    task = asyncio.ensure_future(responses.wait(client, num_bytes))
    await asyncio.sleep(0)
    return task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_nobody_has_more_than_is_left_for_others() -> None:
    counted = Counted()
    responses = make(counted)
    held = [responses.take("slow", 10 * MEBI) for _ in range(5)]
    with pytest.raises(errors.ResourceExhaustedError, match="max_response_bytes is") as refused:
        responses.take("slow", 10 * MEBI)
    assert (refused.value.retry_delay_seconds, refused.value.subject) == (0.1, "slow")
    held += [responses.take("other", 10 * MEBI) for _ in range(2)]
    held.append(responses.take("new", 25 * MEBI))
    with pytest.raises(errors.ResourceExhaustedError):
        responses.take("late", 6 * MEBI)
    assert counted.reasons == ["max_response_bytes"] * 2
    for hold in held + held:
        hold.release()
    assert (responses.held.total, responses.held.of, responses._waiting) == (0, {}, {})


async def test_what_is_in_memory_no_more_is_there_for_others() -> None:
    responses = make(mebi=40)
    hold = responses.take("one", 20 * MEBI)
    hold.keep(30 * MEBI)
    assert responses.held.total == 10 * MEBI, "what is larger than a quarter counts as one"
    others = [responses.take(client, 10 * MEBI) for client in ("two", "three")]
    others.append(responses.take("four", 8 * MEBI))
    waiting = await begun(responses, "five", 4 * MEBI)
    assert not waiting.done()
    hold.keep(6 * MEBI)
    others.append(await waiting)
    assert responses.held.total == 38 * MEBI
    hold.release()
    hold.keep(0)
    for each in others:
        each.release()
    assert responses.held.total == 0


async def test_the_largest_goes_while_somebody_never_reads() -> None:
    responses = make()
    for _ in range(2):
        responses.take("slow", 10_000 * MEBI)
    for client in ("slow", "a", "b"):
        if client == "slow":
            with pytest.raises(errors.ResourceExhaustedError):
                responses.take(client, 10_000 * MEBI)
        else:
            responses.take(client, 10_000 * MEBI)
    assert responses.held.total == 100 * MEBI


async def test_those_behind_one_that_gives_up_are_served_and_as_many_as_fit() -> None:
    responses = make()
    responses.take("slow", 25 * MEBI)
    last = responses.take("slow", 15 * MEBI)
    large = await begun(responses, "slow", 20 * MEBI)
    small = [await begun(responses, "slow", MEBI) for _ in range(20)]
    large.cancel()
    await settle()
    assert [task.done() for task in small] == [True] * 10 + [False] * 10
    last.release()
    await settle()
    assert all(task.done() for task in small), "one release serves all that fit"


async def test_who_waits_is_served_in_order_and_the_stuck_hold_up_nobody() -> None:
    responses = make()
    stuck = [responses.take("slow", 10 * MEBI) for _ in range(5)]
    waiting = [await begun(responses, "slow", size * MEBI) for size in (20, 1)]
    other = await begun(responses, "other", 10 * MEBI)
    assert (other.done(), [task.done() for task in waiting]) == (True, [False, False])
    with pytest.raises(errors.ResourceExhaustedError):
        responses.take("slow", 1)  # Others of this client came earlier.
    stuck.pop().release()
    await settle()
    assert not waiting[1].done(), "a small one doesn't overtake a large one of the same client"
    stuck.pop().release()
    stuck.pop().release()
    await settle()
    assert [task.done() for task in waiting] == [True, True]


async def test_a_wait_ends_with_its_deadline_or_its_call() -> None:
    counted = Counted()
    responses = make(counted)
    held = responses.take("slow", 25 * MEBI)
    held_too = responses.take("slow", 25 * MEBI)
    with pytest.raises(errors.ResourceExhaustedError):
        await responses.wait("slow", 20 * MEBI, deadline=time.monotonic() + 0.01)
    assert counted.reasons == ["max_response_bytes"]
    cancelled, granted = [await begun(responses, "slow", 20 * MEBI) for _ in range(2)]
    cancelled.cancel()
    held.release()
    # Served and cancelled in the same moment: what it got comes back.
    granted.cancel()
    for task in (cancelled, granted):
        with pytest.raises(asyncio.CancelledError):
            await task
    held_too.release()
    assert (responses.held.total, responses.held.of, responses._waiting) == (0, {}, {})


@pytest.mark.parametrize("seed", range(10))
async def test_however_they_come_the_bound_holds_and_nobody_is_forgotten(seed: int) -> None:
    rng = random.Random(seed)
    responses = make(mebi=8)
    tasks: list[asyncio.Task[Hold]] = []
    held: list[Hold] = []
    for _ in range(600):
        choice = rng.random()
        if choice < 0.5:
            tasks.append(await begun(responses, rng.choice("abcde"), rng.randrange(5 * MEBI)))
        elif choice < 0.6 and tasks:
            rng.choice(tasks).cancel()
        elif held:
            held.pop(rng.randrange(len(held))).release()
        await settle()
        done = [task for task in tasks if task.done()]
        tasks = [task for task in tasks if not task.done()]
        for task in done:
            with suppress(asyncio.CancelledError):
                held.append(task.result())
        assert responses.held.total <= 8 * MEBI
        assert not tasks or held
    while held:
        held.pop().release()
        await settle()
        held += [task.result() for task in tasks if task.done() and not task.cancelled()]
        tasks = [task for task in tasks if not task.done()]
    assert not tasks
    assert (responses.held.total, responses.held.of, responses._waiting) == (0, {}, {})
