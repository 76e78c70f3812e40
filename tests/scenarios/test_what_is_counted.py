"""Counts that must not drift: what waits, what was dropped, what the running moments hold."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from experience_buffer import trxp
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.store.interface import StoreFullError
from tests.unit.buffer.intake.test_annotate import annotate
from tests.unit.buffer_verbs import leased, unlooked_at
from tests.unit.builders import World, experience, push, settings, settle, uid

pytestmark = pytest.mark.on_disk


def pushed(run: int, version: int = 1, **fields: Any) -> Push:
    info = {"model_version": version}
    return Push(payloads=[trxp.encode([experience(1, run, info=info, **fields)])])


async def take(buffer: Buffer, count: int, consumer: str) -> int:
    """The lease of so many units and no fewer."""
    return (await leased(buffer, count, consumer, min_batch_size=count)).id


@pytest.mark.parametrize("how", ["held", "quarantined"])
async def test_what_nobody_can_sample_is_not_ahead(world: World, how: str) -> None:
    actor = {"name": "actor", "max_deliveries": 1, "limiter": {"max_ahead_bytes": 3000}}
    buffer = await world.create(group_by="none", consumers=[actor])
    await buffer.publish(1)
    for run in range(4):
        await buffer.push(pushed(run, 2 if how == "held" else 1))
    if how == "quarantined":
        await buffer.nack(await take(buffer, 4, "actor"), reason="x")
    await buffer.drain()
    consumer = buffer.state.consumers["actor"]
    assert len(consumer.held) + len(consumer.quarantined) == 4
    for run in range(10, 14):
        await buffer.push(pushed(run))
    await take(buffer, 4, "actor")


async def test_what_was_consumed_and_is_due_is_consumed_though_others_hold_it(world: World) -> None:
    buffer = await world.create(
        group_by="none",
        consumers=["actor", "critic"],
        retention={"max_lag": 0},
        pacing={"consumer": "actor", "max_staleness": 0, "batch_size": 2},
    )
    await buffer.publish(0)
    for run in range(2):
        await buffer.push(pushed(run, 0))
    lease_id = await take(buffer, 2, "actor")
    await take(buffer, 2, "critic")
    await buffer.publish(1)
    await buffer.ack(lease_id)
    await buffer.drain()
    for place in (buffer, await world.restart(buffer)):
        assert len(place.state.consumers["actor"].finished) == 2


async def test_a_group_that_is_dropped_again_is_counted_once(world: World) -> None:
    buffer = await world.create(group_size=4, consumers=[{"name": "trainer", "raw": True}])
    await buffer.push(push(*((1, run) for run in range(4))))
    await take(buffer, 2, "trainer")
    (group,) = buffer.state.contents.groups
    for _ in range(3):
        await buffer.drop(group.row.key, "aborted")
    text = world.metrics.registry.get_sample_value(
        "experience_buffer_dropped_experiences_total",
        {"buffer": buffer.name, "reason": "group_dropped"},
    )
    assert text == 4


async def test_quarantined_experiences_without_groups_are_counted(world: World) -> None:
    buffer = await world.computing(group_by="none", advantage={"estimator": "reinforce"})
    bad = torch.full((7,), float("nan"))
    with unlooked_at():
        await buffer.push(pushed(0, token_level_reward=bad))
    await settle(buffer)
    assert buffer.stats().num_quarantined_groups == len(buffer.state.contents.quarantined) == 1


@pytest.mark.parametrize("restarts", [False, True])
async def test_rewards_that_no_moments_have_counted_are_counted_when_computed_again(
    world: World, restarts: bool
) -> None:
    rloo: dict[str, Any] = {"group_size": 2, "advantage": {"estimator": "rloo"}}
    buffer = await world.computing(**rloo)
    await buffer.push(push((1, 0), (1, 1)))
    await settle(buffer)
    await buffer.change_settings(
        settings(group_size=2, advantage={"estimator": "rloo", "running_norm": "std"})
    )
    if restarts:
        buffer = await world.restart(buffer)
    await annotate(buffer, uid(1, 0), reward=9.0)
    await settle(buffer)
    assert '"count": 2' in buffer.row.moments


async def test_moments_that_found_no_room_are_taken_back_from_the_disk(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = {"estimator": "rloo", "running_norm": "std"}
    buffer = await world.computing(group_size=2, advantage=running)
    refused = asyncio.Event()

    async def ride(batch: Any) -> None:
        # Somebody stores the row while this is under way.
        await buffer.publish(3)
        refused.set()
        raise StoreFullError("full")

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "ride", ride)
        await buffer.push(push((1, 0), (1, 1)))
        await asyncio.wait_for(refused.wait(), 60)
        await asyncio.sleep(0)
    assert buffer.row.moments == ""
    await buffer.drain()
    (state,) = world.store.load()
    assert state.row.moments == ""


async def test_what_was_dropped_while_another_holds_it_keeps_no_push_out(world: World) -> None:
    actor = {"name": "actor", "unit": "item", "limiter": {"min_diff": 0, "max_diff": 4}}
    trainer = {"name": "trainer", "unit": "group"}
    pacing = {"consumer": "actor", "max_staleness": 1, "batch_size": 2}
    buffer = await world.create(group_size=4, consumers=[actor, trainer], pacing=pacing)
    await buffer.push(push(*((1, run) for run in range(4))))
    await take(buffer, 1, "trainer")
    await buffer.drop("2/1", "aborted")
    assert len(buffer.state.contents) == 4  # Until that lease ends.
    admitted = buffer.flow.pacing.reserve(["2/2"], now=0.0, ttl_seconds=9.0)
    assert admitted.granted == ["2/2"]
    await buffer.push(push(*((2, run) for run in range(4))))
    await take(buffer, 4, "actor")
