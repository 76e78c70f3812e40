"""One buffer over a real store: failed commits, cancelled calls, drops, changes, time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from experience_buffer import errors, trxp
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.store.interface import AdvantageRow
from tests.unit.buffer_verbs import change, consume, leased, push_and_settle, pushed, take
from tests.unit.builders import (
    World,
    begun,
    experience,
    payload,
    push,
    settings,
    settle,
    turns,
    uid,
)

BOTH = [{"name": "actor", "unit": "item"}, {"name": "critic", "unit": "group"}]
GROUPS = [{"name": "critic", "unit": "group"}]


async def outcomes(buffer: Buffer, request: Push) -> list[str]:
    return [outcome.status.value for outcome in await buffer.push(request)]


def counters(buffer: Buffer, consumer: str) -> tuple[int, int, int]:
    found = buffer.state.consumers[consumer]
    return len(found.ready), found.num_leased, found.num_leased_experiences


def is_empty(buffer: Buffer) -> bool:
    return len(buffer.state.contents) == len(buffer.state.contents.groups) == 0


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[World]:
    """A store that refuses `huge()` and takes small pushes."""
    world = World(tmp_path / "small", max_map_bytes=16 << 20)
    await world.open()
    yield world
    await world.close()


def huge(task: int, run: int) -> Push:
    return pushed((task, run), tokens=torch.zeros(4_000_003, dtype=torch.int32), logprobs=None)


async def test_a_group_closed_behind_a_failed_push_is_open_again(small: World) -> None:
    buffer = await small.create(group_size=2, consumers=GROUPS)
    failing, closing = await asyncio.gather(
        buffer.push(huge(1, 0)), buffer.push(push((1, 1))), return_exceptions=True
    )
    assert isinstance(failing, errors.BufferFullError)
    assert not isinstance(closing, BaseException)
    assert await take(buffer, 1, "critic") == 0
    await buffer.drain()
    buffer = small.reload(buffer)
    assert buffer.flow.grouping.describe().startswith("1 group incomplete; oldest open group '2/1'")
    assert await take(buffer, 1, "critic") == 0
    assert await outcomes(buffer, push((1, 0))) == ["stored"]
    lease = await leased(buffer, 1, "critic")
    assert len(lease.units[0].seqs) == 2


async def test_a_repeat_of_a_push_that_fails_is_told_to_come_again(small: World) -> None:
    buffer = await small.create()
    first, again = await asyncio.gather(
        buffer.push(huge(1, 0)), buffer.push(huge(1, 0)), return_exceptions=True
    )
    assert isinstance(first, errors.BufferFullError)
    assert isinstance(again, errors.BufferFullError)
    assert is_empty(buffer)


async def test_a_cancelled_sample_leaves_no_lease(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)))
    for num_steps in range(6):
        call = asyncio.ensure_future(take(buffer, 2, timeout_seconds=60.0))
        await turns(num_steps)
        if not call.done():
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            buffer.give_back([call.result()], "stream_closed")
        await buffer.drain()
        assert counters(buffer, "trainer") == (2, 0, 0)


async def test_acks_at_the_same_time_end_a_lease_once(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)))
    lease_id = await take(buffer, 2)
    acks = [buffer.ack(lease_id) for _ in range(3)]
    expiring = time.time() + 1000
    results = asyncio.gather(*acks)
    await asyncio.sleep(0)
    buffer.tick(expiring)
    assert [lease.num_experiences for lease in await results] == [2, 2, 2]
    assert counters(buffer, "trainer") == (0, 0, 0)
    assert is_empty(buffer)


async def test_a_dropped_group_waits_for_its_leases(world: World) -> None:
    two = [{"name": "actor"}, {"name": "judge"}]
    buffer = await world.holding(push((1, 0), (1, 1)), group_size=2, consumers=two)
    first, second = await take(buffer, 1, "actor"), await take(buffer, 1, "judge")
    assert await buffer.drop("2/1", "aborted") == 2
    assert [entry.record.uid for entry in buffer.state.contents] == [uid(1, 0)]
    buffer = world.reload(buffer)
    await buffer.drain()
    assert counters(buffer, "actor") == counters(buffer, "judge") == (0, 1, 1)
    await buffer.ack(first)
    assert len(buffer.state.contents) == 1
    await buffer.nack(second, reason="done")
    await buffer.drain()
    assert is_empty(buffer)
    assert await outcomes(buffer, push((1, 0), (1, 5))) == ["duplicate", "refused"]


async def test_a_member_on_its_way_to_the_disk_leaves_with_its_dropped_group(world: World) -> None:
    buffer = await world.holding(push((1, 0)), group_size=3)
    coming = await begun(buffer.push(push((1, 1))))
    await buffer.drop("2/1", "aborted")
    await coming
    await buffer.drain()
    assert is_empty(buffer)
    assert len(world.reload(buffer).state.contents) == 0


async def test_a_replaced_consumer_starts_with_clean_counts(world: World) -> None:
    """An ack under way and an open lease are those of the consumer that went."""
    buffer = await world.holding(push((1, 0), (1, 1)), group_size=2, consumers=BOTH)
    ending, _held = await take(buffer, 1, "actor"), await take(buffer, 1, "actor")
    ack = await begun(buffer.ack(ending))
    unit = {"name": "actor", "unit": "group"}
    buffer.change_settings(settings(group_size=2, consumers=[unit, BOTH[1]]))
    assert (await ack).num_experiences == 1
    await buffer.drain()
    assert counters(buffer, "actor") == (1, 0, 0)
    assert await take(buffer, 1, "actor")
    assert counters(buffer, "actor") == (0, 1, 2)


async def test_an_ack_under_way_is_not_undone_by_a_new_consumer(world: World) -> None:
    """What has left with the ack isn't offered to who comes before the commit ends."""
    buffer = await world.holding(push((1, 0)))
    ack = await begun(buffer.ack(await take(buffer)))
    buffer.change_settings(settings(consumers=["trainer", "late"]))
    await ack
    assert len(buffer.state.contents) == 0
    assert counters(buffer, "late") == (0, 0, 0)


