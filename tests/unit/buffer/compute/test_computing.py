"""Batches with common statistics, running moments, and groups that have nothing to teach."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from experience_buffer import trxp
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.compute.worker import batch_id
from experience_buffer_server.buffer.intake.annotation import Annotation
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.rpc.batch_assembly import read_payload
from experience_buffer_server.runtime.child_process import Child
from tests.unit.buffer_verbs import change, entry_of, leased, push_and_settle, pushed, unlooked_at
from tests.unit.builders import NUM_RESPONSE, World, experience, settle, uid, until

BATCH: dict[str, Any] = {
    "group_size": 1,
    "advantage": {"estimator": "cpgd", "weight": "none", "batch_size": 3},
}
RUNNING: dict[str, Any] = {
    "group_size": 2,
    "advantage": {"estimator": "rloo", "running_norm": "std"},
}


def rewarded(rewards: Sequence[tuple[int, int, float]]) -> Push:
    """A push of (task, run, reward)."""
    return Push(
        payloads=[trxp.encode([experience(t, r, reward=reward) for t, r, reward in rewards])]
    )


def computed(world: World, buffer: Buffer, *tasks: int) -> dict[str, tuple[float, dict[str, Any]]]:
    """Per uid of these tasks, its first token's advantage and what was recorded."""
    found = {}
    for entry in buffer.state.contents:
        payload, row = read_payload(world.store, buffer, entry)
        if row is not None and int(entry.record.task) in tasks:
            advantages = trxp.decode(payload)[0].advantages
            assert advantages is not None
            # When it was computed is another time with every computation.
            details = {name: each for name, each in row.details.items() if name != "compute_time"}
            found[entry.record.uid] = (float(advantages[0]), details)
    return found


async def test_a_batch_is_computed_when_it_is_full(world: World) -> None:
    buffer = await world.computing(rewarded([(0, 0, 1.0), (1, 0, 2.0)]), **BATCH)
    await buffer.drain()
    assert not computed(world, buffer, 0, 1)
    assert "2 of 3 for a batch with common statistics" in buffer.flow.describe_wait()
    await push_and_settle(buffer, rewarded([(2, 0, 6.0)]))
    assert not buffer.flow.describe_wait()
    results = computed(world, buffer, 0, 1, 2)
    assert [advantage for advantage, _ in results.values()] == [-2.0, -1.0, 3.0]
    assert {recorded["batch_members"] for _, recorded in results.values()} == {3}


async def test_a_batch_that_does_not_fill_is_computed_after_a_while(world: World) -> None:
    buffer = await world.computing(rewarded([(0, 0, 1.0), (1, 0, 2.0)]), **BATCH)
    buffer.tick(time.time() + 9)
    assert buffer.flow.describe_wait()
    await settle(buffer, after=11)
    assert [a for a, _ in computed(world, buffer, 0, 1).values()] == [-0.5, 0.5]


async def test_members_that_left_or_settings_that_changed_leave_the_batch(world: World) -> None:
    buffer = await world.computing(rewarded([(0, 0, 1.0), (1, 0, 2.0)]), **BATCH)
    await buffer.delete([entry for entry in buffer.state.contents if entry.record.task == "0"])
    await buffer.push(rewarded([(2, 0, 6.0)]))
    await buffer.drain()
    await settle(buffer, after=11)
    assert [a for a, _ in computed(world, buffer, 0, 1, 2).values()] == [-2.0, 2.0]
    await buffer.push(rewarded([(3, 0, 5.0)]))
    await change(buffer, advantage={"estimator": "reinforce"})
    await settle(buffer)
    assert [a for a, _ in computed(world, buffer, 3).values()] == [5.0]


async def test_a_batch_is_full_of_what_still_holds(world: World) -> None:
    buffer = await world.computing(rewarded([(0, 0, 1.0), (1, 0, 2.0)]), **BATCH)
    # With task 2 it would be full, if these two were what they were.
    await buffer.annotate([Annotation(uid=uid(0, 0), reward=4.0)])
    await buffer.delete([entry for entry in buffer.state.contents if entry.record.task == "1"])
    assert "1 of 3" in buffer.flow.describe_wait()
    await buffer.push(rewarded([(2, 0, 6.0)]))
    await buffer.drain()
    assert "2 of 3 for a batch with common statistics" in buffer.flow.describe_wait()
    assert not computed(world, buffer, 0, 2)
    await push_and_settle(buffer, rewarded([(3, 0, 8.0)]))
    assert [a for a, _ in computed(world, buffer, 0, 2, 3).values()] == [-2.0, 0.0, 2.0]


