"""What only the async client does: event loops, cancelled tasks, several that wait at once.

All else is tested of both clients at once; see `tests/blocking.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from experience_buffer import AsyncClient, CallCancelledError, ClientOptions, WrongStateError
from tests.unit.client.rpc.pushed import FAST, acquired, experience, payload


@pytest.fixture
async def buffer(server: tuple[Any, str]) -> AsyncIterator[AsyncClient]:
    options = ClientOptions(max_push_items=3, retry=FAST.retry)
    async with AsyncClient(server[1], token="secret", options=options) as client:
        yield client


def test_one_client_in_two_loops(server: tuple[Any, str]) -> None:
    client = AsyncClient(server[1])
    for _ in range(2):
        stats = asyncio.run(client.get_stats())
        assert stats.server_version == "9.8.7"


async def test_loops_that_run_at_once_need_a_client_each(buffer: AsyncClient) -> None:
    await buffer.get_stats()
    with pytest.raises(WrongStateError, match="in use by an event loop of another thread; make"):
        await asyncio.to_thread(asyncio.run, buffer.get_stats())
    assert (await buffer.get_stats()).server_version == "9.8.7"


async def test_closing_ends_calls_under_way(script: Any, buffer: AsyncClient) -> None:
    async with buffer.stream(1) as stream:
        waiting = asyncio.ensure_future(anext(stream))
        assert await acquired(script.open_streams)
        await buffer.close()
        with pytest.raises(CallCancelledError, match="closed"):
            await waiting
    with pytest.raises(CallCancelledError, match="closed"):
        await buffer.get_stats()


@pytest.mark.parametrize("way", ["close", "cancel"])
async def test_what_the_caller_ends_is_not_done_again(
    script: Any, buffer: AsyncClient, way: str
) -> None:
    with script.lock:
        call = asyncio.ensure_future(buffer.get_stats())
        assert await acquired(script.begun)
        if way == "close":
            await buffer.close()
        else:
            call.cancel()
        error = CallCancelledError if way == "close" else asyncio.CancelledError
        with pytest.raises(error):
            await asyncio.wait_for(call, 10)
    assert not script.begun.acquire(blocking=False)


async def test_tasks_wait_for_one_ack_together(script: Any, buffer: AsyncClient) -> None:
    script.batches.append([payload(1)])
    async with buffer.stream(1) as stream:
        first = await anext(stream)
        await asyncio.gather(first.ack(), first.ack())
        assert script.acked == [first.lease_id]


async def test_pages_are_iterated_over(script: Any, buffer: AsyncClient) -> None:
    await buffer.push([experience(run) for run in range(5)])
    found = [item.uid async for item in buffer.list(page_size=2)]
    assert found == sorted(script.stored)


async def test_a_writer_belongs_to_the_process_that_used_it(
    script: Any, buffer: AsyncClient
) -> None:
    writer = buffer.writer()
    await writer.append(experience(1))
    await writer.flush()
    ours, writer._pid = writer._pid, -1  # As in a process that is forked off.
    with pytest.raises(WrongStateError, match="make a writer in each process"):
        await writer.append(experience(2))
    await writer.close()
    writer._pid = ours
    await writer.append(experience(3))
    await writer.close()
    assert writer.counts.num_stored == len(script.stored) == 2
