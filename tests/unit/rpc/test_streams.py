"""Both streams without gRPC: how they end, and what they leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import torch

from experience_buffer import errors, trxp
from experience_buffer.trxp import DEFAULT_LIMITS
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.compiled.candidates import CompiledReader
from experience_buffer_server.buffer.intake.push_reading import PushStatus
from experience_buffer_server.rpc import push_stream, sample_stream
from experience_buffer_server.rpc.batch_sender import Sending
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.rpc.push_codec import PushRequest, PushStreamRequest, read_push_stream
from experience_buffer_server.rpc.push_stream import PushSession
from experience_buffer_server.rpc.sample_stream import SampleSession
from experience_buffer_server.settings.buffer import MEBI
from experience_buffer_server.store.interface import LARGE_PAYLOAD_BYTES
from tests.unit.buffer_verbs import leased, pushed
from tests.unit.builders import World, experience, payload, push, settings, turns, until
from tests.unit.sample_calls import Request, fill, frame_of, granting, opening, sampling, saying


@pytest.fixture
async def backend(world: World) -> Backend:
    return await world.backend()


def streamed(number: int, buffer: str = "math") -> PushStreamRequest:
    push = service_pb2.PushRequest(buffer=buffer, payload=payload((number, 0)))
    message = service_pb2.PushStreamRequest(sequence=number, push=push)
    return read_push_stream(message.SerializeToString(), max_payloads=4096)


async def large_batches(backend: Backend, packed: bool) -> tuple[Buffer, Any]:
    """A buffer of eight experiences of 4 MiB, and a stream with a credit for each."""
    await backend.registry.create("large", settings(group_by="none"))
    buffer = backend.buffer("large")
    for run in range(8):
        extra = {"x": torch.zeros(4 * MEBI, dtype=torch.uint8)}
        await buffer.push(pushed((1, run), extra=extra))
    form = int(packed) * types_pb2.SAMPLE_FORMAT_PACKED
    return buffer, granting(backend, 8, buffer="large", format=form)


async def stored_from(backend: Backend, memory: bytearray) -> list[str]:
    """Push what lies in memory that its client can still change; uids of what was stored."""
    size, payloads = len(memory), [memoryview(memory)]
    request = PushRequest(
        buffer="math", payloads=payloads, tombstones=(), group_size=0, num_bytes=size, is_lent=True
    )
    outcomes = (await backend.push(request)).outcomes
    assert [outcome.status for outcome in outcomes] == [PushStatus.STORED] * 2
    return [outcome.uid for outcome in outcomes]


def change_when_admitted(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, memory: bytearray
) -> None:
    """Have a client write over a push that was read and isn't stored yet."""
    reading = backend.buffer("math").flow.ingest.reading
    real = reading.admit

    async def admit_and_change(*arguments: Any) -> Any:
        admitted = await real(*arguments)
        memory[:] = bytes(len(memory))
        return admitted

    monkeypatch.setattr(reading, "admit", admit_and_change)


@pytest.mark.parametrize(
    "compiled", [None, CompiledReader(DEFAULT_LIMITS)], ids=["checked", "compiled"]
)
async def test_what_a_client_changes_once_it_was_read_is_stored_as_it_was(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, compiled: CompiledReader | None
) -> None:
    backend.registry.payloads.compiled = compiled
    memory = bytearray(payload((1, 0), (1, 1)))
    change_when_admitted(backend, monkeypatch, memory)
    uids = await stored_from(backend, memory)
    stored = backend.store.payloads(backend.buffer("math").id, uids)
    assert stored == [payload((1, 0)), payload((1, 1))]


