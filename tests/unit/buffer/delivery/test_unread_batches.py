"""Batches that a stream holds ready and that nobody has seen: judged again, and no delivery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from experience_buffer import trxp
from experience_buffer.v1 import service_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.settings.server import SnapshotsSection
from experience_buffer_server.store.lmdb.snapshots.snapshots import Snapshots
from tests.unit.builders import World, experience, push, sampling, settings

NUM_TOKENS = 600_000
"""A few of such experiences are more than waits to be written."""
Request = service_pb2.SampleStreamRequest


async def backend_of(world: World, **consumer: Any) -> Backend:
    registry = world.registry()
    trainer = {"name": "trainer"} | consumer
    await registry.create("math", settings(group_by="none", consumers=[trainer]))
    snapshots = Snapshots(SnapshotsSection(), Path("unused"), world.metrics)
    return Backend(registry, world.store, world.limits, asyncio.Event(), snapshots)


async def saying(messages: Iterable[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message
    await asyncio.Event().wait()


def stream_of(
    backend: Backend, num_credits: int, *more: Request, read_ahead: int = 0
) -> AsyncGenerator[service_pb2.SampleStreamResponse]:
    opened = service_pb2.SampleStreamOpen(
        buffer="math", consumer="trainer", batch_size=1, read_ahead=read_ahead, timeout_seconds=0.1
    )
    return sampling(backend, saying([Request(open=opened), Request(credits=num_credits), *more]))


async def push_large(buffer: Buffer, count: int) -> None:
    for run in range(count):
        one = experience(
            1,
            run,
            info={"model_version": 0},
            tokens=torch.arange(3 + NUM_TOKENS),
            logprobs=-torch.rand(NUM_TOKENS),
        )
        await buffer.push(Push(payloads=[trxp.encode([one])]))


async def settled(buffer: Buffer, num_leases: int) -> None:
    async with asyncio.timeout(10):
        while len(buffer.state.leases) != num_leases:
            await asyncio.sleep(0)
    await buffer.drain()


def deliveries(buffer: Buffer) -> list[int]:
    """Of each experience, those that ended badly."""
    progress = buffer.state.progress
    return [progress.num_deliveries(entry.record.seq, "trainer") for entry in buffer.state.contents]


@pytest.mark.parametrize("policy", ["drop", "keep", "mark"])
async def test_what_became_too_stale_in_line_is_not_sent(world: World, policy: str) -> None:
    backend = await backend_of(world, staleness={"max_lag": 1, "on_stale": policy})
    buffer = backend.buffer("math")
    await buffer.publish(0)
    await push_large(buffer, 4)
    stream = stream_of(backend, 4)
    first = await asyncio.wait_for(anext(stream), 10)
    assert first.frame.last
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
    backend = await backend_of(world, max_deliveries=1)
    buffer = backend.buffer("math")
    await push_large(buffer, 4)
    stream = stream_of(backend, 4)
    await asyncio.wait_for(anext(stream), 10)
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
    backend = await backend_of(world, max_deliveries=9)
    buffer = backend.buffer("math")
    await buffer.push(push(*((1, run) for run in range(4 if num_more == 0 else 5))))
    credits = [Request(credits=1)] * num_more
    stream = stream_of(backend, 3, *credits, read_ahead=read_ahead)
    for _ in range(3 + num_more):
        await asyncio.wait_for(anext(stream), 10)
    await stream.aclose()
    await settled(buffer, 0)
    assert deliveries(buffer)[: len(blamed)] == blamed


async def test_a_server_that_stops_blames_nobody(world: World) -> None:
    backend = await backend_of(world, max_deliveries=1)
    buffer = backend.buffer("math")
    await buffer.push(push((1, 0), (1, 1)))
    stream = stream_of(backend, 2)
    await asyncio.wait_for(anext(stream), 10)
    backend.draining.set()
    await stream.aclose()
    await settled(buffer, 0)
    assert deliveries(buffer) == [0, 0]


async def test_what_is_given_back_unread_was_not_delivered(world: World) -> None:
    backend = await backend_of(world, max_deliveries=2)
    buffer = backend.buffer("math")
    await buffer.push(push((1, 0)))
    for unread in (True, False):
        stream = stream_of(backend, 1)
        lease = (await asyncio.wait_for(anext(stream), 10)).frame.lease
        await buffer.nack(lease.id, reason="x", unread=unread)
        await stream.aclose()
        await settled(buffer, 0)
        assert deliveries(buffer) == [not unread]
