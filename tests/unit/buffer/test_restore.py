"""What a crash leaves between a change and what follows from it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from experience_buffer import errors
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.batch_picking import unit_of
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.store.interface import (
    ConsumerRow,
    LeaseRow,
    ProgressRow,
    StoreFullError,
    WriteBatch,
)
from experience_buffer_server.store.lmdb.disk.format import Table, numbered_key, payload_key
from tests.damaging import flip, flip_key
from tests.models.buffer_port import payload
from tests.refusing_store import Refusals
from tests.unit.buffer_verbs import consume, entry_of, leased, sampled, take
from tests.unit.builders import World, push, settings, settle, uid

pytestmark = pytest.mark.on_disk


async def crash_after(world: World, buffer: Buffer, **changes: Any) -> Buffer:
    """Restart with other settings, whose row alone got to the disk."""
    buffer.row.config = settings(**changes).model_dump_json()
    batch = world.store.batch()
    batch.put_buffer(buffer.row)
    await world.store.commit(batch)
    fresh = await world.restart(buffer)
    await fresh.drain()
    return fresh


async def test_what_only_a_removed_consumer_wanted_leaves_at_the_start(world: World) -> None:
    buffer = await world.holding(push((0, 0)), consumers=["actor", "critic"], max_items=1)
    await consume(buffer, 1, "actor")
    await take(buffer, 1, "critic")
    buffer = await crash_after(world, buffer, consumers=["actor"], max_items=1)
    assert len(buffer.state.contents) == 0
    (outcome,) = await buffer.push(push((1, 1)))
    assert outcome.status.value == "stored"


async def test_a_lease_of_a_consumer_that_is_gone_has_ended(world: World) -> None:
    buffer = await world.holding(push((0, 0)), consumers=["actor", "critic"])
    lease = await take(buffer, 1, "critic")
    fresh = await crash_after(world, buffer, consumers=["actor"])
    for now in (fresh, await world.restart(fresh)):
        assert len(now.state.leases) == 0
        with pytest.raises(errors.LeaseNotFoundError, match="was nacked"):
            await now.ack(lease, step=3)
    (row,) = next(iter(world.store.load())).leases
    assert (row.state, row.units) == ("nacked", [])


@pytest.mark.parametrize(("before", "after"), [("item", "group"), ("group", "item")])
async def test_leases_of_other_units_have_ended(world: World, before: str, after: str) -> None:
    consumer = {"name": "actor", "unit": before}
    buffer = await world.holding(push((0, 0), (0, 1)), group_size=2, consumers=[consumer])
    leases = [await take(buffer, 1, "actor") for _ in range(2 if before == "item" else 1)]
    new = {"name": "actor", "unit": after}
    buffer = await crash_after(world, buffer, group_size=2, consumers=[new])
    for lease in leases:
        with pytest.raises(errors.LeaseNotFoundError):
            await buffer.ack(lease)
    assert len(buffer.state.consumer("actor").ready) == (2 if after == "item" else 1)
    await consume(buffer, 2, "actor")
    assert len(buffer.state.contents) == 0


@pytest.mark.parametrize("end", ["ack", "nack", "expire"])
async def test_a_unit_belongs_to_its_newest_lease(world: World, end: str) -> None:
    buffer = await world.holding(push((0, 0), (0, 1)))
    newest = await take(buffer, lease_seconds=500.0)
    batch = world.store.batch()
    for number, units in enumerate([[[1], [2]], [[2]]], 1):
        row = LeaseRow(
            id=newest + number,
            consumer="trainer",
            units=units,
            deadline=time.time() + 900,
            num_experiences=len(units),
        )
        batch.put_lease(buffer.id, row)
    await world.store.commit(batch)
    buffer = await world.restart(buffer)
    trainer = buffer.state.consumer("trainer")
    held = {lease.id: [unit.key for unit in lease.units] for lease in trainer.leases.values()}
    assert held == {newest + 1: [1], newest + 2: [2]}
    assert (trainer.num_leased, trainer.num_leased_experiences) == (2, 2)
    for lease in held:
        if end == "ack":
            await buffer.ack(lease)
        elif end == "nack":
            await buffer.nack(lease, reason="no use")
    if end == "expire":
        await settle(buffer, after=1000)
    assert (trainer.num_leased, trainer.num_leased_experiences, trainer.out) == (0, 0, {})
    assert len(buffer.state.contents) == len(trainer.ready) == (0 if end == "ack" else 2)


async def test_repeats_within_a_lease_are_one_unit(world: World) -> None:
    replay = {"name": "actor", "replay": True, "with_replacement": True, "selector": "uniform"}
    buffer = await world.holding(push((0, 0)), consumers=[replay])
    lease = await take(buffer, 3, "actor")
    actor = (buffer := await world.restart(buffer)).state.consumer("actor")
    assert [unit.key for unit in actor.leases[lease].units] == [1, 1, 1]
    await buffer.ack(lease)
    assert (len(actor.ready), actor.out, actor.num_leased) == (1, {}, 0)


async def test_progress_of_nothing_is_no_progress_of_what_comes_next(world: World) -> None:
    buffer = await world.holding(push((0, 0)), consumers=["actor", "critic"])
    batch: WriteBatch = world.store.batch()
    batch.put_progress(buffer.id, ProgressRow(seq=2, acked=["actor"]))
    batch.put_consumer(buffer.id, ConsumerRow(name="ghost", safe_step=7))
    await world.store.commit(batch)
    buffer = await world.restart(buffer)
    await buffer.drain()
    state = next(iter(world.store.load()))
    assert (state.progress, state.consumers) == ([], [])
    await buffer.push(push((0, 1)))
    assert buffer.state.contents.by_uid(uid(0, 1)) is buffer.state.contents.by_seq(2)
    buffer = await world.restart(buffer)
    assert len(buffer.state.consumer("actor").ready) == 2


async def test_a_unit_of_another_lease_is_left_alone(world: World) -> None:
    """Whatever rows say: who gives a unit back that isn't its any more takes it from nobody."""
    buffer = await world.holding(push((0, 0)))
    lease = await take(buffer)
    trainer = buffer.state.consumer("trainer")
    (unit,) = trainer.leases[lease].units
    other = trainer.out[unit.key] = unit_of(
        buffer.state, unit.key, buffer.state.contents.members_of(trainer.settings, unit.key)
    )
    await buffer.nack(lease, reason="no use")
    assert trainer.out == {unit.key: other}
    assert len(trainer.ready) == 0


