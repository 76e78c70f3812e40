"""Leases that ranks share, where their acks and other calls cross."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from experience_buffer import errors, trxp
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.rank_batches import RankOf
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.store.interface import StoreFullError
from tests.refusing_store import Refusals
from tests.unit.buffer_verbs import sampled
from tests.unit.builders import World, begun, experience, push


def state(lease: Lease) -> str:
    return lease.state


async def part(
    buffer: Buffer, rank: int, *, after: int = 0, num_units: int = 2
) -> tuple[Lease | None, str]:
    rank_of = RankOf(rank=rank, world_size=2, after_lease_id=after)
    return await sampled(buffer, num_units, "c", rank_of=rank_of)


async def shared(buffer: Buffer, *, after: int = 0) -> Lease:
    lease, why = await part(buffer, 0, after=after)
    assert lease is not None, why
    return lease


@pytest.mark.parametrize("last_step", [None, 3, 5])
async def test_a_step_is_safe_before_the_last_rank_acks(
    world: World, last_step: int | None
) -> None:
    buffer = await world.holding(push((0, 0), (0, 1), (0, 2), (0, 3)), consumers=[{"name": "c"}])
    first = await shared(buffer)
    second = await shared(buffer, after=first.id)
    await buffer.ack(first.id, step=5, rank=0)
    for rank in (0, 1):
        await buffer.ack(second.id, step=7, rank=rank)
    consumer = buffer.state.consumer("c")
    await buffer.flow.timelines.declare_safe(consumer, 7)
    with pytest.raises(errors.WrongStateError, match="not after the safe step 7"):
        await buffer.ack(first.id, step=6, rank=1)
    assert state(first) == "open"
    await buffer.ack(first.id, step=last_step, rank=1)
    assert state(first) == "acked"
    assert (len(buffer.state.contents), consumer.timeline.num_retained) == (0, 0)


async def test_a_later_step_of_the_last_rank_is_retained(world: World) -> None:
    buffer = await world.holding(push((0, 0), (0, 1)), consumers=[{"name": "c"}])
    lease = await shared(buffer)
    await buffer.ack(lease.id, step=5, rank=0)
    await buffer.ack(lease.id, step=6, rank=1)
    assert buffer.state.consumer("c").timeline.last_step == 6
    assert len(buffer.state.contents) == 2


async def test_a_part_that_is_returned_while_its_ack_is_stored(world: World) -> None:
    buffer = await world.holding(push((0, 0), (0, 1)), consumers=[{"name": "c"}])
    lease = await shared(buffer)
    ack = await begun(buffer.ack(lease.id, rank=0))
    await buffer.nack(lease.id, reason="the other rank died")
    with pytest.raises(errors.LeaseNotFoundError, match="was nacked"):
        await ack


async def test_a_refused_ack_of_a_part_does_not_count(world: World) -> None:
    buffer = await world.holding(push((0, 0), (0, 1)), consumers=[{"name": "c"}])
    lease = await shared(buffer)
    Refusals(world.store).num_next = 1
    with pytest.raises(StoreFullError):
        await buffer.ack(lease.id, rank=0)
    again, _ = await part(buffer, 0)
    assert again is lease
    await buffer.ack(lease.id, rank=1)
    assert state(lease) == "open"
    await buffer.ack(lease.id, rank=0)
    assert state(lease) == "acked"


async def test_a_batch_that_is_being_acknowledged_is_not_given_again(world: World) -> None:
    buffer = await world.holding(push((0, 0), (0, 1), (0, 2)), consumers=[{"name": "c"}])
    lease = await shared(buffer)
    await buffer.ack(lease.id, rank=0)
    ack = await begun(buffer.ack(lease.id, rank=1))
    assert lease.state == "ending"
    following, why = await part(buffer, 1)
    assert following is not None, why
    assert (following.id, following.num_units) == (lease.id + 1, 1)
    await ack


async def test_a_batch_that_was_returned_before_it_was_sent(world: World) -> None:
    buffer = await world.holding(push((0, 0), (0, 1)), consumers=[{"name": "c"}])
    call = await begun(part(buffer, 0, num_units=3))
    await buffer.rewind("c", -1)
    lease, why = await call
    assert lease is None
    assert "returned before it was sent" in why


async def test_a_rank_is_told_the_same_of_its_part_after_a_restart(world: World) -> None:
    """It weighs what it learns from by the probability, and splits frames by the bytes."""
    staleness = {"max_lag": 1, "on_stale": "mark"}
    reader = {"name": "c", "selector": {"kind": "prioritized", "seed": 3}, "staleness": staleness}
    buffer = await world.create(consumers=[reader])
    infos = [{"priority": 3.0, "model_version": 0}, {"priority": 7.0, "model_version": 5}]
    pushed = [experience(0, run, info=info) for run, info in enumerate(infos)]
    await buffer.push(Push(payloads=[trxp.encode(pushed)], tombstones=[], group_size=0))
    buffer.row.policy_version = 5
    lease = await shared(buffer)
    told = [dataclasses.astuple(unit) for unit in lease.units]
    assert {(unit.stale, unit.probability < 1) for unit in lease.units} == {
        (unit.seqs == (1,), unit is lease.units[0]) for unit in lease.units
    }
    await buffer.ack(lease.id, rank=0)
    for _ in range(2):
        buffer = await world.restart(buffer)
        again, _ = await part(buffer, 1)
        assert again is not None
        assert [dataclasses.astuple(unit) for unit in again.units] == told
        await buffer.extend(again.id, 1000.0)


async def test_a_rank_that_goes_once_its_batch_is_stored_leaves_it_to_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await world.holding(push((0, 0), (0, 1)), consumers=[{"name": "c"}])
    asking = asyncio.ensure_future(part(buffer, 0))
    granted, leases = buffer.flow.leasing._granted, list[Lease]()

    def stored_and_gone(lease: Lease) -> None:
        granted(lease)
        leases.append(lease)
        asking.cancel()

    monkeypatch.setattr(buffer.flow.leasing, "_granted", stored_and_gone)
    with pytest.raises(asyncio.CancelledError):
        await asking
    lease, _ = await part(buffer, 1)
    assert [lease] == leases
