"""What computing, annotating, deleting and changing settings do to each other when they overlap."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from experience_buffer import trxp
from experience_buffer.trxp import TensorView
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.annotation import AnnotateReason, Annotation
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.runtime.tuning import TUNING
from experience_buffer_server.store.interface import StoreFullError, WriteBatch
from tests.refusing_store import Refusals
from tests.unit.buffer.intake.test_annotate import advantages, annotate, values
from tests.unit.buffer_verbs import change, entry_of, leased, push_and_settle, pushed, unlooked_at
from tests.unit.builders import NUM_RESPONSE, World, experience, push, settle, turns, uid, until

RUNNING: dict[str, Any] = {
    "group_size": 2,
    "advantage": {"estimator": "rloo", "running_norm": "mean_std"},
}
PARTIAL: dict[str, Any] = {
    "group_size": 2,
    "group_deadline_seconds": 60,
    "on_group_deadline": "use_partial",
    "advantage": {"estimator": "rloo"},
    "on_missing_field": "wait",
}
CONSUMERS = [{"name": "critic", "raw": True}, {"name": "actor", "unit": "group"}]


def num_counted(buffer: Buffer) -> int:
    return int(json.loads(buffer.row.moments)["count"])


async def in_flight(world: World) -> None:
    await until(lambda: world.computer._in_flight)


@pytest.mark.parametrize("event", ["annotate", "delete"])
async def test_moments_count_once_whatever_happens_meanwhile(world: World, event: str) -> None:
    buffer = await world.computing(push((1, 0), (1, 1), (1, 2)), **(RUNNING | {"group_size": 3}))
    await in_flight(world)
    if event == "annotate":
        await annotate(buffer, uid(1, 0), reward=3.0)
    else:
        await buffer.delete([entry for entry in buffer.state.contents if entry.record.run == 2])
    await settle(buffer)
    assert num_counted(buffer) == (3 if event == "annotate" else 2)
    assert all(entry.available and entry.counted for entry in buffer.state.contents)


async def test_moments_go_on_when_other_parameters_are_set(world: World) -> None:
    buffer = await world.computing(push((1, 0), (1, 1)), **RUNNING)
    await in_flight(world)
    await change(buffer, advantage={"estimator": "rloo", "running_norm": "std"})
    await push_and_settle(buffer, push((2, 0), (2, 1)))
    assert num_counted(buffer) == 4


async def test_moments_that_were_void_meanwhile_do_not_come_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await world.computed(push((1, 0), (1, 1)), **RUNNING)
    is_computed, may_go_on = asyncio.Event(), asyncio.Event()
    read_results = world.computer._results

    async def held(*given: Any) -> Any:
        is_computed.set()
        await may_go_on.wait()
        return await read_results(*given)

    monkeypatch.setattr(world.computer, "_results", held)
    await buffer.push(push((2, 0), (2, 1)))
    await is_computed.wait()
    # The first two count no more, and what has just been computed counts them.
    await change(buffer, advantage={"estimator": "dr_grpo", "running_norm": "std"})
    await change(buffer, advantage=RUNNING["advantage"])
    may_go_on.set()
    await settle(buffer)
    assert num_counted(buffer) == 2
    await annotate(buffer, uid(1, 0), reward=3.0)
    await settle(buffer)
    assert num_counted(buffer) == 4


@pytest.mark.parametrize("policy", ["use_partial", "drop"])
async def test_what_can_be_sampled_waits_for_no_field(world: World, policy: str) -> None:
    """An estimator that was set later takes nothing away from what was there before."""
    buffer = await world.create(group_size=2, group_deadline_seconds=60, on_group_deadline=policy)
    await buffer.push(push((1, 0), (1, 1)))
    await change(buffer, advantage={"estimator": "gae"})
    assert not buffer.flow.describe_wait()
    await settle(buffer, after=61)
    assert len(buffer.state.contents) == 2
    assert not buffer.state.contents.lacking


async def test_an_experience_deleted_while_it_is_annotated_leaves_nothing(world: World) -> None:
    buffer = await world.create(
        group_by="none", advantage={"estimator": "gae"}, on_missing_field="wait"
    )
    await buffer.push(push((1, 0), (1, 1)))
    change_it = Annotation(uid=uid(1, 0), info={"a": "b" * 1000})
    annotating = asyncio.ensure_future(buffer.annotate([change_it]))
    await turns(2)
    entry = entry_of(buffer, 1, 0)
    deleting = asyncio.ensure_future(buffer.delete([entry]))
    ((outcome,), _) = await asyncio.gather(annotating, deleting)
    await settle(buffer)
    assert outcome.reason is AnnotateReason.UNKNOWN_UID
    (left,) = buffer.state.contents
    assert buffer.num_bytes == left.record.payload_bytes
    assert list(buffer.state.contents.lacking) == [left.record.seq]


async def test_siblings_of_a_deleted_one_go_on_alone(world: World) -> None:
    buffer = await world.computing(group_size=2, advantage={"estimator": "gae"})
    for run, number in ((0, 1.0), (1, float("nan"))):
        column = values(*[number] * NUM_RESPONSE)
        payload = trxp.with_tensors(trxp.encode([experience(1, run)]), column)
        with unlooked_at():
            await buffer.push(Push(payloads=[payload]))
    await settle(buffer)
    sound, bad = list(buffer.state.contents)
    assert bad.quarantine
    sound.quarantine, sound.available = "as if it had failed, too", False
    await buffer.delete([bad])
    await settle(buffer)
    assert sound.available


async def test_use_partial_is_tried_again_when_it_finds_no_room(world: World) -> None:
    buffer = await world.computing(pushed((1, 0), reward=None), pushed((1, 1)), **PARTIAL)

    Refusals(world.store).num_next = 1
    buffer.flow.grouping.expire(time.time() + 61)
    await buffer.drain()
    await settle(buffer, after=100)
    (left,) = buffer.state.contents
    assert left.available
    assert advantages(world, buffer, uid(1, 1)) == [round(0.2, 4)] * NUM_RESPONSE


async def test_nobody_leases_what_leaves_at_a_deadline(world: World) -> None:
    buffer = await world.computing(**(PARTIAL | {"consumers": CONSUMERS}))
    await buffer.push(pushed((1, 0), reward=None))
    await buffer.push(pushed((1, 1)))
    buffer.flow.grouping.expire(time.time() + 61)
    lease = await leased(buffer, 2, "critic")
    assert [unit.seqs for unit in lease.units] == [(2,)]
    await settle(buffer)
    assert [entry.available for entry in buffer.state.contents] == [True]


async def test_what_left_at_a_deadline_was_not_consumed(world: World) -> None:
    buffer = await world.computing(pushed((1, 0), reward=None), pushed((1, 1)), **PARTIAL)
    await settle(buffer, after=61)
    fresh = await world.restart(buffer)
    assert await annotate(fresh, uid(1, 1), reward=0.5) == (None, "")


async def test_annotations_can_be_read_whatever_they_add(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)), group_size=2)
    empty = TensorView("U8", (0,), memoryview(b""))
    big = TensorView("U8", (1 << 26,), memoryview(bytes(1 << 26)))
    first, second = ({f"{n}_{'n' * 9_000}_{i}": empty for i in range(490)} for n in range(2))
    assert await annotate(buffer, uid(1, 0), tensors=first) == (None, "")
    for tensors, words in (
        (second, "header"),
        ({f"{i}": empty for i in range(1100)}, "max_tensors"),
        ({"\ud800": empty}, ""),
        ({"big": big}, "server.max_message_bytes"),
    ):
        reason, message = await annotate(buffer, uid(1, 0), tensors=tensors)
        assert reason is AnnotateReason.INVALID
        assert words in message
    assert await annotate(buffer, uid(1, 0), reward=2.0) == (None, "")


async def test_a_deleted_buffer_lets_its_results_go(world: World) -> None:
    """Computed advantages that found no room hold nothing up once their buffer has gone."""
    buffer = await world.computing(push((1, 0), (1, 1)), **RUNNING)
    refusals = Refusals(world.store)
    refusals.num_next = 1000
    await until(lambda: buffer.flow.computing._waiting)
    await buffer.drain()
    refusals.num_next = 0
    buffer.close()
    await settle(buffer)
    assert not world.computer._held
    other = await world.create(2, **RUNNING)
    await push_and_settle(other, push((1, 0), (1, 1)))
    assert all(entry.available for entry in other.state.contents)


# --- results that come back to a buffer that has changed since they were asked for


RLOO: dict[str, Any] = {"group_size": 2, "advantage": {"estimator": "rloo"}}

BATCH: dict[str, Any] = {
    "group_size": 2,
    "advantage": {"estimator": "rloo", "reward_norm_std": "batch", "batch_size": 2},
}


class Rides:
    """Rides of a world's store that end when the test says how."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[asyncio.Future[None]] = []
        monkeypatch.setattr(world.store, "ride", self._ride)

    def _ride(self, batch: WriteBatch) -> asyncio.Future[None]:
        ride: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(ride)
        return ride

    def refuse(self) -> None:
        self.waiting.pop(0).set_exception(StoreFullError("full"))


