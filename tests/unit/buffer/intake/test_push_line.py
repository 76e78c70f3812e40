"""Pushes that wait for room: their order, and what ends the wait."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import tracemalloc
from typing import Any

import pytest

from experience_buffer import errors, trxp
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.push_reading import Outcome, Push
from experience_buffer_server.buffer.intake.push_room import Patience
from experience_buffer_server.runtime.quotas import Charge
from tests.unit.buffer_verbs import change, consume, counted, sampled, stored, take
from tests.unit.builders import World, begun, experience, payload, push

Waiting = asyncio.Task[list[Outcome]]
BLOCK: dict[str, Any] = {"group_by": "none", "on_full": "block", "max_items": 4}


class Pusher:
    """Pushes that may wait, as tasks in the order of their start."""

    def __init__(self, buffer: Buffer, seconds: float = 60.0) -> None:
        self.buffer = buffer
        self.seconds = seconds
        self.stop = asyncio.Event()

    async def push(self, *members: tuple[int, int]) -> Waiting:
        """Begin a push; it has come as far as it can when this returns."""
        patience = Patience(deadline=time.monotonic() + self.seconds, stop=self.stop)
        task = await begun(self.buffer.push(push(*members), patience))
        return task


async def full(world: World, **changes: Any) -> Buffer:
    """A buffer of four experiences, of which two are leased."""
    buffer = await world.holding(push((0, 0), (0, 1), (0, 2), (0, 3)), **BLOCK | changes)
    return buffer


async def statuses(*waiting: Waiting) -> list[str]:
    done = await asyncio.wait_for(asyncio.gather(*waiting), 10)
    return [outcome.status.value for outcomes in done for outcome in outcomes]


async def test_a_push_waits_for_room_and_has_it_with_the_ack(world: World) -> None:
    buffer = await full(world)
    pusher = Pusher(buffer)
    waiting = await pusher.push((1, 0))
    stats = buffer.stats()
    assert stats.num_waiting_pushes == 1
    size = len(payload((1, 0)))
    assert f"1 pushes of {size} bytes wait for room" in stats.pushes_wait_for
    assert "4 + 1 exceed max_items = 4" in stats.pushes_wait_for
    await consume(buffer)
    assert await statuses(waiting) == ["stored"]
    assert stored(buffer) == [(0, 1), (0, 2), (0, 3), (1, 0)]
    assert (buffer.flow.push_room.num_waiting, buffer.flow.push_room.describe_line()) == (0, "")
    assert counted(world, buffer, "push_waits", reason="max_items") == 1
    assert counted(world, buffer, "push_waited_seconds", reason="max_items") > 0


async def test_nobody_overtakes(world: World) -> None:
    buffer = await full(world)
    pusher = Pusher(buffer)
    large = await pusher.push((1, 0), (1, 1), (1, 2))
    small = [await pusher.push((task, 0)) for task in (2, 3)]
    await consume(buffer, 2)
    await buffer.drain()
    assert buffer.flow.push_room.num_waiting == 3, "two places are free, and the first needs three"
    late = await pusher.push((4, 0))
    assert buffer.flow.push_room.num_waiting == 4, "it would fit, and came last"
    await consume(buffer, 2)
    assert await statuses(large, small[0]) == ["stored"] * 4
    assert stored(buffer) == [(1, 0), (1, 1), (1, 2), (2, 0)]
    await consume(buffer, 3)
    assert await statuses(small[1], late) == ["stored"] * 2
    assert stored(buffer) == [(2, 0), (3, 0), (4, 0)]


async def test_repeats_are_answered_at_once(world: World) -> None:
    buffer = await full(world)
    pusher = Pusher(buffer)
    first, second = await pusher.push((1, 0)), await pusher.push((1, 0))
    assert await statuses(await pusher.push((0, 3), (0, 2))) == ["duplicate"] * 2
    await consume(buffer)
    assert await statuses(first, second) == ["stored", "duplicate"]
    assert stored(buffer) == [(0, 1), (0, 2), (0, 3), (1, 0)]


@pytest.mark.parametrize("woken", [False, True])
async def test_a_cancelled_push_lets_the_next_go(world: World, woken: bool) -> None:
    buffer = await full(world)
    pusher = Pusher(buffer)
    first, second = await pusher.push((1, 0), (1, 1)), await pusher.push((2, 0))
    lease_id = await take(buffer, 2)
    if woken:
        before = buffer.state.contents._on_less

        def cancel() -> None:
            before()
            if buffer.num_items == 2:
                first.cancel()

        buffer.state.contents._on_less = cancel
    else:
        first.cancel()
    await buffer.ack(lease_id)
    assert await statuses(second) == ["stored"]
    assert first.cancelled()
    assert stored(buffer) == [(0, 2), (0, 3), (2, 0)]


async def test_its_time_ends_with_what_it_waited_for(world: World) -> None:
    buffer = await full(world)
    pusher = Pusher(buffer, seconds=0.05)
    with pytest.raises(errors.BufferFullError, match=r"after 0\.\d s in line: 4 \+ 1") as refused:
        await (await pusher.push((1, 0)))
    assert refused.value.retry_delay_seconds == 1.0
    with pytest.raises(errors.BufferFullError, match="split the push") as refused:
        await (await pusher.push(*((1, run) for run in range(5))))
    assert refused.value.retry_delay_seconds is None
    with pytest.raises(errors.BufferFullError, match="4 \\+ 1 exceed"):
        await buffer.push(push((1, 0)))
    assert not buffer.flow.push_room.num_waiting


async def test_the_line_is_bounded(world: World) -> None:
    world.limits = world.limits.model_copy(update={"max_waiting_pushes": 2})
    buffer = await full(world)
    pusher = Pusher(buffer)
    waiting = [await pusher.push((task, 0)) for task in (1, 2)]
    with pytest.raises(errors.BufferFullError, match=r"server\.max_waiting_pushes is 2"):
        await (await pusher.push((3, 0)))
    await consume(buffer, 2)
    assert await statuses(*waiting) == ["stored"] * 2


async def test_who_waits_holds_the_request_alone(world: World) -> None:
    """A text that experiences share travels once, and is stored with each."""
    buffer = await full(world, **{"max_items": 50})
    await buffer.push(push(*((1, run) for run in range(40))))
    shared = {"text": "x" * 100_000}
    pushes = [
        Push(payloads=[trxp.encode([experience(task, run, info=shared) for run in range(40)])])
        for task in range(2, 7)
    ]
    size = sum(one.num_bytes for one in pushes)
    patience = Patience(deadline=time.monotonic() + 60, stop=asyncio.Event())
    charges = [Noted() for _ in pushes]
    tracemalloc.start()
    try:
        waiting = []
        for one, charge in zip(pushes, charges, strict=True):
            waiting.append(asyncio.ensure_future(buffer.push(one, patience, charge)))
            await asyncio.sleep(0)
        gc.collect()
        taken, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert buffer.flow.push_room.num_waiting == 5
    assert size < 1_000_000, "what is pushed is small"
    assert peak > 4_000_000, "what is stored of one push isn't"
    assert taken < 1_000_000, taken
    for charge in charges:
        assert charge.calls[0] > 4_000_000
        assert charge.calls[1:] == ["waits"]
    await change(buffer, max_items=1000)
    assert await statuses(*waiting) == ["stored"] * 200
    assert charges[4].calls[2:] == [charges[4].calls[0], "has waited"]


class Noted(Charge):
    """What a push said that it holds."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def takes(self, num_bytes: int) -> None:
        self.calls.append(num_bytes)

    def waits(self) -> None:
        self.calls.append("waits")

    def has_waited(self) -> None:
        self.calls.append("has waited")


