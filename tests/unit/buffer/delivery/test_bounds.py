"""Bounds of deliveries: messages and their size, limiters that change, ranks, work per call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from experience_buffer import errors
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.rank_batches import RankOf
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.rpc import batch_assembly
from experience_buffer_server.rpc.batch_assembly import Unreadable
from tests.unit.buffer_verbs import change, consume, leased, of_version, pushed, sampled
from tests.unit.builders import World, begun, push, settings, settle, uid
from tests.unit.sample_calls import called, frame_of, granting, serving
from tests.unit.work import counted_comparisons, counted_lines

# --- messages

LONG = {"grpo": {"advantage": {"estimator": "grpo"}}, "plain": {}}


async def pushed_long(world: World, config: dict[str, Any], num_tokens: int) -> Buffer:
    """8 groups of 2 experiences with responses of some length, ready to be sampled."""
    buffer = await world.computing(group_size=2, **config)
    for task in range(8):
        tokens, logprobs = torch.arange(3 + num_tokens), -torch.rand(num_tokens)
        await buffer.push(pushed((task, 0), (task, 1), tokens=tokens, logprobs=logprobs))
    await settle(buffer)
    return buffer


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("num_tokens", [1, 7, 2000])
async def test_units_take_no_more_than_estimated(world: World, kind: str, num_tokens: int) -> None:
    buffer = await pushed_long(world, LONG[kind], num_tokens)
    units = (await leased(buffer, 16)).units
    most = sum(unit.message_bytes for unit in units)
    response = service_pb2.SampleResponse()
    unreadable = Unreadable()

    def join(experiences: Sequence[batch_assembly.Sampled]) -> None:
        for rest, pieces, num_bytes in experiences:
            message = types_pb2.SampledExperience.FromString(rest)
            message.payload = b"".join(pieces)
            assert len(message.payload) == num_bytes
            response.experiences.append(message)

    batch_assembly.sampled(world.store, buffer, units, unreadable, join)
    in_columns = len(batch_assembly.packed(world.store, buffer, units, unreadable, b"".join))
    assert not unreadable
    assert max(response.ByteSize(), in_columns) <= most
    excess = most - response.ByteSize()
    assert excess <= 0.05 * most + 16 * 700, "a batch isn't cut much earlier than need be"


async def test_a_batch_is_cut_where_its_message_is_full(world: World) -> None:
    buffer = await pushed_long(world, LONG["grpo"], 2000)
    stored = buffer.num_bytes
    lease = await leased(buffer, 16, max_bytes=stored)
    assert lease.num_bytes < stored
    assert sum(unit.message_bytes for unit in lease.units) <= stored
    assert lease.num_bytes == sum(
        entry.record.payload_bytes
        for unit in lease.units
        for entry in buffer.state.contents.by_seqs(unit.seqs)
    )


async def test_what_the_server_could_not_send_is_not_blamed(world: World) -> None:
    buffer = await world.holding(push((1, 0)), consumers=[{"name": "trainer", "max_deliveries": 1}])
    consumer = buffer.state.consumers["trainer"]
    for _ in range(3):
        lease = await leased(buffer, 1)
        assert lease.units[0].num_deliveries == 1
        buffer.give_back([lease.id], "undeliverable")
        await buffer.drain()
    assert (len(consumer.ready), consumer.num_redelivered) == (1, 0)
    buffer = await world.restart(buffer)
    assert (await leased(buffer, 1)).units[0].num_deliveries == 1


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_lost_payload_quarantines_nobody(world: World, streaming: bool) -> None:
    """It alone is set aside; what was leased with it is delivered, for the first time."""
    backend, buffer = await serving(world, push((1, 0), (1, 1), (1, 2)))
    batch = world.store.batch()
    batch.remove(buffer.id, next(iter(buffer.state.contents)).record)
    await world.store.commit(batch)
    asked = {"batch_size": 8, "min_batch_size": 1, "timeout_seconds": 0.001}
    stream = granting(backend, 1, **asked)
    answer = await (frame_of(stream) if streaming else called(backend, **asked))
    await buffer.drain()
    assert [one.uid for one in answer.experiences] == [uid(1, 1), uid(1, 2)]
    assert [one.num_deliveries for one in answer.experiences] == [1, 1]
    assert answer.num_units == 2
    assert answer.shortfall.endswith("; 1 more was set aside: damaged on the disk")
    consumer = buffer.state.consumers["trainer"]
    assert (len(consumer.ready), consumer.num_leased) == (0, 2)
    assert consumer.quarantined == {}
    await stream.aclose()


async def test_a_unit_too_large_for_a_message_is_not_quarantined(world: World) -> None:
    backend, buffer = await serving(world)
    backend.limits = world.limits.model_copy(update={"max_message_bytes": 65_536})
    buffer = buffer
    await buffer.push(pushed((1, 0), info={"text": "z" * 70_000}))
    with pytest.raises(errors.ResourceExhaustedError, match="one item takes"):
        await called(backend)
    await buffer.drain()
    assert not buffer.state.consumers["trainer"].quarantined
    assert await frame_of(granting(backend, 1))


# --- a limiter that changes


def limited(samples_per_insert: float | None, **changes: Any) -> dict[str, Any]:
    limiter = {"samples_per_insert": samples_per_insert, "min_diff": -16, "max_diff": 16}
    replay = {"replay": True, "max_times_sampled": 4}
    return {"name": "trainer", "limiter": limiter if samples_per_insert else None} | (
        changes or replay
    )


def difference(buffer: Buffer) -> float:
    consumer = buffer.state.consumers["trainer"]
    counts = consumer.counts()
    return counts.inserts * (consumer.settings.samples_per_insert or 0.0) - counts.samples


async def with_a_past(world: World) -> Buffer:
    """24 units came, were sampled 4 times each, and left."""
    buffer = await world.create(consumers=[limited(4)])
    for task in range(6):
        await buffer.push(push(*((task, run) for run in range(4))))
        for _ in range(4):
            await consume(buffer, 4)
    assert len(buffer.state.contents) == 0
    tally = buffer.state.consumers["trainer"].tally
    assert (tally.departed_inserts, tally.departed_samples) == (24, 96)
    return buffer


@pytest.mark.parametrize("ratios", [[2], [1], [None, 2], [None, 4]])
async def test_another_ratio_judges_no_past(world: World, ratios: list[float | None]) -> None:
    buffer = await with_a_past(world)
    for ratio in ratios:
        await change(buffer, consumers=[limited(ratio)])
        await buffer.drain()
    for _ in range(2):
        assert difference(buffer) == 0
        buffer = await world.restart(buffer)
    await buffer.push(push((9, 0), (9, 1), (9, 2), (9, 3)))
    assert len((await leased(buffer, 4)).units) == 4


async def test_the_same_ratio_goes_on_counting(world: World) -> None:
    buffer = await with_a_past(world)
    await change(buffer, consumers=[limited(4) | {"max_deliveries": 3}])
    assert buffer.state.consumers["trainer"].tally.departed_samples == 96


async def test_what_is_consumed_and_kept_for_others_is_the_past(world: World) -> None:
    other = {"name": "other"}
    trainer = limited(1, max_deliveries=0)
    buffer = await world.holding(push((1, 0), (1, 1), (1, 2), (1, 3)), consumers=[trainer, other])
    await consume(buffer, 4)
    await buffer.push(push((2, 0)))
    await change(buffer, consumers=[limited(0.5, max_deliveries=0), other])
    await buffer.drain()
    assert difference(buffer) == 0.5
    buffer = await world.restart(buffer)
    assert difference(buffer) == 0.5
    await consume(buffer, 4, "other")
    assert len(buffer.state.contents) == 1
    assert difference(buffer) == 0.5
    assert difference(await world.restart(buffer)) == 0.5


async def test_what_leaves_while_a_limiter_comes_is_not_counted_for_ever(world: World) -> None:
    once = {"max_times_sampled": 1}
    buffer = await world.holding(push((1, 0)), consumers=[limited(None) | once])
    ack = await begun(buffer.ack((await leased(buffer, 1)).id))
    (new,) = settings(consumers=[limited(0.5) | once]).consumers
    assert buffer.flow.offers.change_consumer(new)
    buffer._changing._count_anew(buffer.state.consumers["trainer"])
    await ack
    await buffer.drain()
    assert len(buffer.state.contents) == 0
    assert difference(buffer) == 0


# --- acks, ranks


async def test_no_step_is_too_early_for_a_consumer_that_was_removed(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)), consumers=["actor", "critic"])
    await consume(buffer, 1, "actor", step=5)
    await buffer.flow.timelines.declare_safe(buffer.state.consumers["actor"], 5)
    assert buffer.flow.acks._problem_with("actor", 3)
    await buffer.change_settings(settings(consumers=["critic"]))
    assert not buffer.flow.acks._problem_with("actor", 3)


async def test_a_lease_of_another_life_of_the_buffer_counts_as_none(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1), (1, 2), (1, 3)))
    first, second = [
        await leased(buffer, 2, rank_of=RankOf(rank=rank, world_size=2, after_lease_id=77))
        for rank in (0, 1)
    ]
    assert second is first
    later = await leased(buffer, 2, rank_of=RankOf(rank=1, world_size=2, after_lease_id=first.id))
    assert later is not first


# --- what is too stale


@pytest.mark.parametrize("holds", ["lease", "step"])
async def test_a_stale_group_leaves_as_a_whole_or_not_at_all(world: World, holds: str) -> None:
    window = {"max_lag": 1, "on_stale": "drop"}
    consumers = [
        {"name": "actor", "unit": "group", "staleness": window},
        {"name": "critic", "unit": "group"},
        {"name": "log"},
    ]
    buffer = await world.create(group_size=4, consumers=consumers)
    await buffer.push(of_version(0, *((1, run) for run in range(4))))
    lease = await leased(buffer, 1, "log")
    if holds == "step":
        await buffer.ack(lease.id, step=3)
    buffer.row.policy_version = 5
    assert (await sampled(buffer, 1, "actor", timeout_seconds=0.0))[0] is None
    await buffer.drain()
    got = await leased(buffer, 1, "critic")
    assert got.num_experiences == 4
    assert (await sampled(buffer, 1, "actor", timeout_seconds=0.0))[0] is None


# --- work


async def test_dropping_what_is_stale_takes_work_in_proportion(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await world.holding(push((1, 0)))
    (entry,) = buffer.state.contents
    await leased(buffer)
    units = [[Entry(entry.record, None, durable=True)] for _ in range(200)]
    compared = counted_comparisons(monkeypatch, Entry)
    with counted_lines() as lines:
        assert buffer.flow.drop_stale(units, "trainer") == units
    assert compared.num + lines.num < 50 * len(units)
