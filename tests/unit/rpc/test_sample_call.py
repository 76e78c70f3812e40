"""A call reads its batch while its lease is being stored, and says nothing before it is on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from experience_buffer import errors, trxp
from experience_buffer.packed import PackedBatch
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.rpc.sample_call import sample
from experience_buffer_server.runtime.response_bytes import Hold
from experience_buffer_server.store.interface import StoreFullError
from experience_buffer_server.store.lmdb.store import LmdbStore
from tests.refusing_store import Refusals
from tests.unit.buffer.delivery.test_bounds import serving
from tests.unit.builders import World, experience, push, uid

pytestmark = pytest.mark.on_disk

PACKED = types_pb2.SAMPLE_FORMAT_PACKED
FORMATS = pytest.mark.parametrize("form", [PACKED, types_pb2.SAMPLE_FORMAT_TRXP])


class Slow(Refusals):
    """Commits are heard of when they are let, and it is known when something is read."""

    def __init__(self, store: LmdbStore) -> None:
        super().__init__(store)
        self.held = self.let = asyncio.Event()
        self.read = asyncio.Event()
        for name in ("stored", "payloads"):
            vars(store)[name] = partial(self._note_read, getattr(store, name))

    def _note_read(self, read: Callable[..., object], *given: object) -> object:
        self.read.set()
        return read(*given)


class Asked:
    """A call, and what it holds."""

    def __init__(self, backend: Backend, form: int, **more: Any) -> None:
        self.holds: list[Hold] = []
        wish: dict[str, Any] = {"buffer": "b", "consumer": "trainer", "batch_size": 2} | more
        request = service_pb2.SampleRequest(format=cast(Any, form), **wish)
        self.task = asyncio.ensure_future(
            sample(backend, request, timeout_seconds=0.01, until_sent=self.holds.append)
        )

    async def response(self) -> service_pb2.SampleResponse:
        return service_pb2.SampleResponse.FromString(await self.task)


async def slow(world: World, *members: tuple[int, int]) -> tuple[Backend, Buffer, Slow]:
    backend = await serving(world)
    buffer = backend.buffer("b")
    await buffer.push(push(*members))
    return backend, buffer, Slow(world.lmdb)


@FORMATS
async def test_reading_does_not_wait_for_the_disk_and_the_answer_does(
    world: World, form: int
) -> None:
    backend, buffer, store = await slow(world, (1, 0), (1, 1))
    asked = Asked(backend, form)
    await asyncio.wait_for(store.read.wait(), 10)
    for _ in range(20):
        await asyncio.sleep(0)
    (lease,) = buffer.state.leases.of_consumer("trainer")
    assert (asked.task.done(), lease.is_stored, lease.state) == (False, False, "open")
    store.let.set()
    response = await asked.response()
    assert (response.lease.id, response.num_units, lease.is_stored) == (lease.id, 2, True)
    if form == PACKED:
        assert PackedBatch.parse(response.packed).uids == [uid(1, 0), uid(1, 1)]
    assert len(asked.holds) == 1


@FORMATS
async def test_a_lease_that_finds_no_room_is_not_delivered(world: World, form: int) -> None:
    backend, buffer, store = await slow(world, (1, 0), (1, 1))
    store.let.set()
    store.num_next = 1
    asked = Asked(backend, form)
    with pytest.raises(StoreFullError):
        await asked.response()
    await buffer.drain()
    consumer = buffer.state.consumers["trainer"]
    assert (len(consumer.ready), len(consumer.out), consumer.num_leased) == (2, 0, 0)
    response = await Asked(backend, form).response()
    assert response.num_units == 2


@FORMATS
async def test_what_cannot_be_answered_is_offered_again(world: World, form: int) -> None:
    backend, buffer, store = await slow(world)
    store.let.set()
    large = experience(1, 0, response_text="x" * 70_000)
    await buffer.push(Push(payloads=[trxp.encode([large])]))
    backend.limits = backend.limits.model_copy(update={"max_message_bytes": 65_600})
    store.held = store.let = asyncio.Event()
    asked = Asked(backend, form, batch_size=1)
    with pytest.raises(errors.ResourceExhaustedError, match="one item takes"):
        await asyncio.wait_for(asked.task, 10)
    store.let.set()
    await buffer.drain()
    consumer = buffer.state.consumers["trainer"]
    assert (len(consumer.ready), len(consumer.out), consumer.num_leased) == (1, 0, 0)
    (state,) = [state for state in world.store.load() if state.row.id == buffer.id]
    assert [row.state for row in state.leases] == ["nacked"]


@FORMATS
async def test_a_response_takes_no_more_than_a_message_may(world: World, form: int) -> None:
    """With all that travels beside the batch."""
    backend, buffer, store = await slow(world, (1, 0))
    store.let.set()
    num_bytes = len(await Asked(backend, form, batch_size=1).task)
    for most in (num_bytes, num_bytes - 1):
        (lease,) = buffer.state.leases.of_consumer("trainer")
        buffer.give_back([lease.id], "undeliverable")
        backend.limits = backend.limits.model_copy(update={"max_message_bytes": most})
        asked = Asked(backend, form, batch_size=1)
        if most == num_bytes:
            assert len(await asked.task) == most
    with pytest.raises(errors.ResourceExhaustedError, match=f"one item takes {num_bytes} bytes"):
        await asked.task
    await buffer.drain()


@pytest.mark.parametrize("when", ["reading", "storing"])
async def test_a_call_that_goes_away_leaves_no_lease(world: World, when: str) -> None:
    backend, buffer, store = await slow(world, (1, 0), (1, 1))
    asked = Asked(backend, PACKED)
    if when == "storing":
        await asyncio.wait_for(store.read.wait(), 10)
    while not buffer.state.leases.of_consumer("trainer"):
        await asyncio.sleep(0)
    asked.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked.task
    store.let.set()
    await buffer.drain()
    consumer = buffer.state.consumers["trainer"]
    assert (len(consumer.ready), len(consumer.out), consumer.num_leased) == (2, 0, 0)


async def test_a_lease_that_was_returned_meanwhile_is_not_delivered(world: World) -> None:
    backend, buffer, store = await slow(world, (1, 0), (1, 1))
    asked = Asked(backend, PACKED)
    await asyncio.wait_for(store.read.wait(), 10)
    (lease,) = buffer.state.leases.of_consumer("trainer")
    buffer.give_back([lease.id], "rewound")
    store.let.set()
    response = await asked.response()
    assert not response.HasField("lease")
    assert not response.packed
    assert "returned before it was sent" in response.shortfall