async def test_a_batch_that_does_not_fill_has_what_was_annotated(world: World) -> None:
    buffer = await world.computing(rewarded([(0, 0, 1.0), (1, 0, 2.0)]), **BATCH)
    await buffer.annotate([Annotation(uid=uid(0, 0), reward=4.0)])
    await settle(buffer, after=11)
    assert [a for a, _ in computed(world, buffer, 0, 1).values()] == [1.0, -1.0]


async def test_a_group_of_a_batch_that_cannot_be_computed_leaves_the_others(world: World) -> None:
    buffer = await world.computing(**BATCH)
    with unlooked_at():
        await buffer.push(pushed((5, 0), token_level_reward=[float("nan")] * NUM_RESPONSE))
    await push_and_settle(buffer, rewarded([(0, 0, 1.0), (1, 0, 2.0)]))
    assert [a for a, _ in computed(world, buffer, 0, 1).values()] == [-0.5, 0.5]
    assert [bool(entry.quarantine) for entry in buffer.state.contents] == [True, False, False]


def ids(world: World, buffer: Buffer, *tasks: int) -> list[str]:
    """What was recorded of the statistics batch of run 0 of these tasks."""
    found = computed(world, buffer, *tasks)
    return [found[uid(task, 0)][1]["batch_id"] for task in tasks]


async def test_members_of_batches_are_recorded_where_they_share_a_launch(world: World) -> None:
    buffer = await world.create(**BATCH)
    # The second batch has a member that can't be computed: it shared nothing.
    await buffer.push(rewarded([(task, 0, float(task)) for task in range(5)]))
    with unlooked_at():
        await buffer.push(pushed((5, 0), token_level_reward=[float("nan")] * NUM_RESPONSE))
    world.computer.start()
    await settle(buffer)
    first = batch_id(uid(task, 0) for task in (0, 1, 2))
    second = batch_id(uid(task, 0) for task in (4, 3))
    assert first != second
    assert ids(world, buffer, 0, 1, 2, 3, 4) == [first] * 3 + [second] * 2
    fresh = await world.restart(buffer)
    assert ids(world, fresh, 0, 1, 2, 3, 4) == [first] * 3 + [second] * 2


async def test_what_is_computed_again_is_recorded_with_its_new_batch(world: World) -> None:
    buffer = await world.computed(rewarded([(task, 0, float(task)) for task in range(3)]), **BATCH)
    (before,) = set(ids(world, buffer, 0, 1, 2))
    await buffer.annotate([Annotation(uid=uid(1, 0), reward=7.0)])
    await push_and_settle(buffer, rewarded([(3, 0, 5.0), (4, 0, 6.0)]))
    after = batch_id(uid(task, 0) for task in (1, 3, 4))
    assert ids(world, buffer, 0, 1, 2, 3, 4) == [before, after, before, after, after]


async def test_without_statistics_of_a_batch_none_is_recorded(world: World) -> None:
    buffer = await world.computing(group_size=1, advantage={"estimator": "reinforce"})
    await push_and_settle(buffer, rewarded([(0, 0, 1.0)]))
    assert "batch_id" not in computed(world, buffer, 0)[uid(0, 0)][1]


async def test_moments_do_not_depend_on_pushes_launches_or_restarts(world: World) -> None:
    rewards = [
        (task, run, float((7 * task + 3 * run) % 5)) for task in range(6) for run in range(2)
    ]
    buffer = await world.create(1, **RUNNING)
    await buffer.push(rewarded(rewards))
    world.computer.start()
    await settle(buffer)
    at_once = computed(world, buffer, *range(6))
    assert len(at_once) == 12
    other = await world.create(2, **RUNNING)
    for position in range(0, 6, 2):
        await push_and_settle(other, rewarded(rewards[position : position + 2]))
    fresh = await world.restart(other)
    assert fresh.row.moments == other.row.moments
    for position in range(6, 12):
        await push_and_settle(fresh, rewarded(rewards[position : position + 1]))
    assert computed(world, fresh, *range(6)) == at_once
    assert json.loads(fresh.row.moments) == json.loads(buffer.row.moments)
    assert at_once[uid(5, 1)][1]["running_count"] == 12


