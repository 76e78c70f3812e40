"""Late fields: what waits for them, who may add them, and what is computed again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from experience_buffer import errors, trxp
from experience_buffer.trxp import TensorView
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.annotation import AnnotateReason, Annotation
from experience_buffer_server.buffer.intake.push_reading import PushStatus
from experience_buffer_server.buffer.state.entries import Reason
from experience_buffer_server.rpc.batch_assembly import read_payload
from tests.refusing_store import Refusals
from tests.unit.buffer_verbs import entry_of, push_and_settle, pushed, take
from tests.unit.builders import NUM_RESPONSE, World, settle, turns, uid, until

GAE: dict[str, Any] = {
    "group_size": 2,
    "advantage": {"estimator": "gae"},
    "on_missing_field": "wait",
}
RLOO: dict[str, Any] = {"group_size": 2, "advantage": {"estimator": "rloo"}}
CONSUMERS = [{"name": "critic", "raw": True}, {"name": "actor", "unit": "group"}]


def values(*numbers: float) -> dict[str, TensorView]:
    data = memoryview(torch.tensor(numbers or [0.5] * NUM_RESPONSE).numpy().tobytes())
    return {"values": TensorView("F32", (len(numbers) or NUM_RESPONSE,), data)}


async def annotate(buffer: Buffer, uid: str, **fields: Any) -> tuple[AnnotateReason | None, str]:
    (outcome,) = await buffer.annotate([Annotation(uid=uid, **fields)])
    assert outcome.uid == uid
    return outcome.reason, outcome.message


def stored_item(world: World, buffer: Buffer, uid: str) -> trxp.Item:
    (item,) = trxp.read(world.payload(buffer, uid))
    assert isinstance(item, trxp.Item)
    return item


def advantages(world: World, buffer: Buffer, uid: str) -> list[float]:
    entry = buffer.state.contents.by_uid(uid)
    assert entry is not None
    payload, _ = read_payload(world.store, buffer, entry)
    found = trxp.decode(payload)[0].advantages
    return [] if found is None else [round(float(a), 4) for a in found]


async def test_a_missing_field_is_refused_unless_the_buffer_waits_for_it(world: World) -> None:
    buffer = await world.create(**(GAE | {"on_missing_field": "refuse"}))
    (outcome,) = await buffer.push(pushed((1, 0)))
    assert outcome.reason is Reason.MISSING_FIELD
    assert "values is missing" in outcome.message


async def test_an_experience_waits_for_its_field_and_says_so(world: World) -> None:
    buffer = await world.computing(pushed((1, 0), (1, 1), reward=1.0), **GAE)
    assert "2 experiences wait for fields" in buffer.flow.describe_wait()
    assert f"{uid(1, 0)!r}, for values" in buffer.flow.describe_wait()
    assert await annotate(buffer, uid(1, 0), tensors=values()) == (None, "")
    await settle(buffer)
    assert advantages(world, buffer, uid(1, 0)) == [0.5] * NUM_RESPONSE
    assert "1 experience waits for fields" in buffer.flow.describe_wait()
    assert [entry.available for entry in buffer.state.contents] == [True, False]


async def test_what_waits_is_the_same_after_a_restart(world: World) -> None:
    buffer = await world.computing(pushed((1, 0), (1, 1)), **GAE)
    await annotate(buffer, uid(1, 1), tensors=values())
    await settle(buffer)
    fresh = await world.restart(buffer)
    assert [entry.missing for entry in fresh.state.contents] == [("values",), ()]
    assert list(fresh.state.contents.lacking) == [1]
    assert [entry.available for entry in fresh.state.contents] == [False, True]


async def test_an_annotated_experience_is_still_the_one_that_was_pushed(world: World) -> None:
    buffer = await world.computing(pushed((1, 0)), **GAE)
    before = stored_item(world, buffer, uid(1, 0))
    await annotate(buffer, uid(1, 0), tensors=values(), info={"source": "critic"})
    after = stored_item(world, buffer, uid(1, 0))
    assert after.meta["info"] == {"source": "critic"}
    assert set(after.tensors) == set(before.tensors) | {"values"}
    for name, tensor in before.tensors.items():
        assert bytes(after.tensors[name].data) == bytes(tensor.data)
    (again,) = await buffer.push(pushed((1, 0)))
    assert again.status is PushStatus.DUPLICATE
    payload_bytes = [entry.record.payload_bytes for entry in buffer.state.contents]
    assert payload_bytes == [len(world.payload(buffer, uid(1, 0)))]
    assert buffer.num_bytes == sum(payload_bytes)


async def test_one_form_of_a_field_replaces_the_other(world: World) -> None:
    buffer = await world.create(**GAE)
    numbers = [0.25] * NUM_RESPONSE
    await buffer.push(pushed((1, 0), info={"values": numbers, "kept": 1}))
    assert await annotate(buffer, uid(1, 0), tensors=values()) == (None, "")
    item = stored_item(world, buffer, uid(1, 0))
    assert item.meta["info"] == {"kept": 1}
    assert await annotate(buffer, uid(1, 0), info={"values": numbers}) == (None, "")
    item = stored_item(world, buffer, uid(1, 0))
    assert item.meta["info"] == {"kept": 1, "values": numbers}
    assert "values" not in item.tensors


async def test_a_new_reward_changes_the_whole_group(world: World) -> None:
    buffer = await world.computed(pushed((1, 0), (1, 1), reward=1.0), **RLOO)
    assert advantages(world, buffer, uid(1, 1)) == [0.0] * NUM_RESPONSE
    changing = asyncio.ensure_future(annotate(buffer, uid(1, 0), reward=3.0))
    await until(lambda: any(entry.changing for entry in buffer.state.contents))
    assert not await take(buffer)
    assert await changing == (None, "")
    await settle(buffer)
    assert advantages(world, buffer, uid(1, 0)) == [2.0] * NUM_RESPONSE
    assert advantages(world, buffer, uid(1, 1)) == [-2.0] * NUM_RESPONSE
    assert len(buffer.state.consumers["trainer"].ready) == 2
    entry = entry_of(buffer, 1, 0)
    assert entry.record.reward == 3.0


async def test_nobody_gets_advantages_of_before_an_annotation(world: World) -> None:
    """Not even while its commit is under way, and not from a job under way either."""
    buffer = await world.computing(pushed((1, 0), (1, 1), reward=1.0), **RLOO)
    # The job is on its way to the worker, which starts for it.
    changing = asyncio.ensure_future(annotate(buffer, uid(1, 0), reward=5.0))
    await turns(2)
    assert not any(entry.available for entry in buffer.state.contents)
    await changing
    await settle(buffer)
    assert advantages(world, buffer, uid(1, 1)) == [-4.0] * NUM_RESPONSE
    assert [entry.generation for entry in buffer.state.contents] == [1, 1]


async def test_what_was_delivered_is_not_changed_behind_the_trainer(world: World) -> None:
    buffer = await world.computed(pushed((1, 0), (1, 1)), **RLOO)
    lease_id = await take(buffer)
    for member in (0, 1):
        reason, message = await annotate(buffer, uid(1, member), reward=3.0)
        assert reason is AnnotateReason.DELIVERED
        assert "raw = true" in message
    await buffer.ack(lease_id)
    reason, _ = await annotate(buffer, uid(1, 1), reward=3.0)
    assert reason is AnnotateReason.DELIVERED
    fresh = await world.restart(buffer)
    reason, _ = await annotate(fresh, uid(1, 1), reward=3.0)
    assert reason is AnnotateReason.DELIVERED
    # What is there already may be said again, by a call whose answer was lost.
    assert await annotate(fresh, uid(1, 1), reward=0.2) == (None, "")


async def test_a_raw_consumer_gets_what_waits_and_may_annotate_what_it_holds(world: World) -> None:
    buffer = await world.computing(pushed((1, 0), (1, 1)), **(GAE | {"consumers": CONSUMERS}))
    assert not await take(buffer, 1, "actor")
    for member in (0, 1):
        lease_id = await take(buffer, 1, "critic")
        assert await annotate(buffer, uid(1, member), tensors=values()) == (None, "")
        await buffer.ack(lease_id)
    await settle(buffer)
    assert not await take(buffer, 1, "critic")
    assert await take(buffer, 1, "actor")
    assert len(buffer.state.contents) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": values(1.0, 2.0)}, "values has shape [2] but the response has 7 tokens"),
        ({"reward": float("nan")}, "reward is nan; send a finite number"),
        ({"tensors": {"tokens": values()["values"]}}, "tensor tokens was pushed and stays"),
        ({"tensors": {"advantages": values()["values"]}}, "advantages is computed by the server"),
        ({"tensors": {"multi_modal_inputs:x": values()["values"]}}, "images can't be annotated"),
        ({"info": {"model_version": 1.5}}, "info['model_version'] is 1.5; a policy version"),
        ({"problem": "safetensors: too short"}, "safetensors: too short"),
    ],
)
async def test_an_annotation_that_does_not_fit_changes_nothing(
    world: World, change: Mapping[str, Any], message: str
) -> None:
    buffer = await world.holding(pushed((1, 0), (1, 1)), **GAE)
    before = world.store.payloads(buffer.id, [uid(1, 0)])
    bad, sound = await buffer.annotate(
        [Annotation(uid=uid(1, 0), **change), Annotation(uid=uid(1, 1), tensors=values())]
    )
    assert (bad.reason, sound.reason) == (AnnotateReason.INVALID, None)
    assert message in bad.message
    assert world.store.payloads(buffer.id, [uid(1, 0)]) == before


async def test_unknown_and_doubled_uids(world: World) -> None:
    buffer = await world.create(**GAE)
    reason, message = await annotate(buffer, uid(9, 9), reward=1.0)
    assert reason is AnnotateReason.UNKNOWN_UID
    assert uid(9, 9) in message
    endless = Annotation(uid="\x00" * 100_000)
    (outcome,) = await buffer.annotate([endless])
    assert outcome.reason is AnnotateReason.UNKNOWN_UID
    assert len(outcome.uid) + len(outcome.message) < 1000
    twice = [Annotation(uid=uid(1, 0)), Annotation(uid=uid(1, 0))]
    with pytest.raises(errors.InvalidRequestError, match="one uid"):
        await buffer.annotate(twice)
    many = [Annotation(uid=str(number)) for number in range(98)]
    with pytest.raises(errors.InvalidRequestError, match="98 annotations"):
        await buffer.annotate(many)


async def test_annotations_at_once_keep_one_another(world: World) -> None:
    buffer = await world.holding(pushed((1, 0)), **GAE)
    names = [f"name {number}" for number in range(23)]
    await asyncio.gather(*(annotate(buffer, uid(1, 0), info={name: 1.0}) for name in names))
    item = stored_item(world, buffer, uid(1, 0))
    assert item.meta["info"] == dict.fromkeys(names, 1.0)


async def test_a_quarantined_group_is_computed_again_once_it_is_mended(world: World) -> None:
    buffer = await world.computing(group_size=1, advantage={"estimator": "reinforce"})
    vast = [3e38] * NUM_RESPONSE  # Their sum is no float32 any more.
    await push_and_settle(buffer, pushed((5, 0), token_level_reward=vast))
    assert [bool(entry.quarantine) for entry in buffer.state.contents] == [True]
    numbers = values(*[0.0] * (NUM_RESPONSE - 1), 2.0)["values"]
    await annotate(buffer, uid(5, 0), tensors={"token_level_reward": numbers})
    await settle(buffer)
    assert advantages(world, buffer, uid(5, 0)) == [2.0] * NUM_RESPONSE


async def test_no_room_for_an_annotation_changes_nothing(world: World) -> None:
    buffer = await world.holding(pushed((1, 0)), **GAE)
    limit = buffer.num_bytes + 3
    buffer.change_settings(buffer.settings.model_copy(update={"max_bytes": limit}))
    with pytest.raises(errors.BufferFullError, match="max_bytes"):
        await annotate(buffer, uid(1, 0), tensors=values())
    assert buffer.state.contents.lacking


DEADLINE: dict[str, Any] = GAE | {"group_deadline_seconds": 5.0, "group_by": "task"}


@pytest.mark.parametrize(
    ("policy", "minimum", "left"),
    [("wait", 1, 2), ("drop", 1, 0), ("use_partial", 1, 1), ("use_partial", 2, 0)],
)
async def test_a_deadline_ends_the_wait_for_fields(
    world: World, policy: str, minimum: int, left: int
) -> None:
    changes = {"on_group_deadline": policy, "min_group_size": minimum}
    estimator = {"estimator": "remax", "turn_rewards": "steps"}
    buffer = await world.computing(**(DEADLINE | changes | {"advantage": estimator}))
    await buffer.push(pushed((1, 0), (1, 1)))
    await annotate(buffer, uid(1, 1), info={"baseline_reward": 0.0})
    buffer.tick(time.time() + 4)
    assert len(buffer.state.contents) == 2
    await settle(buffer, after=6)
    assert len(buffer.state.contents) == left
    assert len(buffer.state.contents.lacking) == (policy == "wait")
    group = buffer.state.contents.groups.get("2/1")
    if policy == "wait":
        assert group is not None
        assert group.overdue
    if left == 1:
        assert advantages(world, buffer, uid(1, 1)) == [0.2] * NUM_RESPONSE


async def test_a_deadline_waits_for_an_annotator_that_holds_a_lease(world: World) -> None:
    world.computer.start()
    changes = {"on_group_deadline": "drop", "consumers": CONSUMERS}
    buffer = await world.holding(pushed((1, 0), (1, 1)), **(DEADLINE | changes))
    first = await take(buffer, 1, "critic")
    await settle(buffer, after=6)
    assert len(buffer.state.contents) == 2
    await buffer.nack(first, reason="")
    await settle(buffer, after=8)
    assert len(buffer.state.contents) == 0


async def test_a_raw_consumer_of_groups_gets_them_whole(world: World) -> None:
    consumers = [{"name": "critic", "raw": True, "unit": "group"}, {"name": "actor"}]
    buffer = await world.holding(pushed((1, 0)), **(GAE | {"consumers": consumers}))
    assert not await take(buffer, 1, "critic")
    await buffer.push(pushed((1, 1)))
    assert await take(buffer, 1, "critic")


async def test_a_group_is_not_computed_before_every_member_has_its_fields(world: World) -> None:
    buffer = await world.create(**(RLOO | {"on_missing_field": "wait"}))
    await buffer.push(pushed((1, 0), reward=None))
    await buffer.push(pushed((1, 1)))
    assert buffer.flow.computing.num_jobs == 0
    await annotate(buffer, uid(1, 0), reward=1.0)
    assert buffer.flow.computing.num_jobs == 1


async def test_nothing_is_computed_from_before_an_annotation_on_its_way(world: World) -> None:
    buffer = await world.holding(pushed((1, 0)), **(RLOO | {"on_missing_field": "wait"}))
    await buffer.push(pushed((1, 1), reward=None))
    await annotate(buffer, uid(1, 1), info={"note": "still without a reward"})
    changing = asyncio.ensure_future(annotate(buffer, uid(1, 1), reward=1.0))
    await until(lambda: any(entry.changing for entry in buffer.state.contents))
    for entry in buffer.state.contents:
        entry.missing = ()
    buffer.flow.advance(list(buffer.state.contents))
    assert buffer.flow.computing.num_jobs == 0
    await changing
    assert buffer.flow.computing.num_jobs == 1


async def test_old_advantages_go_with_an_annotation_and_rewards_stay_counted(world: World) -> None:
    world.computer.start()
    running = {"estimator": "rloo", "running_norm": "std"}
    buffer = await world.holding(pushed((1, 0), (1, 1)), **(RLOO | {"advantage": running}))
    await settle(buffer)
    await world.computer.close()
    await annotate(buffer, uid(1, 0), reward=3.0)
    assert world.store.advantages(buffer.id, [1, 2]) == [None, None]
    (state,) = [state for state in world.store.load() if state.row.id == buffer.id]
    assert not state.computed
    fresh = world.reload(buffer)
    counted = {entry.record.uid: entry.counted for entry in fresh.state.contents}
    assert counted == {uid(1, 0): True, uid(1, 1): False}


async def test_a_refused_annotation_leaves_what_was_computed(world: World) -> None:
    buffer = await world.computing(pushed((1, 0), reward=1.0), **GAE)
    await annotate(buffer, uid(1, 0), tensors=values())
    await settle(buffer)
    (entry,) = buffer.state.contents
    before = entry.magnitude
    Refusals(world.store).num_next = 1
    with pytest.raises(errors.BufferFullError):
        await annotate(buffer, uid(1, 0), reward=9.0)
    assert entry.magnitude == before > 0
    assert (entry.available, entry.changing) == (True, False)
