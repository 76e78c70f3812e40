"""Pushes that are read in slices: what happens in between, and in which order they end."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

import pytest

from experience_buffer import errors, trxp
from experience_buffer.v1 import service_pb2
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.buffer.state.entries import Reason
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.rpc.push_codec import Pushed, PushRequest, read_push
from experience_buffer_server.runtime import loop_turns
from experience_buffer_server.runtime.callers import Caller, entered
from experience_buffer_server.store.interface import LeaseRow, WriteBatch
from experience_buffer_server.store.lmdb import commit_backlog
from experience_buffer_server.store.lmdb.store import LmdbStore
from tests.unit.builders import World, begun, experience, payload, settings, turns

pytestmark = pytest.mark.on_disk

NUM_RUNS = 6


@pytest.fixture
async def backend(world: World, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """A backend whose pushes pause after each experience."""
    monkeypatch.setattr(loop_turns, "_LEAST_SECONDS", -1.0)
    monkeypatch.setattr(loop_turns, "_MOST_SECONDS", -1.0)
    return await world.backend(on_future_version="refuse")


def request(task: int, num_runs: int = NUM_RUNS) -> PushRequest:
    members = [experience(task, run, info={"model_version": 3}) for run in range(num_runs)]
    return request_of(*(trxp.encode([member]) for member in members))


def request_of(*payloads: bytes, buffer: str = "math") -> PushRequest:
    message = service_pb2.PushRequest(buffer=buffer, payloads=payloads)
    return read_push(message.SerializeToString(), max_payloads=100)


async def happen(backend: Backend, what: str) -> None:
    if what == "delete":
        assert await backend.registry.delete("math", force=True) == 0
    else:
        backend.draining.set()


ENDS = {"delete": errors.BufferNotFoundError, "drain": errors.UnavailableError}


@pytest.mark.parametrize("what", ENDS)
async def test_a_push_that_waits_for_its_turn_sees_what_happened(
    backend: Backend, what: str
) -> None:
    before = await backend.turns.take("")
    pushing = await begun(backend.push(request(1)))
    await happen(backend, what)
    before.end()
    with pytest.raises(ENDS[what]):
        await pushing


@pytest.mark.parametrize("what", ENDS)
async def test_a_push_that_pauses_sees_what_has_happened(backend: Backend, what: str) -> None:
    pushing = await begun(backend.push(request(1)))
    await happen(backend, what)
    with pytest.raises(ENDS[what]):
        await pushing
    (await asyncio.wait_for(backend.turns.take(""), 5)).end()


async def test_a_push_pauses_where_nothing_is_in_its_payloads(backend: Backend) -> None:
    pushing = asyncio.create_task(backend.push(request_of(*[trxp.encode([])] * 50)))
    for _ in range(40):
        await asyncio.sleep(0)
        assert not pushing.done(), "others have a step after each payload"
    assert (await pushing).outcomes == []


async def test_the_rules_of_its_end_hold_for_all_of_a_push(backend: Backend) -> None:
    pushing = asyncio.create_task(backend.push(request(1)))
    await turns(2 * loop_turns._NUM_STEPS)
    await backend.registry.get("math").publish(2)
    found = {outcome.reason for outcome in (await pushing).outcomes}
    assert found == {Reason.FUTURE_VERSION}
    assert backend.buffer("math").num_items == 0


async def test_the_deadline_of_a_call_goes_on_while_it_waits_for_its_turn(backend: Backend) -> None:
    full = {"on_full": "block", "full_timeout_seconds": 60, "max_items": 1, "group_by": "none"}
    await backend.registry.create("full", settings(**full))
    await backend.buffer("full").push(Push(payloads=[payload((1, 0))]))
    one = request_of(payload((1, 1)), buffer="full")
    before = await backend.turns.take("")
    pushing = asyncio.create_task(backend.push(one, remaining_seconds=0.7))
    asyncio.get_running_loop().call_later(0.5, before.end)
    with pytest.raises(errors.BufferFullError) as refused:
        await pushing
    waited = re.search(r"after (.*) s in line", str(refused.value))
    assert waited is not None
    assert float(waited[1]) < 0.3, "it is answered before the deadline"


async def test_small_pushes_do_not_overtake_large_ones(backend: Backend) -> None:
    sizes = [NUM_RUNS, 1, 3, 2]
    pushes = [backend.push(request(task, size)) for task, size in enumerate(sizes)]
    await asyncio.gather(*pushes)
    assert tasks_in_order(backend) == [
        str(task) for task, size in enumerate(sizes) for _ in range(size)
    ]


async def test_who_pushes_little_is_not_behind_all_of_who_pushes_much(
    backend: Backend, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_backlog, "_MAX_WORK", 0)
    monkeypatch.setattr(commit_backlog, "_SECONDS", 0.0)

    async def push_from(peer: str, task: int) -> None:
        entered(Caller(peer, peer))
        await backend.push(request(task))

    with stopped(world.lmdb):
        pushes = [asyncio.create_task(push_from("much", task)) for task in range(8)]
        await asyncio.sleep(0.2)
        pushes.append(asyncio.create_task(push_from("little", 8)))
        await asyncio.sleep(0.2)
    await asyncio.gather(*pushes)
    # One was being written, one waited behind it, and at most one had its turn before.
    assert tasks_in_order(backend).index("8") <= 3 * NUM_RUNS


@contextmanager
def stopped(store: LmdbStore) -> Iterator[None]:
    """Keep a store's process from writing."""
    assert store._process is not None
    os.kill(store._process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(store._process.pid, signal.SIGCONT)


def tasks_in_order(backend: Backend) -> list[str]:
    """The task of each experience, in the order in which they were taken in."""
    entries = sorted(backend.buffer("math").state.contents, key=lambda entry: entry.record.seq)
    return [entry.record.uid.split("/")[1] for entry in entries]


async def test_others_go_on_while_a_push_is_read(backend: Backend) -> None:
    seen = 0
    pushing = asyncio.create_task(backend.push(request(1)))
    while not backend.buffer("math").num_items:
        seen += 1
        await asyncio.sleep(0)
    assert seen >= NUM_RUNS * loop_turns._NUM_STEPS
    assert len((await pushing).outcomes) == NUM_RUNS


async def test_a_payload_that_cannot_be_read_ends_its_push_alone(backend: Backend) -> None:
    broken = request_of(payload((1, 0)), b"TRXP")
    results = await asyncio.gather(
        backend.push(broken), backend.push(request(2)), return_exceptions=True
    )
    assert isinstance(results[0], errors.TrxpError)
    assert isinstance(results[1], Pushed)
    assert backend.buffer("math").num_items == NUM_RUNS


@pytest.mark.parametrize("limit", ["_MOST_AHEAD", "_MAX_WORK", "_MAX_BYTES"])
async def test_pushes_wait_until_little_is_in_front_of_them(
    backend: Backend, world: World, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Beside leases and acks by one limit, else by the others."""
    monkeypatch.setattr(backend.turns, "_slice_seconds", math.inf)
    monkeypatch.setattr(loop_turns, "_MOST_SECONDS", math.inf)
    monkeypatch.setattr(loop_turns, "_LEAST_SECONDS", math.inf)
    monkeypatch.setattr(commit_backlog, limit, 0)
    monkeypatch.setattr(world.lmdb.backlog, "_ahead", 0)
    monkeypatch.setattr(commit_backlog, "_SECONDS", math.inf if limit == "_MOST_AHEAD" else 0.0)
    one = request(0)
    backlogs = []
    commit = world.store.commit

    def watched(batch: WriteBatch) -> Awaitable[None]:
        backlogs.append(world.lmdb.backlog.num_bytes)
        return commit(batch)

    monkeypatch.setattr(world.store, "commit", watched)
    small = world.store.batch()
    small.put_lease(1, LeaseRow(id=1, consumer="c", units=[], deadline=1.0))
    pushes = [asyncio.create_task(backend.push(one)), world.store.commit(small)]
    pushes += [asyncio.create_task(backend.push(request(task))) for task in range(1, 6)]
    await asyncio.gather(*pushes)
    assert len(backlogs) == 7
    assert max(backlogs[1:]) == 0, "each waits until the one before is on disk"
