from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from experience_buffer import (
    EID,
    AsyncClient,
    BufferFullError,
    CallCancelledError,
    ClientOptions,
    DeadlineExceededError,
    Experience,
    InvalidRequestError,
    LeaseNotFoundError,
    PushRefusedError,
    RetryOptions,
    Tombstone,
    UnavailableError,
    WriterOptions,
    trxp,
)

RETRY = RetryOptions(initial_backoff_seconds=0.01, max_backoff_seconds=0.05, reconnect_seconds=20)


def experience(run: int) -> Experience:
    return Experience(
        eid=EID(3, 5, run, 0, "abcdef"),
        tokens=list(range(7)),
        logprobs=[0.5] * 5,
        prompt_length=2,
        reward=float(run),
    )


def payload(run: int) -> bytes:
    return trxp.encode([experience(run)])


@pytest.fixture
def script(server: tuple[Any, str]) -> Any:
    return server[0]


@pytest.fixture
async def buffer(server: tuple[Any, str]) -> AsyncIterator[AsyncClient]:
    options = ClientOptions(max_push_items=3, retry=RETRY)
    async with AsyncClient(server[1], token="secret", options=options) as client:
        yield client


async def acquired(semaphore: Any) -> bool:
    return await asyncio.to_thread(semaphore.acquire, timeout=10)


async def test_push_splits_retries_and_joins(script: Any, buffer: AsyncClient) -> None:
    script.failures += [
        UnavailableError("starting"),
        BufferFullError("full", retry_delay_seconds=0.01),
    ]
    result = await buffer.push(
        [experience(run) for run in range(7)], tombstones=[Tombstone(EID(3, 5, 11))]
    )
    assert [outcome.index for outcome in result.outcomes] == list(range(8))
    assert result.num_stored == 8
    sizes = [len(script.singles(request)) for request in script.pushes]
    assert sizes == [3, 3, 3, 3, 1, 0]
    assert script.metadata[0]["authorization"] == "Bearer secret"


async def test_refused_items_raise(script: Any, buffer: AsyncClient) -> None:
    script.refuse = lambda uid: True
    with pytest.raises(PushRefusedError):
        await buffer.push([experience(1)])


async def test_no_server_is_explained() -> None:
    async with AsyncClient("127.0.0.1:1", timeout=1.0) as client:
        with pytest.raises(UnavailableError, match=r"GetStats to 127\.0\.0\.1:1 failed"):
            await client.get_stats()


async def test_sample_ack_and_pages(script: Any, buffer: AsyncClient) -> None:
    script.batches.append([payload(1), payload(2)])
    batch = await buffer.sample(2, timeout=5)
    assert [item.reward for item in batch.experiences] == [1.0, 2.0]
    await pickle.loads(pickle.dumps(batch)).ack()
    assert script.acked == [batch.lease_id]
    assert not await buffer.sample(2, timeout=0)
    await buffer.push([experience(run) for run in range(5)])
    found = [item.uid async for item in buffer.list(page_size=2)]
    assert found == sorted(script.stored)


def test_one_client_in_two_loops(server: tuple[Any, str]) -> None:
    client = AsyncClient(server[1])
    for _ in range(2):
        stats = asyncio.run(client.get_stats())
        assert stats.server_version == "9.8.7"


async def test_closing_ends_calls_under_way(script: Any, buffer: AsyncClient) -> None:
    async with buffer.stream(1) as stream:
        waiting = asyncio.ensure_future(anext(stream))
        assert await acquired(script.open_streams)
        await buffer.close()
        with pytest.raises(CallCancelledError, match="closed"):
            await waiting
    with pytest.raises(CallCancelledError, match="closed"):
        await buffer.get_stats()


async def test_what_a_stopping_server_cancels_is_done_again(
    script: Any, buffer: AsyncClient
) -> None:
    script.failures += [grpc.StatusCode.CANCELLED] * 2
    assert (await buffer.get_stats()).server_version == "9.8.7"
    script.failures += [grpc.StatusCode.CANCELLED] * 2
    async with buffer.writer() as writer:
        await writer.append(experience(1))
    assert writer.counts.num_stored == 1
    script.failures += [grpc.StatusCode.CANCELLED] * 2
    script.batches.append([payload(1)])
    async with buffer.stream(1) as stream:
        assert len((await anext(stream)).experiences) == 1
    assert not script.failures


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


async def test_stream_delivers_acks_and_grants_credits(script: Any, buffer: AsyncClient) -> None:
    script.batches += [[payload(1), payload(2)], [payload(3)]]
    async with buffer.stream(2, prefetch=2) as stream:
        first, second = await anext(stream), await anext(stream)
        assert [item.reward for item in first.experiences] == [1.0, 2.0]
        assert first.flags == (("singleton", "bootstrapped"), ())
        await asyncio.gather(first.ack(), first.ack())
        assert script.acked == [first.lease_id]
        assert script.credits[0] == 2
    assert await acquired(script.ended_streams)
    with pytest.raises(LeaseNotFoundError):
        await second.ack()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_an_ack_goes_on_beside_the_next_batch(script: Any, buffer: AsyncClient) -> None:
    script.batches += [[payload(1)], [payload(2)], [payload(3)]]
    async with buffer.stream(1, prefetch=1) as stream:
        first = await anext(stream)
        pending = first.begin_ack(7)
        second = await anext(stream)
        assert (await pending.result(), await pending.result()) == (0, 0)
        assert script.acks == [(first.lease_id, 7, None)]
        assert await second.begin_ack().result() == 0
        third = await anext(stream)
        assert script.acked == [first.lease_id, second.lease_id]
    assert await acquired(script.ended_streams)
    late = third.begin_ack()
    with pytest.raises(LeaseNotFoundError):
        await late.result()
    script.batches.append([payload(4)])
    fourth = await buffer.sample(1)
    unsent = fourth.begin_ack(8)
    assert fourth.lease_id not in script.acked
    assert await unsent.result() == 0
    assert script.acks[-1] == (fourth.lease_id, 8, None)