async def test_a_buffer_deleted_while_its_results_find_no_room_holds_nothing_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await world.computing(**RUNNING)
    with monkeypatch.context() as patch:
        rides = Rides(world, patch)
        await buffer.push(push((1, 0), (1, 1)))
        await until(lambda: rides.waiting)
        buffer.close()
        rides.refuse()
        await buffer.drain()
    await until(lambda: not world.computer._in_flight)
    assert not world.computer._held
    assert not buffer.flow.computing.num_jobs


async def test_nobody_waits_behind_a_deleted_buffer(world: World) -> None:
    buffer, other = await world.create(1, **RLOO), await world.create(2, **RLOO)
    for each in (buffer, other):
        await each.push(push((1, 0), (1, 1), (2, 0), (2, 1)))
    buffer.close()
    ((*left,),) = world.computer._lanes.values()
    assert [work.state for work in left] == [other.state] * 2
    assert not buffer.flow.computing.num_jobs
    world.computer.start()
    await settle(other)
    assert all(entry.available for entry in other.state.contents)


async def test_what_comes_back_to_a_deleted_buffer_is_counted_nowhere(world: World) -> None:
    buffer = await world.computing(push((1, 0), (1, 1)), **RLOO)
    await in_flight(world)
    buffer.close()
    world.metrics.forget_buffer(buffer.name)
    await settle(buffer)
    families = world.metrics.registry.collect()
    named = [s for family in families for s in family.samples if buffer.name in s.labels.values()]
    assert not named