async def test_a_push_that_takes_too_much_evicts_nothing(world: World) -> None:
    """Whether it may have what it takes is asked before any room is made for it."""
    buffer = await full(world, on_full="evict")

    class Refusing(Charge):
        def takes(self, num_bytes: int) -> None:
            raise errors.ResourceExhaustedError("too much")

    with pytest.raises(errors.ResourceExhaustedError):
        await buffer.push(push((1, 0)), None, Refusing())
    await buffer.drain()
    assert stored(buffer) == [(0, 0), (0, 1), (0, 2), (0, 3)]


async def test_a_drain_ends_the_wait(world: World) -> None:
    buffer = await full(world)
    pusher = Pusher(buffer)
    waiting = [await pusher.push((task, 0)) for task in (1, 2, 3)]
    pusher.stop.set()
    for one in waiting:
        with pytest.raises(errors.UnavailableError) as refused:
            await asyncio.wait_for(one, 10)
        assert refused.value.retry_delay_seconds == 1.0
    with pytest.raises(errors.UnavailableError):
        await (await pusher.push((4, 0)))


async def test_a_deleted_buffer_ends_the_wait(world: World) -> None:
    buffer = await full(world)
    waiting = [await Pusher(buffer).push((task, 0)) for task in (1, 2, 3)]
    buffer.close()
    for one in waiting:
        with pytest.raises(errors.BufferNotFoundError):
            await asyncio.wait_for(one, 10)


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"max_items": 6}, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0)]),
        ({"on_full": "evict"}, [(0, 2), (0, 3), (1, 0), (2, 0)]),
        ({"on_full": "refuse"}, [(0, 0), (0, 1), (0, 2), (0, 3)]),
    ],
)
async def test_other_settings_hold_for_those_who_wait(
    world: World, changes: dict[str, Any], left: list[tuple[int, int]]
) -> None:
    buffer = await full(world)
    waiting = [await Pusher(buffer).push((task, 0)) for task in (1, 2)]
    await change(buffer, **changes)
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
    await buffer.drain()
    assert stored(buffer) == left
    refused = [type(result) is errors.BufferFullError for result in results]
    assert refused == [changes == {"on_full": "refuse"}] * 2