async def test_stream_reconnects_and_old_acks_go_unary(script: Any, buffer: AsyncClient) -> None:
    script.batches += [[payload(1)], [payload(2)]]
    script.break_sample_after.append(1)
    async with buffer.stream(1, prefetch=1) as stream:
        batch = await anext(stream)
        while batch.uids == (experience(1).eid.uid,):
            # The break may come before the batch is handed out: it is dropped then.
            assert await acquired(script.ended_streams)
            assert await acquired(script.open_streams)
            assert await acquired(script.open_streams)
            with pytest.raises(LeaseNotFoundError):
                await batch.ack()
            batch = await anext(stream)
        await batch.ack()
        assert script.acked == [batch.lease_id]


async def test_batches_read_ahead_on_a_broken_stream_are_given_back(
    script: Any, buffer: AsyncClient
) -> None:
    script.batches += [[payload(1)], [payload(2)]]
    script.break_sample_after.append(2)
    async with buffer.stream(1, prefetch=2) as stream:
        assert await acquired(script.ended_streams)
        assert await acquired(script.open_streams)
        assert await acquired(script.open_streams)
        script.batches.append([payload(3)])
        with script.changed:
            script.changed.notify_all()
        assert (await anext(stream)).uids == (experience(3).eid.uid,)
        assert sorted(script.nacked) == [1, 2]


async def test_stream_raises_what_the_server_ends_it_with(script: Any, buffer: AsyncClient) -> None:
    # A write may hide the status; the client then reconnects and meets it again.
    script.failures += [InvalidRequestError("batch_size must be at least 1")] * 50
    async with buffer.stream(0) as stream:
        with pytest.raises(InvalidRequestError, match="at least 1"):
            await anext(stream)


async def test_closing_the_stream_wakes_its_waiters(script: Any, buffer: AsyncClient) -> None:
    stream = buffer.stream(1)
    waiting = asyncio.ensure_future(anext(stream, "over"))
    assert await acquired(script.open_streams)
    await stream.close()
    assert await waiting == "over"


async def test_writer_batches_by_count_and_flushes(script: Any, buffer: AsyncClient) -> None:
    options = WriterOptions(max_batch_items=5, linger_seconds=30)
    async with buffer.writer(buffer="math", options=options) as writer:
        for run in range(11):
            await writer.append(experience(run))
        await writer.append([experience(11), experience(12)])
        await writer.flush()
        assert writer.counts.num_stored == 13
    sizes = [len(script.singles(request.push)) for request in script.requests]
    assert sizes == [5, 5, 3]


async def test_writer_sends_after_lingering(script: Any, buffer: AsyncClient) -> None:
    writer = buffer.writer(options=WriterOptions(linger_seconds=0.01))
    for run in range(3):
        await writer.append(experience(run))
        async with asyncio.timeout(10):
            while writer.counts.num_stored == run:
                await asyncio.sleep(0.01)
    assert len(script.requests) == 3
    await writer.close()


async def test_writer_sends_again_what_a_broken_stream_left_unanswered(
    script: Any, buffer: AsyncClient
) -> None:
    script.break_push_after += [2, 1]
    script.failures.append(UnavailableError("starting"))
    async with buffer.writer(options=WriterOptions(max_batch_items=1)) as writer:
        for run in range(13):
            await writer.append(experience(run))
        await writer.flush()
        counts = writer.counts
    assert len(script.stored) == 13
    assert (counts.num_stored, counts.num_duplicates) == (12, 1)


async def test_writer_raises_refusals_and_waits_when_full(script: Any, buffer: AsyncClient) -> None:
    bad = experience(2).eid.uid
    script.refuse = lambda uid: uid == bad
    script.push_errors.append(BufferFullError("full", retry_delay_seconds=0.02))
    writer = buffer.writer()
    await writer.append([experience(1), experience(2), experience(3)])
    with pytest.raises(PushRefusedError) as caught:
        await writer.flush()
    assert [(o.index, o.uid) for o in caught.value.result.refused] == [(1, bad)]
    await writer.close()
    assert (writer.counts.num_stored, writer.counts.num_refused) == (2, 1)
    with pytest.raises(CallCancelledError):
        await writer.append(experience(5))


async def test_full_writer_blocks_until_its_deadline(script: Any, buffer: AsyncClient) -> None:
    script.push_errors.append(BufferFullError("math is full", retry_delay_seconds=60))
    writer = buffer.writer(options=WriterOptions(max_pending_bytes=100))
    await writer.append(experience(1))
    with pytest.raises(DeadlineExceededError, match="stayed full"):
        await writer.append(experience(2), timeout=0.3)
    with pytest.raises(DeadlineExceededError, match=r"1 experiences have no outcome.*math is full"):
        await writer.close(timeout=0.2)
