"""Batches that wait to be sent: their leases end, their buffer goes, and nobody has seen them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import torch

from experience_buffer import errors
from experience_buffer.packed import PackedBatch
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.damage import LEFT
from experience_buffer_server.rpc.batch_assembly import Unreadable
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.settings.buffer import MEBI
from tests.unit.buffer_verbs import pushed
from tests.unit.builders import World, push, turns, until
from tests.unit.sample_calls import Request, called, calling, fill, frame_of, granting, serving
from tests.unit.work import counted_comparisons, counted_lines

NUM_TOKENS = 600_000
"""A few of such experiences are more than waits to be written."""
PACKED = types_pb2.SAMPLE_FORMAT_PACKED
FORMATS = pytest.mark.parametrize("form", [PACKED, types_pb2.SAMPLE_FORMAT_TRXP])
RANKS = [types_pb2.RankOf(rank=rank, world_size=2) for rank in (0, 1)]


@FORMATS
async def test_a_batch_that_was_returned_is_not_sent(world: World, form: int) -> None:
    """A trainer goes back to a checkpoint while batches are leased ahead of what it reads."""
    backend, buffer = await serving(world)
    for run in range(6):
        extra = {"x": torch.zeros(4 * MEBI, dtype=torch.uint8)}
        await buffer.push(pushed((1, run), extra=extra))
    answers = granting(backend, 6, format=form)
    frames = [await frame_of(answers)]
    await turns(100)
    await buffer.drain()
    returned = [lease.id for lease in buffer.state.leases.of_consumer("trainer")]
    assert len(returned) >= 4
    await buffer.rewind("trainer", -1)
    while sum(frame.last for frame in frames) < 6:
        frames.append(await frame_of(answers))
    assert all(frame.num_units == 1 for frame in frames if frame.last)
    # Of these one was sent, and the next was read.
    assert {frame.lease.id for frame in frames}.isdisjoint(returned[2:])
    await answers.aclose()
    await buffer.drain()
    assert len(buffer.state.leases) == 0


@FORMATS
@pytest.mark.parametrize("rank_of", [None, RANKS[0]])
@pytest.mark.parametrize("streams", [False, True])
async def test_who_waits_is_sent_nothing_of_a_deleted_buffer(
    world: World, form: int, rank_of: types_pb2.RankOf | None, streams: bool
) -> None:
    backend, _ = await serving(world, push((1, 0), (1, 1)))
    go = fill(backend)
    asked: asyncio.Task[Any] = (
        asyncio.create_task(frame_of(granting(backend, 1, format=form, rank_of=rank_of)))
        if streams
        else calling(backend, seconds=10.0, format=form, rank_of=rank_of)
    )
    await turns(100)
    await backend.registry.delete("math", force=True)
    go()
    with pytest.raises(errors.BufferNotFoundError):
        await asyncio.wait_for(asked, 10)


def test_a_batch_that_is_gone_takes_work_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    units = [Unit(key=seq, seqs=(seq,), num_bytes=1, num_tokens=1) for seq in range(200)]
    gone = Unreadable()
    compared = counted_comparisons(monkeypatch, Unit)
    with counted_lines() as lines:
        for unit in units:
            gone.add(unit, {unit.key: LEFT})
        assert gone.left_of(units) == 0
    assert compared.num + lines.num < 50 * len(units)


@FORMATS
@pytest.mark.parametrize("waits", [False, True])
async def test_a_part_once_returned_is_not_delivered(world: World, form: int, waits: bool) -> None:
    backend, buffer = await serving(world, push((1, 0), (1, 1)))
    first = await called(backend, batch_size=2, rank_of=RANKS[0])
    await turns(100)
    go = fill(backend) if waits else None
    asked = calling(backend, seconds=10.0, batch_size=2, rank_of=RANKS[1], format=form)
    # It has its lease by now, and reads it next.
    await turns(100 if waits else 1)
    await buffer.rewind("trainer", -1)
    if go is not None:
        go()
    response = service_pb2.SampleResponse.FromString(await asyncio.wait_for(asked, 10))
    assert first.lease.id
    assert not response.HasField("lease")
    assert "returned before it was sent" in response.shortfall


@pytest.mark.parametrize("ends", ["cancelled", "out of time"])
async def test_a_rank_that_gives_up_takes_nothing_from_the_others(world: World, ends: str) -> None:
    backend, buffer = await serving(world, push((1, 0), (1, 1)))
    first = await called(backend, batch_size=2, rank_of=RANKS[0])
    await turns(100)
    go = fill(backend)
    asked = calling(
        backend, batch_size=2, rank_of=RANKS[1], seconds=10.0 if ends == "cancelled" else 0.01
    )
    await turns(100)
    if ends == "cancelled":
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    else:
        with pytest.raises(errors.ResourceExhaustedError, match="wait to be sent"):
            await asyncio.wait_for(asked, 10)
    go()
    again = await called(backend, batch_size=2, rank_of=RANKS[1])
    assert again.lease.id == first.lease.id
    for rank in (0, 1):
        await buffer.ack(first.lease.id, rank=rank)
    assert len(buffer.state.contents) == 0


@FORMATS
async def test_a_rank_without_units_gets_an_empty_part(world: World, form: int) -> None:
    backend, buffer = await serving(world, push((1, 0)))
    answers = [granting(backend, 1, rank_of=rank_of, format=form) for rank_of in RANKS]
    frames = [await frame_of(each) for each in answers]
    assert [(frame.last, frame.num_units) for frame in frames] == [(True, 1), (True, 0)]
    if form == PACKED:
        assert [len(PackedBatch.parse(frame.packed).uids) for frame in frames] == [1, 0]
    else:
        assert [len(cast(Any, frame).experiences) for frame in frames] == [1, 0]
    assert frames[0].lease.id == frames[1].lease.id
    for each in answers:
        await each.aclose()
    await buffer.drain()


async def push_large(buffer: Buffer, count: int) -> None:
    for run in range(count):
        tokens, logprobs = torch.arange(3 + NUM_TOKENS), -torch.rand(NUM_TOKENS)
        info = {"model_version": 0}
        await buffer.push(pushed((1, run), info=info, tokens=tokens, logprobs=logprobs))


async def settled(buffer: Buffer, num_leases: int) -> None:
    await until(lambda: len(buffer.state.leases) == num_leases)
    await buffer.drain()


def deliveries(buffer: Buffer) -> list[int]:
    """Of each experience, those that ended badly."""
    progress = buffer.state.progress
    return [
        progress.known(entry.record.seq).num_deliveries.get("trainer", 0)
        for entry in buffer.state.contents
    ]


@pytest.mark.parametrize("policy", ["drop", "keep", "mark"])
async def test_what_became_too_stale_in_line_is_not_sent(world: World, policy: str) -> None:
    backend, buffer = await serving(world, staleness={"max_lag": 1, "on_stale": policy})
    await buffer.publish(0)
    await push_large(buffer, 4)
    stream = granting(backend, 4, timeout_seconds=0.1)
    first = await frame_of(stream)
    assert first.last
    # One may be on its way; those that wait for room behind it are held ready.
    await settled(buffer, 4)
    await buffer.publish(7)
    found = []
    while (message := await asyncio.wait_for(anext(stream), 10)).HasField("frame"):
        found.append(list(message.frame.experiences[0].flags))
        if len(found) == 3:
            break
    assert found.count([]) <= 1
    assert found.count(["stale"]) == len(found) - found.count([]) <= 3 * (policy == "mark")
    await stream.aclose()
    await settled(buffer, 0)
    assert (len(buffer.state.contents) == 4) is (policy == "mark")


async def test_what_was_never_sent_was_never_delivered(world: World) -> None:
    backend, buffer = await serving(world, max_deliveries=1)
    await push_large(buffer, 4)
    stream = granting(backend, 4)
    await frame_of(stream)
    await settled(buffer, 4)
    await stream.aclose()
    await settled(buffer, 0)
    assert sum(deliveries(buffer)) <= 2
    assert deliveries(buffer)[0] == 1


@pytest.mark.parametrize(
    ("read_ahead", "num_more", "blamed"),
    [(0, 0, [1, 1, 1, 0]), (3, 0, [1, 0, 0, 0]), (3, 2, [1, 1, 1, 0])],
)
async def test_what_nobody_took_was_not_delivered(
    world: World, read_ahead: int, num_more: int, blamed: list[int]
) -> None:
    backend, buffer = await serving(world, max_deliveries=9)
    await buffer.push(push(*((1, run) for run in range(4 if num_more == 0 else 5))))
    credits = [Request(credits=1)] * num_more
    stream = granting(backend, 3, *credits, read_ahead=read_ahead)
    for _ in range(3 + num_more):
        await frame_of(stream)
    await stream.aclose()
    await settled(buffer, 0)
    assert deliveries(buffer)[: len(blamed)] == blamed


async def test_a_server_that_stops_blames_nobody(world: World) -> None:
    backend, buffer = await serving(world, push((1, 0), (1, 1)), max_deliveries=1)
    stream = granting(backend, 2)
    await frame_of(stream)
    backend.draining.set()
    await stream.aclose()
    await settled(buffer, 0)
    assert deliveries(buffer) == [0, 0]


async def test_what_is_given_back_unread_was_not_delivered(world: World) -> None:
    backend, buffer = await serving(world, push((1, 0)), max_deliveries=2)
    for unread in (True, False):
        stream = granting(backend, 1)
        lease = (await frame_of(stream)).lease
        await buffer.nack(lease.id, reason="x", unread=unread)
        await stream.aclose()
        await settled(buffer, 0)
        assert deliveries(buffer) == [not unread]