async def test_a_group_knows_after_a_restart_whether_members_were_consumed(world: World) -> None:
    consumer = {"name": "actor", "raw": True}
    buffer = await world.holding(push((0, 0), (1, 0)), group_size=3, consumers=[consumer])
    await consume(buffer, 1, "actor")
    await buffer.push(push((0, 1), (0, 2), (1, 1), (2, 0), dead=[(1, 2), (2, 1), (2, 2)]))
    dead = entry_of(buffer, 1, 2)
    await buffer.delete([dead])
    await consume(buffer, 1, "actor")
    for place in (buffer, await world.restart(buffer)):
        groups = {group.row.key: group for group in place.state.contents.groups}
        found = {key: (group.has_consumed, group.describe()) for key, group in groups.items()}
        assert found == {
            "2/0": (False, "3 of 3"),
            "2/1": (True, "1 of 2"),
            "2/2": (False, "3 of 3"),
        }


@pytest.mark.parametrize("restarts", [False, True])
async def test_what_a_changed_limiter_does_not_count_leaves_without_a_trace(
    world: World, restarts: bool
) -> None:
    limiter = {"min_diff": 0, "max_diff": 100}
    once: dict[str, Any] = {"name": "actor", "limiter": {**limiter, "samples_per_insert": 1}}
    often: dict[str, Any] = {"replay": True, "max_times_sampled": 4}
    often |= {"name": "actor", "limiter": {**limiter, "samples_per_insert": 4}}
    buffer = await world.holding(push((0, 0), (0, 1), (0, 2)), consumers=[once, "critic"])
    for _ in range(3):
        await consume(buffer, 1, "actor")
    await buffer.change_settings(settings(consumers=[often, "critic"]))
    await buffer.drain()
    if restarts:
        buffer = await world.restart(buffer)
    assert buffer.state.consumers["actor"].counts().inserts == 0
    await buffer.delete(list(buffer.state.contents))
    await buffer.push(push((1, 0)))
    counts = buffer.state.consumers["actor"].counts()
    assert (counts.inserts, counts.samples) == (1, 0)