async def test_a_large_one_that_a_client_changes_is_stored_as_it_was_too(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.registry.payloads.compiled = CompiledReader(DEFAULT_LIMITS)
    buffer = backend.buffer("math")
    large = experience(
        2, 0, tokens=torch.arange(LARGE_PAYLOAD_BYTES), prompt_length=9, logprobs=None
    )
    memory = bytearray(trxp.encode([large, experience(2, 1)]))
    sent = trxp.split(bytes(memory))
    change_when_admitted(backend, monkeypatch, memory)
    uids = await stored_from(backend, memory)
    async with backend.store.fetched(buffer.id, uids):
        assert backend.store.payloads(buffer.id, uids) == sent


async def test_pushes_are_answered_in_order_each_with_its_own_error(backend: Backend) -> None:
    requests = [streamed(number, name) for number, name in enumerate(["math", "none", "math"] * 50)]
    written = [
        answer async for answer in PushSession(backend, saying(requests, ends=True)).responses()
    ]
    answers = list(map(service_pb2.PushStreamResponse.FromString, written))
    assert [answer.sequence for answer in answers] == list(range(150))
    assert {answer.error.code for answer in answers[1::3]} == {5}
    assert backend.buffer("math").num_items == 100


async def test_a_drain_ends_both_streams(backend: Backend) -> None:
    sessions = [
        PushSession(backend, saying([])).responses(),
        granting(backend, 1),
        sampling(backend, saying([])),
    ]
    waits = [asyncio.ensure_future(anext(session, None)) for session in sessions]
    await asyncio.sleep(0)
    backend.draining.set()
    assert await asyncio.wait_for(asyncio.gather(*waits), 10) == [None, None, None]


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_drain_answers_what_was_read(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """Whether the stream waits for its next request then, or for room for an answer."""
    if is_full:
        monkeypatch.setattr(push_stream, "_MAX_PUSHES", 1)
    read: list[int] = []

    async def said() -> AsyncIterator[PushStreamRequest]:
        for number in range(3):
            read.append(number)
            yield streamed(number)
        await asyncio.Event().wait()

    answers = PushSession(backend, said()).responses()
    written = [await asyncio.wait_for(anext(answers), 10)]
    assert read == [0, 1, 2]
    await asyncio.sleep(0)
    backend.draining.set()
    async with asyncio.timeout(10):
        written += [answer async for answer in answers]
    sequences = [service_pb2.PushStreamResponse.FromString(each).sequence for each in written]
    assert sequences == [0, 1, 2]


async def test_a_stream_that_is_cancelled_stops_reading(backend: Backend) -> None:
    ended = asyncio.Event()

    async def said() -> AsyncIterator[PushStreamRequest]:
        try:
            yield streamed(0)
            await asyncio.Event().wait()
        finally:
            ended.set()

    answers = PushSession(backend, said()).responses()
    await asyncio.wait_for(anext(answers), 10)
    waiting = asyncio.ensure_future(anext(answers))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait_for(ended.wait(), 10)


@pytest.mark.parametrize("message", [opening(), Request()])
async def test_a_wrong_message_ends_the_stream_as_such(backend: Backend, message: Request) -> None:
    stream = sampling(backend, saying([opening(), message]))
    with pytest.raises(errors.InvalidRequestError, match="unexpected message"):
        await asyncio.wait_for(anext(stream), 10)


async def test_more_credits_than_a_thousand_all_count(backend: Backend) -> None:
    buffer = backend.buffer("math")
    for task in range(15):
        await buffer.push(push(*((task, run) for run in range(97))))
    stream = granting(backend, 1300)
    for _ in range(1300):
        assert (await frame_of(stream)).last
    await stream.aclose()
    await buffer.drain()
    assert len(buffer.state.leases) == 0


async def test_a_stream_remembers_no_lease_that_a_call_has_ended(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Sending] = []

    class Watched(Sending):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(sample_stream, "Sending", Watched)
    buffer = backend.buffer("math")
    for task in range(3):
        await buffer.push(push(*((task, run) for run in range(97))))
    stream = granting(backend, 291)
    for number in range(291):
        lease = (await frame_of(stream)).lease
        if number:
            await buffer.ack(lease.id)
    assert len(made[0]._leases) <= 66
    await stream.aclose()
    await buffer.drain()
    await until(lambda: not len(buffer.state.leases))


async def test_a_closed_stream_gives_its_leases_back_and_leaves_no_task(backend: Backend) -> None:
    buffer = backend.buffer("math")
    await buffer.push(push(*((1, run) for run in range(20))))
    before = asyncio.all_tasks()
    stream = granting(backend, 20)
    lease_id = (await frame_of(stream)).lease.id
    await buffer.ack(lease_id)
    await stream.aclose()
    # Its tasks end in the next turns, and then their leases are given back.
    await until(lambda: not len(buffer.state.leases))
    await buffer.drain()
    for _ in range(5):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    assert len(buffer.state.consumers["trainer"].ready) == 19
    assert len(buffer.state.leases) == 0


async def test_a_lease_of_another_stream_can_be_acked(backend: Backend) -> None:
    buffer = backend.buffer("math")
    await buffer.push(push((1, 0)))
    first = granting(backend, 1)
    lease_id = (await frame_of(first)).lease.id
    ack = Request(ack=service_pb2.AckLeases(ids=[lease_id, 999]))
    answers = sampling(backend, saying([opening(), ack], ends=True))
    results = [answer.lease_result async for answer in answers]
    assert [(r.lease_id, r.error.code) for r in results] == [(lease_id, 0), (999, 5)]
    await first.aclose()
    assert len(buffer.state.contents) == 0


def ending_together(
    commit: Callable[[Any], Awaitable[None]], number: int
) -> Callable[[Any], Awaitable[None]]:
    """Commits of which none ends before so many were begun."""
    all_came = asyncio.Barrier(number)

    def commit_with_others(batch: Any) -> Awaitable[None]:
        committed = commit(batch)

        async def wait() -> None:
            await asyncio.wait_for(all_came.wait(), 10)
            await committed

        return wait()

    return commit_with_others


async def test_acks_of_one_message_are_stored_together_and_answered_in_order(
    backend: Backend, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = backend.buffer("math")
    await buffer.push(push(*((1, run) for run in range(7))))
    stream = granting(backend, 7)
    ids = [(await frame_of(stream)).lease.id for _ in range(7)]
    await buffer.drain()
    monkeypatch.setattr(world.store, "commit", ending_together(world.store.commit, 7))
    ack = Request(ack=service_pb2.AckLeases(ids=[*ids[:4], 999, *ids[4:]]))
    answers = sampling(backend, saying([opening(), ack], ends=True))
    results = [answer.lease_result async for answer in answers]
    monkeypatch.undo()
    assert [result.lease_id for result in results] == [*ids[:4], 999, *ids[4:]]
    assert [result.error.code for result in results] == [0, 0, 0, 0, 5, 0, 0, 0]
    assert len(buffer.state.contents) == 0
    await stream.aclose()


@pytest.mark.parametrize("packed", [False, True])
async def test_leases_are_stored_ahead_and_come_back_unblamed(
    backend: Backend, packed: bool
) -> None:
    """Several credits, a batch that isn't read: the next ones are leased, and not sent."""
    buffer, stream = await large_batches(backend, packed)
    await asyncio.wait_for(anext(stream), 10)
    await buffer.drain()
    assert 4 <= len(buffer.state.leases) <= 6
    await stream.aclose()
    await buffer.drain()
    assert len(buffer.state.leases) == 0
    lease = await leased(buffer, 8)
    deliveries = [unit.num_deliveries for unit in lease.units]
    assert deliveries[0] == 2
    assert deliveries[3:] == [1] * 5


async def test_each_credit_is_leased_as_it_comes(
    backend: Backend, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only once the batch before is sent: its lease may wait long for the disk."""
    buffer = backend.buffer("math")
    await buffer.push(push(*((1, run) for run in range(7))))
    monkeypatch.setattr(world.store, "commit", ending_together(world.store.commit, 3))
    requests: asyncio.Queue[Request] = asyncio.Queue()
    stream = sampling(backend, said_one_by_one(requests))
    requests.put_nowait(opening())
    first = asyncio.ensure_future(anext(stream))
    for number in range(3):
        assert not first.done()
        assert len(buffer.state.leases) == number
        requests.put_nowait(Request(credits=1))
        await turns(20)
    frames = [(await asyncio.wait_for(first, 10)).frame]
    frames += [await frame_of(stream) for _ in range(2)]
    runs = [frame.experiences[0].uid.split("/")[2] for frame in frames]
    assert runs == ["0", "1", "2"]
    assert len(buffer.state.leases) == 3
    monkeypatch.undo()
    await stream.aclose()
    await buffer.drain()


@pytest.mark.parametrize(
    ("credit", "num_leases"), [(Request(credits=1), 2), (Request(byte_credits=1), 1)]
)
async def test_a_batch_that_is_not_sent_yet_has_its_credit(
    backend: Backend, credit: Request, num_leases: int
) -> None:
    """While it waits for memory; where bytes count, the next one waits for what this one spends."""
    buffer = backend.buffer("math")
    await buffer.push(push(*((1, run) for run in range(7))))
    go = fill(backend)
    requests: asyncio.Queue[Request] = asyncio.Queue()
    stream = sampling(backend, said_one_by_one(requests))
    for request in (opening(), *[Request(byte_credits=1)] * (num_leases == 1)):
        requests.put_nowait(request)
    requests.put_nowait(Request(credits=3 - num_leases))
    first = asyncio.ensure_future(anext(stream))
    for num_said in (1, num_leases):
        await buffer.drain()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not first.done()
        assert len(buffer.state.leases) == num_said
        requests.put_nowait(credit)
    go()
    assert (await asyncio.wait_for(first, 10)).frame.num_units == 1
    await stream.aclose()
    await buffer.drain()


async def said_one_by_one(requests: asyncio.Queue[Request]) -> AsyncIterator[Request]:
    while True:
        yield await requests.get()


async def test_a_deleted_buffer_ends_its_streams_and_knows_no_lease(backend: Backend) -> None:
    buffer = backend.buffer("math")
    await buffer.push(push((1, 0)))
    stream = granting(backend, 2)
    lease_id = (await frame_of(stream)).lease.id
    assert await backend.registry.delete("math", force=True) == 1
    with pytest.raises(errors.BufferNotFoundError):
        await asyncio.wait_for(anext(stream), 10)
    with pytest.raises(errors.LeaseNotFoundError):
        await buffer.ack(lease_id)
    await buffer.drain()
    assert list(backend.store.load()) == []


@pytest.mark.parametrize("packed", [False, True])
async def test_a_stream_reads_no_more_than_its_reader_takes(backend: Backend, packed: bool) -> None:
    _, stream = await large_batches(backend, packed)
    num_batches, size = 0, 4 * MEBI
    while num_batches < 7:
        message = await asyncio.wait_for(anext(stream), 10)
        await turns(100)
        # This one is being sent, and at most the next one is read.
        assert size <= backend.responses.held.total < 2 * size + 2 * packed * size
        num_batches += message.frame.last
    await stream.aclose()
    await asyncio.sleep(0)  # Its task ends by itself.
    assert backend.responses.held.total == 0


@pytest.mark.parametrize("packed", [False, True])
async def test_a_frame_takes_no_more_than_a_message_may(backend: Backend, packed: bool) -> None:
    """Of a server that was told to send small ones only."""
    most = 65_536
    backend.limits = backend.limits.model_copy(update={"max_message_bytes": most})
    for task in (1, 2):
        await backend.buffer("math").push(push(*((task, run) for run in range(97))))
    form = int(packed) * types_pb2.SAMPLE_FORMAT_PACKED
    said = saying([opening(batch_size=194, format=form), Request(credits=1)])
    stream: Any = SampleSession(backend, said).responses()
    sizes = [len(await anext(stream))]
    while not sizes or sum(sizes) < 194 * len(payload((1, 0))) * 3 // 4:
        sizes.append(len(await anext(stream)))
    assert len(sizes) > 1
    assert max(sizes) <= most
    await stream.aclose()
    await backend.buffer("math").drain()


async def test_a_stream_waits_for_the_bytes_of_others(backend: Backend) -> None:
    await backend.buffer("math").push(push((1, 0)))
    go = fill(backend)
    stream: Any = granting(backend, 1)
    first = asyncio.ensure_future(anext(stream))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not first.done()
    go()
    assert (await asyncio.wait_for(first, 10)).frame.num_units == 1
    # What it holds goes with it.
    await stream.aclose()
    assert backend.responses.held.total == 0
    await backend.buffer("math").drain()