async def test_a_removed_consumer_no_longer_keeps_experiences(world: World) -> None:
    buffer = await world.holding(push((1, 0)), consumers=["actor", "critic"])
    await consume(buffer, 1, "actor")
    waiting = await begun(take(buffer, 1, "actor", timeout_seconds=60.0))
    buffer.change_settings(settings(consumers=["actor"]))
    await buffer.drain()
    assert len(buffer.state.contents) == 0
    buffer.change_settings(settings(consumers=["critic"]))
    assert await waiting == 0
    with pytest.raises(errors.ConsumerNotFoundError, match="has no consumer 'actor'"):
        await take(buffer, 1, "actor")


async def test_members_consumed_early_count_towards_their_group(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)), group_size=3)
    await consume(buffer, 2)
    buffer = world.reload(buffer)
    assert "2 of 3" in buffer.flow.grouping.describe()
    assert await outcomes(buffer, push((1, 2), (1, 3))) == ["stored", "refused"]
    await consume(buffer, 2)
    assert len(buffer.state.contents.groups) == 0
    assert await outcomes(buffer, push((1, 4))) == ["refused"]


async def test_groups_without_a_size_leave_nothing_behind(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)))
    await consume(buffer, 2)
    assert len(buffer.state.contents.groups) == 0
    (state,) = world.store.load()
    assert state.groups == []


async def test_two_groups_under_one_key(world: World) -> None:
    buffer = await world.create(group_size=2, consumers=GROUPS, late_members="new_group")
    assert await outcomes(buffer, push((1, 0), (1, 1), (1, 2))) == ["stored"] * 3
    old = await take(buffer, 1, "critic")
    assert await outcomes(buffer, push((1, 3))) == ["stored"]
    assert counters(buffer, "critic") == (1, 1, 2)
    buffer = world.reload(buffer)
    assert counters(buffer, "critic") == (1, 1, 2)
    await buffer.ack(old)
    assert await outcomes(buffer, push((1, 4))) == ["stored"]
    assert len(buffer.state.contents.groups) == 2


async def test_an_older_group_is_found_when_the_newest_of_its_key_has_gone(world: World) -> None:
    buffer = await world.create(group_size=2, consumers=GROUPS, late_members="new_group")
    await buffer.push(push((1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5)))
    first, second, third = buffer.state.contents.groups
    key = first.row.key
    assert buffer.state.contents.groups.get(key) is third
    await buffer.delete(list(second.members))
    await buffer.delete(list(third.members))
    await buffer.drain()
    assert buffer.state.contents.groups.get(key) is first
    assert await buffer.drop(key, "aborted") == 2
    assert is_empty(buffer)
    assert buffer.state.contents.groups.get(key) is None


async def test_a_drop_that_is_said_again_takes_no_older_group(world: World) -> None:
    buffer = await world.create(group_size=2, consumers=GROUPS, late_members="new_group")
    await buffer.push(push((1, 0), (1, 1), (1, 2)))
    older, newer = buffer.state.contents.groups
    assert await buffer.drop(newer.row.key, "aborted") == 1
    assert await buffer.drop(newer.row.key, "aborted") == 0
    assert list(buffer.state.contents.groups) == [older]
    await buffer.push(push((1, 3)))
    assert await buffer.drop(newer.row.key, "aborted again") == 1
    assert len(older.members) == 2


async def test_partial_batches_go_to_who_waited_longest(world: World) -> None:
    """Two calls that wait for more than there is don't keep each other from the rest."""
    buffer = await world.holding(push((1, 0), (1, 1)))
    calls = [take(buffer, 5, timeout_seconds=0.02) for _ in range(2)]
    assert sorted(map(bool, await asyncio.gather(*calls))) == [False, True]