async def test_a_batch_is_stored_part_by_part_before_the_next_is_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push waits for a part of it only; what finds no room stays under way."""
    monkeypatch.setattr(TUNING, "stored_at_once_bytes", 1)
    buffer = await world.computing(**BATCH)
    with monkeypatch.context() as patch:
        rides = Rides(world, patch)
        await buffer.push(push((1, 0), (1, 1), (2, 0), (2, 1)))
        await until(lambda: rides.waiting)
        rides.waiting.pop(0).set_result(None)
        await until(lambda: rides.waiting)
        assert [entry.available for entry in buffer.state.contents] == [True, True, False, False]
        rides.refuse()
        await buffer.drain()
        assert world.computer._in_flight
        assert buffer.flow.describe_wait() == "1 changes wait to be stored: full"
    await settle(buffer, after=2)
    await until(lambda: not world.computer._in_flight)
    assert all(entry.available for entry in buffer.state.contents)


async def test_what_failed_under_old_settings_is_computed_under_new_ones(world: World) -> None:
    buffer = await world.computing(
        group_size=2, advantage={"estimator": "rloo", "reward_scale": 1e9}
    )
    payloads = [trxp.encode([experience(1, 0, reward=3e38), experience(1, 1)])]
    await buffer.push(Push(payloads=payloads))
    await in_flight(world)
    await change(buffer, advantage={"estimator": "rloo"})
    await settle(buffer)
    assert not buffer.state.contents.quarantined
    assert all(entry.available for entry in buffer.state.contents)


async def test_what_old_settings_made_available_waits_for_no_new_field(world: World) -> None:
    buffer = await world.computing(
        **RLOO, group_deadline_seconds=60, on_group_deadline="drop", on_missing_field="wait"
    )
    await buffer.push(push((1, 0), (1, 1)))
    await in_flight(world)
    await change(buffer, advantage={"estimator": "gae"})
    await settle(buffer)
    assert all(entry.available for entry in buffer.state.contents)
    assert not buffer.state.contents.lacking
    await settle(buffer, after=61)
    assert len(buffer.state.contents) == 2


async def test_moments_of_another_estimator_stay_void(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await world.computed(push((1, 0), (1, 1)), **RUNNING)
    with monkeypatch.context() as patch:
        rides = Rides(world, patch)
        await buffer.push(push((2, 0), (2, 1)))
        await until(lambda: rides.waiting)
        await change(buffer, advantage={"estimator": "dr_grpo", "running_norm": "std"})
        assert not buffer.row.moments
        rides.refuse()
        await buffer.drain()
    assert not buffer.row.moments