async def test_what_was_used_up_is_not_passed_over_when_more_is_allowed(world: World) -> None:
    """It counts as sampled; what was passed over counts as if it hadn't come."""
    limiter = {"samples_per_insert": 2, "min_diff": 0, "max_diff": 100}
    actor: dict[str, Any] = {"name": "actor", "replay": True, "limiter": limiter}
    actor["staleness"] = {"max_lag": 1, "on_stale": "keep"}
    lenient: dict[str, Any] = {"on_missing_version": "deliver"}
    buffer = await world.create(consumers=[actor | {"max_times_sampled": 2}, "critic"], **lenient)
    await buffer.push(push((0, 0), (0, 1)))
    for _ in range(2):
        await consume(buffer, 2, "actor")
    await buffer.push(Push(payloads=[payload([(1, 0, 3)])]))
    buffer.row.policy_version = 9
    assert (await sampled(buffer, 1, "actor"))[0] is None
    consumers = [actor | {"max_times_sampled": 4}, "critic"]
    await buffer.change_settings(settings(consumers=consumers, **lenient))
    await buffer.drain()
    counts = buffer.state.consumers["actor"].counts()
    assert (counts.inserts, counts.deletes, counts.samples) == (2, 0, 4)
    for _ in range(2):
        buffer = await world.restart(buffer)
        assert buffer.state.consumers["actor"].counts() == counts


@pytest.mark.parametrize("order", ["rewind, restart", "restart, rewind", "rewind", "fail, rewind"])
async def test_what_a_changed_limiter_did_not_count_counts_once_it_is_rewound(
    world: World, order: str
) -> None:
    limiter = {"min_diff": 0, "max_diff": 100}
    before: dict[str, Any] = {"name": "actor", "limiter": limiter}
    after = before | {"limiter": {**limiter, "samples_per_insert": 0.5}}
    buffer = await world.holding(push((0, 0), (0, 1)), consumers=[before, "critic"])
    await consume(buffer, 2, "actor", step=1)
    await buffer.change_settings(settings(consumers=[after, "critic"]))
    await buffer.drain()
    expected = (0, 0)
    for what in order.split(", "):
        if what == "restart":
            buffer = await world.restart(buffer)
        elif what == "fail":
            Refusals(world.store).num_next = 1
            with pytest.raises(StoreFullError):
                await buffer.rewind("actor", 0)
        else:
            await buffer.rewind("actor", 0)
            expected = (2, 0)
        counts = buffer.state.consumers["actor"].counts()
        assert (counts.inserts, counts.samples) == expected, what
    entries = list(buffer.state.contents)
    await buffer.delete(entries[:1])
    counts = buffer.state.consumers["actor"].counts()
    assert (counts.inserts, counts.deletes, counts.samples) == (1, 0, 0)
    assert (await world.restart(buffer)).state.consumers["actor"].counts() == counts


# --- damage

GROUPS: dict[str, Any] = {
    "group_by": "task",
    "group_size": 3,
    "consumers": [{"name": "trainer", "unit": "group"}],
}


@pytest.mark.parametrize("also", ["payload", "payload's key", "nothing"])
async def test_a_lost_member_is_missed_whatever_else_is_lost(world: World, also: str) -> None:
    buffer = await world.create(**GROUPS)
    for task in (1, 2):
        await buffer.push(push(*((task, run) for run in range(3))))
    await buffer.drain()
    await world.store.close()
    place = payload_key(1, uid(1, 1))
    flip(world.path, Table.RECORDS, numbered_key(1, 2))
    if also == "payload":
        flip(world.path, Table.PAYLOADS, place)
    elif also == "payload's key":
        flip_key(world.path, Table.PAYLOADS, place, byte=4, bit=0x01)
    await world.open()
    fresh = world.reload(buffer)
    damage = {group.row.key: group.damage for group in fresh.state.contents.groups}
    assert damage["2/2"] == ""
    if also == "payload's key":
        assert "can't be read back, nor what they were of" in damage["2/1"]
    else:
        assert f"the record of its member {uid(1, 1)!r} can't be read back" in damage["2/1"]
    lease = await leased(fresh, 2, timeout_seconds=0.05)
    assert [unit.seqs for unit in lease.units] == [(4, 5, 6)]
