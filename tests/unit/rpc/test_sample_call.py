"""A call reads its batch while its lease is being stored, and says nothing before it is on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from experience_buffer import errors
from experience_buffer.packed import PackedBatch
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.runtime.response_bytes import Hold
from experience_buffer_server.store.interface import StoreFullError
from experience_buffer_server.store.lmdb.store import LmdbStore
from tests.refusing_store import Refusals
from tests.unit.buffer_verbs import pushed
from tests.unit.builders import World, push, turns, uid, until
from tests.unit.sample_calls import called, calling, serving

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


async def slow(world: World, *members: tuple[int, int]) -> tuple[Backend, Buffer, Slow]:
    backend, buffer = await serving(world, push(*members))
    return backend, buffer, Slow(world.lmdb)


@FORMATS
async def test_answers_wait_for_the_disk_and_reading_does_not(world: World, form: int) -> None:
    backend, buffer, store = await slow(world, (1, 0), (1, 1))
    holds: list[Hold] = []
    asked = calling(backend, batch_size=2, format=form, holds=holds)
    await asyncio.wait_for(store.read.wait(), 10)
    await turns(20)
    (lease,) = buffer.state.leases.of_consumer("trainer")
    assert (asked.done(), lease.is_stored, lease.state) == (False, False, "open")
    store.let.set()
    response = service_pb2.SampleResponse.FromString(await asked)
    assert (response.lease.id, response.num_units, lease.is_stored) == (lease.id, 2, True)
    if form == PACKED:
        assert PackedBatch.parse(response.packed).uids == [uid(1, 0), uid(1, 1)]
    assert len(holds) == 1


@FORMATS
async def test_a_lease_that_finds_no_room_is_not_delivered(world: World, form: int) -> None:
    backend, buffer, store = await slow(world, (1, 0), (1, 1))
    store.let.set()
    store.num_next = 1
    with pytest.raises(StoreFullError):
        await called(backend, batch_size=2, format=form)
    await buffer.drain()
    consumer = buffer.state.consumers["trainer"]
    assert (len(consumer.ready), len(consumer.out), consumer.num_leased) == (2, 0, 0)
    response = await called(backend, batch_size=2, format=form)
    assert response.num_units == 2


@FORMATS
async def test_what_cannot_be_answered_is_offered_again(world: World, form: int) -> None:
    backend, buffer, store = await slow(world)
    store.let.set()
    await buffer.push(pushed((1, 0), response_text="x" * 70_000))
    backend.limits = backend.limits.model_copy(update={"max_message_bytes": 65_600})
    store.held = store.let = asyncio.Event()
    asked = calling(backend, format=form)
    with pytest.raises(errors.ResourceExhaustedError, match="one item takes"):
        await asyncio.wait_for(asked, 10)
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
    num_bytes = len(await calling(backend, format=form))
    for most in (num_bytes, num_bytes - 1):
        (lease,) = buffer.state.leases.of_consumer("trainer")
        buffer.give_back([lease.id], "undeliverable")
        backend.limits = backend.limits.model_copy(update={"max_message_bytes": most})
        asked = calling(backend, format=form)
        if most == num_bytes:
            assert len(await asked) == most
    with pytest.raises(errors.ResourceExhaustedError, match=f"one item takes {num_bytes} bytes"):
        await asked
    await buffer.drain()


@pytest.mark.parametrize("when", ["reading", "storing"])
async def test_a_call_that_goes_away_leaves_no_lease(world: World, when: str) -> None:
    backend, buffer, store = await slow(world, (1, 0), (1, 1))
    asked = calling(backend, batch_size=2, format=PACKED)
    if when == "storing":
        await asyncio.wait_for(store.read.wait(), 10)
    await until(lambda: buffer.state.leases.of_consumer("trainer"))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    store.let.set()
    await buffer.drain()
    consumer = buffer.state.consumers["trainer"]
    assert (len(consumer.ready), len(consumer.out), consumer.num_leased) == (2, 0, 0)


async def test_a_lease_that_was_returned_meanwhile_is_not_delivered(world: World) -> None:
    backend, buffer, store = await slow(world, (1, 0), (1, 1))
    asked = calling(backend, batch_size=2, format=PACKED)
    await asyncio.wait_for(store.read.wait(), 10)
    (lease,) = buffer.state.leases.of_consumer("trainer")
    buffer.give_back([lease.id], "rewound")
    store.let.set()
    response = service_pb2.SampleResponse.FromString(await asked)
    assert not response.HasField("lease")
    assert not response.packed
    assert "returned before it was sent" in response.shortfall