async def test_a_withheld_group_is_not_counted_again_after_a_crash(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    advantage = RUNNING["advantage"] | {"zero_variance": "withhold"}
    buffer = await world.computing(**RUNNING | {"advantage": advantage})

    async def crash(*_: object) -> int:
        return 0

    monkeypatch.setattr(buffer.flow.grouping, "_drop", crash)
    await push_and_settle(buffer, rewarded([(0, 0, 3.0), (0, 1, 3.0)]))
    moments = buffer.row.moments
    assert moments
    fresh = await world.restart(buffer)
    await settle(fresh)
    assert fresh.row.moments == moments
    assert len(fresh.state.contents) == 0


async def test_a_group_that_is_computed_again_is_not_counted_again(world: World) -> None:
    buffer = await world.computed(rewarded([(0, 0, 1.0), (0, 1, 3.0)]), **RUNNING)
    moments = buffer.row.moments
    await buffer.annotate([Annotation(uid=uid(0, 0), reward=5.0)])
    await settle(buffer)
    assert buffer.row.moments == moments
    fresh = await world.restart(buffer)
    await fresh.annotate([Annotation(uid=uid(0, 1), reward=7.0)])
    await settle(fresh)
    assert fresh.row.moments == moments
    assert computed(world, fresh, 0)[uid(0, 0)][1]["running_count"] == 2


@pytest.mark.parametrize("policy", ["keep", "mask", "withhold"])
async def test_groups_without_variance(world: World, policy: str) -> None:
    estimator = {"estimator": "grpo", "zero_variance": policy}
    buffer = await world.computing(group_size=2, advantage=estimator)
    await push_and_settle(buffer, rewarded([(0, 0, 0.3), (0, 1, 0.3), (1, 0, 0.0), (1, 1, 1.0)]))
    queue = buffer.state.consumers["trainer"].ready
    if policy == "withhold":
        assert len(queue) == 2
        (late,) = await buffer.push(rewarded([(0, 2, 0.3)]))
        assert "zero variance" in late.message or late.reason == "late"
        (again,) = await buffer.push(rewarded([(0, 0, 0.3)]))
        assert again.status == "duplicate"
        return
    assert len(queue) == 4
    entry = entry_of(buffer, 0, 0)
    payload, row = read_payload(world.store, buffer, entry)
    assert row is not None
    assert row.details["zero_variance"] is True
    mask = trxp.decode(payload)[0].action_mask
    assert mask is not None
    assert int(mask.sum()) == (0 if policy == "mask" else NUM_RESPONSE)
    # What was pushed is stored as it was.
    stored = world.store.payloads(buffer.id, [uid(0, 0)])[0]
    assert stored == trxp.encode([experience(0, 0, reward=0.3)])


async def test_a_leased_group_of_a_raw_consumer_is_withheld_too(world: World) -> None:
    consumers = [{"name": "scorer", "raw": True}, {"name": "trainer"}]
    estimator = {"estimator": "grpo", "zero_variance": "withhold"}
    buffer = await world.create(group_size=2, advantage=estimator, consumers=consumers)
    await buffer.push(rewarded([(0, 0, 0.3), (0, 1, 0.3)]))
    lease = await leased(buffer, 2, "scorer")
    world.computer.start()
    await settle(buffer)
    assert len(buffer.state.contents) == 2
    await buffer.ack(lease.id)
    await buffer.drain()
    assert len(buffer.state.contents) == 0


async def test_what_is_being_computed_is_no_reason_to_say_that_nothing_is_stored(
    world: World,
) -> None:
    buffer = await world.create(group_size=2, advantage={"estimator": "rloo"})
    for task in range(2):
        await buffer.push(rewarded([(task, run, run) for run in range(2)]))
    consumer = buffer.state.consumers["trainer"]
    words = buffer.flow.line.explain_wait(consumer, 1)
    assert "nothing is stored" not in words
    assert words.endswith("; the advantages of 2 groups are being computed")
    await world.computer.close()


@pytest.mark.parametrize("is_trouble", [False, True])
async def test_why_nothing_is_computed_yet_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch, is_trouble: bool
) -> None:
    started = asyncio.Event()

    async def spawn() -> Child:
        started.set()
        if is_trouble:
            raise OSError("no processes left")
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(world.computer, "_spawn", spawn)
    buffer = await world.create(advantage={"estimator": "reinforce"})
    world.computer.start()
    await buffer.push(rewarded([(0, 0, 1.0)]))
    await started.wait()
    await until(lambda: "process" in buffer.flow.describe_computing())
    words = buffer.flow.describe_computing()
    assert words.startswith("the advantages of 1 experience are being computed (the process that ")
    reason = (
        "can't start, and is tried again: no processes left)" if is_trouble else "starting for 0"
    )
    assert reason in words
