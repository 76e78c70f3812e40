"""Leases that end, and buffers that go, while a batch waits to be sent; parts without units."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
import torch

from experience_buffer import errors, trxp
from experience_buffer.packed import PackedBatch
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.damage import LEFT, Unreadable
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.rpc.sample_call import sample
from experience_buffer_server.runtime.callers import caller_of
from experience_buffer_server.runtime.response_bytes import Hold
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.settings.buffer import MEBI
from tests.unit.buffer.delivery.test_bounds import serving
from tests.unit.builders import World, experience, push, sampling

PACKED = types_pb2.SAMPLE_FORMAT_PACKED
FORMATS = pytest.mark.parametrize("form", [PACKED, types_pb2.SAMPLE_FORMAT_TRXP])
RANKS = [types_pb2.RankOf(rank=rank, world_size=2) for rank in (0, 1)]
Request = service_pb2.SampleStreamRequest


def stream(backend: Backend, num_credits: int, **more: Any) -> Any:
    """What a stream answers that asks for batches of one unit."""
    asked: dict[str, Any] = {"buffer": "b", "consumer": "trainer", "batch_size": 1} | more

    async def said() -> AsyncIterator[Request]:
        yield Request(open=service_pb2.SampleStreamOpen(**asked))
        yield Request(credits=num_credits)
        await asyncio.Event().wait()

    return sampling(backend, said())


def call(backend: Backend, *, seconds: float = 10.0, **more: Any) -> asyncio.Task[bytes]:
    """A call that asks for two units."""
    asked: dict[str, Any] = {"buffer": "b", "consumer": "trainer", "batch_size": 2} | more
    holds: list[Hold] = []
    request = service_pb2.SampleRequest(**asked)
    task = asyncio.create_task(
        sample(backend, request, timeout_seconds=seconds, until_sent=holds.append)
    )

    def ended(_: object) -> None:
        for hold in holds:
            hold.release()

    task.add_done_callback(ended)
    return task


def fill(backend: Backend) -> Callable[[], None]:
    """Let the caller have so many bytes under way that it waits for more; ends that."""
    held = [backend.responses.take(caller_of(), 2**40) for _ in range(2)]
    return held[0].release


async def turns(count: int = 100) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def rewind(buffer: Buffer) -> None:
    await buffer.rewind("trainer", -1)


@FORMATS
async def test_a_batch_that_was_returned_is_not_sent(world: World, form: int) -> None:
    """A trainer goes back to a checkpoint while batches are leased ahead of what it reads."""
    backend = await serving(world)
    buffer = backend.buffer("b")
    for run in range(6):
        large = experience(1, run, extra={"x": torch.zeros(4 * MEBI, dtype=torch.uint8)})
        await buffer.push(Push(payloads=[trxp.encode([large])]))
    answers = stream(backend, 6, format=form)
    frames = [(await asyncio.wait_for(anext(answers), 10)).frame]
    await turns()
    await buffer.drain()
    returned = [lease.id for lease in buffer.state.leases.of_consumer("trainer")]
    assert len(returned) >= 4
    await rewind(buffer)
    while sum(frame.last for frame in frames) < 6:
        frames.append((await asyncio.wait_for(anext(answers), 10)).frame)
    assert all(frame.num_units == 1 for frame in frames if frame.last)
    # Of these one was sent, and the next was read.
    assert {frame.lease.id for frame in frames}.isdisjoint(returned[2:])
    await answers.aclose()
    await buffer.drain()
    assert len(buffer.state.leases) == 0


@FORMATS
@pytest.mark.parametrize("rank_of", [None, RANKS[0]])
async def test_a_stream_that_waits_sends_nothing_of_a_deleted_buffer(
    world: World, form: int, rank_of: types_pb2.RankOf | None
) -> None:
    backend = await serving(world)
    await backend.buffer("b").push(push((1, 0)))
    go = fill(backend)
    answers = stream(backend, 1, format=form, rank_of=rank_of)
    first = asyncio.ensure_future(anext(answers))
    await turns()
    await backend.registry.delete("b", force=True)
    go()
    with pytest.raises(errors.BufferNotFoundError):
        await asyncio.wait_for(first, 10)


@FORMATS
@pytest.mark.parametrize("rank_of", [None, RANKS[0]])
async def test_a_call_that_waits_gets_nothing_of_a_deleted_buffer(
    world: World, form: int, rank_of: types_pb2.RankOf | None
) -> None:
    backend = await serving(world)
    await backend.buffer("b").push(push((1, 0), (1, 1)))
    go = fill(backend)
    asked = call(backend, format=form, rank_of=rank_of)
    await turns()
    await backend.registry.delete("b", force=True)
    go()
    with pytest.raises(errors.BufferNotFoundError):
        await asyncio.wait_for(asked, 10)


def test_a_large_batch_that_is_gone_takes_time_in_proportion() -> None:
    units = [Unit(key=seq, seqs=(seq,), num_bytes=1, num_tokens=1) for seq in range(20_000)]
    gone = Unreadable()
    for unit in units:
        gone.add(unit, {unit.key: LEFT})
    began = time.process_time()
    assert gone.left_of(units) == 0
    assert time.process_time() - began < 0.5


@FORMATS
@pytest.mark.parametrize("waits", [False, True])
async def test_a_part_that_was_returned_is_not_delivered(
    world: World, form: int, waits: bool
) -> None:
    backend = await serving(world)
    buffer = backend.buffer("b")
    await buffer.push(push((1, 0), (1, 1)))
    first = service_pb2.SampleResponse.FromString(await call(backend, rank_of=RANKS[0]))
    await turns()
    go = fill(backend) if waits else None
    asked = call(backend, rank_of=RANKS[1], format=form)
    # It has its lease by now, and reads it next.
    await turns(100 if waits else 1)
    await rewind(buffer)
    if go is not None:
        go()
    response = service_pb2.SampleResponse.FromString(await asyncio.wait_for(asked, 10))
    assert first.lease.id
    assert not response.HasField("lease")
    assert "returned before it was sent" in response.shortfall


@pytest.mark.parametrize("ends", ["cancelled", "out of time"])
async def test_a_rank_that_gives_up_takes_nothing_from_the_others(world: World, ends: str) -> None:
    backend = await serving(world)
    buffer = backend.buffer("b")
    await buffer.push(push((1, 0), (1, 1)))
    first = service_pb2.SampleResponse.FromString(await call(backend, rank_of=RANKS[0]))
    await turns()
    go = fill(backend)
    asked = call(backend, rank_of=RANKS[1], seconds=10.0 if ends == "cancelled" else 0.01)
    await turns()
    if ends == "cancelled":
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    else:
        with pytest.raises(errors.ResourceExhaustedError, match="wait to be sent"):
            await asyncio.wait_for(asked, 10)
    go()
    again = service_pb2.SampleResponse.FromString(await call(backend, rank_of=RANKS[1]))
    assert again.lease.id == first.lease.id
    for rank in (0, 1):
        await buffer.ack(first.lease.id, rank=rank)
    assert len(buffer.state.contents) == 0


@FORMATS
async def test_a_rank_without_units_gets_an_empty_part(world: World, form: int) -> None:
    backend = await serving(world)
    buffer = backend.buffer("b")
    await buffer.push(push((1, 0)))
    answers = [stream(backend, 1, rank_of=rank_of, format=form) for rank_of in RANKS]
    frames = [(await asyncio.wait_for(anext(each), 10)).frame for each in answers]
    assert [(frame.last, frame.num_units) for frame in frames] == [(True, 1), (True, 0)]
    if form == PACKED:
        assert [len(PackedBatch.parse(frame.packed).uids) for frame in frames] == [1, 0]
    else:
        assert [len(cast(Any, frame).experiences) for frame in frames] == [1, 0]
    assert frames[0].lease.id == frames[1].lease.id
    for each in answers:
        await each.aclose()
    await buffer.drain()