async def test_bytes_are_waited_for_as_well(world: World) -> None:
    size = len(payload((1, 0)))
    buffer = await world.create(**BLOCK | {"max_items": 0, "max_bytes": 3 * size + 7})
    await buffer.push(push((0, 0), (0, 1), (0, 2)))
    waiting = await Pusher(buffer).push((1, 0))
    assert "max_bytes" in buffer.flow.push_room.describe_line()
    await consume(buffer)
    assert await statuses(waiting) == ["stored"]


@pytest.mark.parametrize("seed", range(6))
async def test_no_turn_is_lost(world: World, seed: int) -> None:
    """Pushes of any size come, some are cancelled, room comes in pieces: all others are stored."""
    chance = random.Random(seed)
    buffer = await world.create(**BLOCK | {"max_items": 7})
    pusher = Pusher(buffer)
    waiting: list[Waiting] = []
    sizes: list[int] = []
    taken: dict[int, int] = {}

    async def take_some() -> None:
        found, _ = await sampled(buffer, chance.randint(1, 4))
        if found is not None:
            entries = buffer.state.contents.by_seqs(
                seq for unit in found.units for seq in unit.seqs
            )
            taken.update((entry.record.seq, int(entry.record.task)) for entry in entries)
            await buffer.ack(found.id)

    for _ in range(120):
        match chance.choice(("push", "push", "cancel", "consume", "consume", "yield")):
            case "push":
                sizes.append(chance.randint(1, 5))
                task = len(waiting)
                waiting.append(await pusher.push(*((task, run) for run in range(sizes[-1]))))
            case "cancel" if waiting:
                chance.choice(waiting).cancel()
            case "consume":
                await take_some()
            case _:
                await asyncio.sleep(0)
    async with asyncio.timeout(20):
        while not all(one.done() for one in waiting) or buffer.num_items:
            await take_some()
            await asyncio.sleep(0)
    await buffer.drain()
    tasks = [taken[seq] for seq in sorted(taken)]
    assert tasks == sorted(tasks), "first come, first stored"
    for task, one in enumerate(waiting):
        # What was cancelled may have been stored before.
        expected = {0, sizes[task]} if one.cancelled() else {sizes[task]}
        assert tasks.count(task) in expected
    assert not buffer.flow.push_room.num_waiting


@pytest.mark.parametrize("limits", [{"max_items": 2}, {"max_bytes": len(payload((1, 0))) + 10}])
async def test_what_has_become_too_large_is_refused_and_holds_nobody_up(
    world: World, limits: dict[str, int]
) -> None:
    buffer = await full(world)
    pusher = Pusher(buffer)
    large, small = await pusher.push((1, 0), (1, 1), (1, 2)), await pusher.push((2, 0))
    await change(buffer, **limits)
    with pytest.raises(errors.BufferFullError, match="split the push") as refused:
        await asyncio.wait_for(large, 10)
    name, limit = next(iter(limits.items()))
    assert f"{name} = {limit}" in str(refused.value)
    assert refused.value.retry_delay_seconds is None
    await consume(buffer, 4)
    assert await statuses(small) == ["stored"]
