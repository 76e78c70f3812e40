"""What `test_delivery.py` tests, of the async client: the parts that are written twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from experience_buffer import (
    EID,
    AsyncClient,
    ClientOptions,
    DeadlineExceededError,
    Experience,
    InvalidRequestError,
    Pacing,
    RetryOptions,
    UnavailableError,
    trxp,
)
from experience_buffer.v1 import service_pb2 as pb

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
    async with AsyncClient(server[1], options=ClientOptions(retry=RETRY)) as client:
        yield client


async def acquired(semaphore: Any) -> bool:
    return await asyncio.to_thread(semaphore.acquire, timeout=10)


def of_kind(script: Any, kind: type) -> list[Any]:
    return [request for request in script.requests if isinstance(request, kind)]


async def test_leases_steps_and_the_timeline(script: Any, buffer: AsyncClient) -> None:
    script.batches += [[payload(1)], [payload(2)]]
    batch = await buffer.sample(1)
    assert await batch.extend(5000.0) == 5000.0
    assert await batch.ack(step=19) == 0
    assert await buffer.ack(7, step=23, rank=1) == 3
    await (await buffer.sample(1)).nack("bad")
    assert script.acks == [(1, 19, None), (7, 23, 1)]
    assert script.nacked == [2]
    assert (await buffer.sample(1, timeout=0)).lease_id == 0
    assert await buffer.extend_lease(11) == 7001.0
    assert (await buffer.declare_safe(127)).safe_step == 127
    state = json.loads(json.dumps(buffer.state_dict(43, consumer="actor")))
    assert (await buffer.load_state_dict(state)).num_leases == 103
    [rewound] = of_kind(script, pb.RewindRequest)
    assert rewound == pb.RewindRequest(buffer="default", consumer="actor", step=43)


async def test_quarantine_priorities_and_places(script: Any, buffer: AsyncClient) -> None:
    assert await buffer.release_quarantined([]) == 0
    assert await buffer.release_quarantined("a") == 113
    result = await buffer.update_priorities([("a", 1.0, 3), ("outdated", 1.0, 5)])
    assert (result.num_updated, result.outdated_uids) == (1, ("outdated",))
    with pytest.raises(InvalidRequestError, match="twice"):
        await buffer.update_priorities([("a", 1.0), ("a", 2.0)])
    assert (await buffer.reserve_groups(["1/2", "1/3", "1/5"])).granted == ("1/2", "1/3")
    pacing = Pacing(consumer="trainer", max_staleness=0, batch_size=1)
    assert (await buffer.update_buffer("math", pacing=pacing)).config.pacing == pacing
    assert (await buffer.update_buffer("math", pacing=None)).config.pacing is None


async def test_a_rank_asks_for_one_shared_batch_after_the_other(
    script: Any, buffer: AsyncClient
) -> None:
    script.batches += [[payload(1)], [], [payload(3)], [payload(4)]]
    script.num_waiting_ranks = 2
    batch = await buffer.sample(6, rank=1, world_size=3)
    assert await batch.ack(step=29) == 2
    assert not await buffer.sample(6, rank=1, world_size=3)
    await buffer.sample(6, rank=1, world_size=3)
    await buffer.rewind(3)
    await buffer.sample(6, rank=1, world_size=3)
    asked = [request.rank_of for request in of_kind(script, pb.SampleRequest)]
    assert [each.after_lease_id for each in asked] == [0, 1, 2, 0]
    assert script.acks == [(1, 29, 1)]


async def test_a_stream_of_a_rank_goes_on_after_what_was_taken(
    script: Any, buffer: AsyncClient
) -> None:
    script.batches += [[payload(1)], [payload(2)]]
    script.break_sample_after.append(2)
    async with buffer.stream(4, prefetch=1, rank=1, world_size=2) as stream:
        assert (await anext(stream)).rank == 1
        assert await acquired(script.ended_streams)
        assert await acquired(script.open_streams)
        assert await acquired(script.open_streams)
        script.batches.append([payload(3)])
        with script.changed:
            script.changed.notify_all()
        third = await anext(stream)
        assert third.lease_id == 3
        assert await third.ack(61) == 0
    opened = of_kind(script, pb.SampleStreamOpen)
    assert [each.rank_of.after_lease_id for each in opened] == [0, 1]
    assert script.nacked == []
    assert script.acks == [(3, 61, None)]


async def test_a_stream_of_packed_batches_returns_their_bytes(
    script: Any, buffer: AsyncClient
) -> None:
    script.batches += [[payload(1), payload(2)], [payload(3)]]
    async with buffer.stream(2, format="packed", prefetch=1, max_bytes=70_001) as stream:
        first, second = await anext(stream), await anext(stream)
        assert await second.ack(67) == 0
    assert first.packed.uids == [experience(1).eid.uid, experience(2).eid.uid]
    assert (await buffer.sample(1, format="packed", timeout=0)).columns is None
    sizes = [len(payload(1)) + len(payload(2)), len(payload(3))]
    assert script.byte_credits == [70_001, *sizes]


async def test_an_overdue_first_batch_is_explained(script: Any, buffer: AsyncClient) -> None:
    script.waiting_for = "0 ready of 64"
    async with buffer.stream(64, buffer="math", first_timeout=0.05) as stream:
        for _ in range(2):
            with pytest.raises(DeadlineExceededError, match=r"0\.05 s: 0 ready of 64"):
                await anext(stream)
    script.notes.append("7 groups incomplete")
    async with buffer.stream(64, first_timeout=0.5) as stream:
        with pytest.raises(DeadlineExceededError, match="7 groups incomplete; go on"):
            await anext(stream)
    async with AsyncClient("127.0.0.1:1") as nobody, nobody.stream(1, first_timeout=0.1) as lost:
        with pytest.raises(DeadlineExceededError, match="GetStats to"):
            await anext(lost)


async def test_calls_that_must_not_run_twice_are_not_repeated(
    script: Any, buffer: AsyncClient
) -> None:
    script.failures.append(UnavailableError("connection lost"))
    with pytest.raises(UnavailableError):
        await buffer.update_priorities([("a", 1.0, 3)])
    script.failures.append(UnavailableError("connection lost"))
    assert (await buffer.update_priorities([("a", 1.0)])).num_updated == 1