async def test_a_deleted_uid_can_be_pushed_again(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)), group_size=2, consumers=BOTH)
    await buffer.delete(list(buffer.state.contents))
    assert is_empty(buffer)
    assert await outcomes(buffer, push((1, 0))) == ["stored"]


async def test_a_cancelled_delete_still_happens_and_offers_nothing_that_goes(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)), group_size=2, consumers=BOTH)
    call = await begun(buffer.delete(list(buffer.state.contents)[:1]))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await buffer.drain()
    assert [entry.record.uid for entry in buffer.state.contents] == [uid(1, 1)]
    assert counters(buffer, "actor") == counters(buffer, "critic") == (1, 0, 0)


async def test_consumed_uids_are_forgotten_after_the_horizon(world: World) -> None:
    buffer = await world.holding(push((1, 0)), duplicate_horizon_seconds=300.0)
    await consume(buffer)
    for seconds in (200, 230):
        await settle(buffer, after=seconds)
        assert await outcomes(buffer, push((1, 0))) == ["duplicate"]
    await settle(buffer, after=310)
    assert await outcomes(buffer, push((1, 0))) == ["stored"]


async def test_a_changed_deadline_replaces_the_old_one(world: World) -> None:
    buffer = await world.create(group_size=3, group_deadline_seconds=100, on_group_deadline="drop")
    await buffer.push(push((1, 0)))
    await change(buffer, group_deadline_seconds=1000)
    await settle(buffer, after=500)
    assert buffer.num_items == 1
    await settle(buffer, after=1500)
    assert is_empty(buffer)


async def test_a_changed_policy_holds_for_what_is_overdue_already(world: World) -> None:
    buffer = await world.holding(push((1, 0)), group_size=3, group_deadline_seconds=100)
    buffer.tick(time.time() + 200)
    (group,) = buffer.state.contents.groups
    assert group.overdue
    await change(buffer, on_group_deadline="drop")
    await settle(buffer, after=201)
    assert is_empty(buffer)


@pytest.mark.parametrize("num_steps", range(4))
async def test_a_member_deleted_while_its_group_is_computed(world: World, num_steps: int) -> None:
    buffer = await world.computing(group_size=3, consumers=GROUPS, advantage={"estimator": "rloo"})
    await buffer.push(push((1, 0), (1, 1), (1, 2)))
    await turns(num_steps)
    await buffer.delete([entry for entry in buffer.state.contents if entry.record.run == 1])
    await settle(buffer)
    lease = await leased(buffer, 1, "critic")
    rows = world.store.advantages(buffer.id, lease.units[0].seqs)
    found = [row for row in rows if isinstance(row, AdvantageRow)]
    assert [len(row.advantages) for row in found] == [28, 28]


async def test_advantages_of_a_dropped_group_are_not_kept(world: World) -> None:
    buffer = await world.computing(group_size=2, advantage={"estimator": "rloo"})
    await buffer.push(push((1, 0), (1, 1)))
    await buffer.drop("2/1", "aborted")
    await settle(buffer)
    assert world.store.advantages(buffer.id, [1, 2]) == [None, None]
    assert counters(buffer, "trainer") == (0, 0, 0)


async def test_an_estimator_set_later_computes_what_waits(world: World) -> None:
    buffer = await world.computing(push((1, 0)), group_size=2)
    await change(buffer, advantage={"estimator": "rloo"})
    await push_and_settle(buffer, push((1, 1)))
    assert counters(buffer, "trainer") == (2, 0, 0)
    assert None not in world.store.advantages(buffer.id, [1, 2])


async def test_a_push_over_the_limits_stores_nothing(world: World) -> None:
    buffer = await world.create(max_items=2, max_bytes=10 * len(payload((1, 0))))
    with pytest.raises(errors.BufferFullError, match="0 \\+ 3 exceed max_items = 2; split"):
        await buffer.push(push((1, 0), (1, 1), (1, 2)))
    assert await outcomes(buffer, push((1, 0), (1, 1), dead=[(1, 7)])) == ["stored"] * 3
    with pytest.raises(errors.BufferFullError, match="acknowledge") as caught:
        await buffer.push(push((1, 2)))
    assert caught.value.retry_delay_seconds == 1.0


async def test_each_item_of_a_push_has_its_own_outcome(world: World) -> None:
    buffer = await world.holding(push((1, 0)), group_size=3)
    changed = trxp.encode(
        [
            experience(1, 0, reward=99.0),
            experience(1, 1),
            experience(1, 1),
            experience(1, 2, reward=float("nan")),
            experience(1, 2),
            experience(1, 3),
        ]
    )
    found = await buffer.push(Push(payloads=[changed], group_size=3))
    assert [(o.status.value, o.reason) for o in found] == [
        ("refused", "conflict"),
        ("stored", None),
        ("duplicate", None),
        ("refused", "invalid"),
        ("stored", None),
        ("refused", "late"),
    ]
    (sized,) = await buffer.push(push((2, 0), size=5))
    (other,) = await buffer.push(push((2, 1), size=4))
    assert (sized.status, other.reason) == ("stored", "group_size")
