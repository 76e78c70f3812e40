"""What statistics say of a buffer: what was used, what waits, without walking all that is stored."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.flow import depth_of
from experience_buffer_server.buffer.gauges import Gauges
from experience_buffer_server.buffer.state.group_table import GroupTable
from experience_buffer_server.rpc.messages import stats_message
from experience_buffer_server.runtime import callers, clock
from tests.unit.buffer_verbs import consume, counted, leased, sampled
from tests.unit.builders import World, push, uid, until

GROUPS: dict[str, Any] = {"group_size": 2, "consumers": [{"name": "trainer", "unit": "group"}]}


def usage(buffer: Buffer) -> tuple[int, int, float | None]:
    stats = buffer.stats()
    return stats.num_used, stats.num_unused, stats.keep_ratio


async def delete(buffer: Buffer, *uids: str) -> None:
    entries = [entry for one in uids if (entry := buffer.state.contents.by_uid(one)) is not None]
    assert await buffer.delete(entries) == ([], len(uids))


async def test_what_left_is_used_or_not(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)), **GROUPS)
    await buffer.push(push((4, 0), dead=[(4, 1)]))
    assert usage(buffer) == (0, 0, None)
    assert not stats_message(buffer.stats()).HasField("keep_ratio")
    await consume(buffer, 1)
    assert usage(buffer) == (2, 0, 1.0)
    assert stats_message(buffer.stats()).keep_ratio == 1.0
    await buffer.drop("2/2", "aborted")
    assert usage(buffer) == (2, 2, 0.5)
    await delete(buffer, uid(3, 0))
    assert usage(buffer) == (2, 3, 0.4)
    await buffer.drop("2/4", "aborted")
    assert usage(buffer) == (2, 4, 2 / 6), "a tombstone is no experience"


async def test_acks_of_raw_consumers_are_no_use(world: World) -> None:
    consumers = [{"name": "critic", "raw": True}, "trainer"]
    buffer = await world.holding(push((1, 0), (2, 0)), group_by="none", consumers=consumers)
    await consume(buffer, 2, "critic")
    assert usage(buffer) == (0, 0, None)
    await delete(buffer, uid(1, 0))
    await consume(buffer, 1)
    assert usage(buffer) == (1, 1, 0.5)


async def test_what_is_replayed_is_used_once_and_may_leave(world: World) -> None:
    buffer = await world.create(group_by="none", consumers=[{"name": "trainer", "replay": True}])
    await buffer.push(push((1, 0), (2, 0)))
    for _ in range(3):
        await consume(buffer, 1)
    await delete(buffer, uid(1, 0), uid(2, 0))
    assert usage(buffer) == (1, 1, 0.5)


async def test_what_is_passed_over_is_not_used(world: World) -> None:
    staleness = {"max_age_seconds": 1e-9, "on_stale": "keep"}
    consumer = {"name": "trainer", "staleness": staleness}
    buffer = await world.holding(push((1, 0), (2, 0)), group_by="none", consumers=[consumer])
    lease, _ = await sampled(buffer, 2)
    await buffer.drain()
    assert lease is None
    assert usage(buffer) == (0, 2, 0.0)


async def test_what_was_passed_over_before_a_restart_is_not_used(world: World) -> None:
    staleness = {"max_age_seconds": 1e-9, "on_stale": "keep"}
    consumers = [{"name": "trainer", "staleness": staleness}, "critic"]
    buffer = await world.holding(push((1, 0), (2, 0)), group_by="none", consumers=consumers)
    await sampled(buffer, 2)
    await buffer.drain()
    buffer = await world.restart(buffer)
    await consume(buffer, 1, "critic")
    assert usage(buffer) == (1, 0, 1.0)
    await delete(buffer, uid(2, 0))
    assert usage(buffer) == (1, 1, 0.5)


async def test_a_rewind_takes_back_what_was_used(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1), (2, 0), (2, 1)), **GROUPS)
    await consume(buffer, 1, step=1)
    await consume(buffer, 1, step=2)
    assert usage(buffer) == (4, 0, 1.0)
    trainer = buffer.state.consumer("trainer")
    await buffer.flow.timelines.rewind(trainer, 1)
    assert buffer.stats().consumers[0].num_retained_experiences == 2
    await buffer.drop("2/2", "aborted")
    assert usage(buffer) == (4, 2, 0.5)


async def test_a_restart_counts_anew(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1), (2, 0), (2, 1)), **GROUPS)
    await consume(buffer, 1, step=1)
    buffer = await world.restart(buffer)
    await buffer.declare_safe("trainer", 1)
    assert (buffer.num_items, usage(buffer)) == (2, (0, 0, None))
    await buffer.drop("2/2", "aborted")
    assert usage(buffer) == (0, 2, 0.0)


async def test_groups_are_counted_by_what_they_wait_for(world: World) -> None:
    buffer = await world.create(group_size=2, group_deadline_seconds=100.0)
    await buffer.push(push((1, 0), (2, 0), (2, 1), (3, 0)))
    late = buffer.state.contents.groups.get("2/1")
    whole = buffer.state.contents.groups.get("2/2")
    assert late is not None
    assert whole is not None
    for group in (late, whole):
        group.deadline = 0.0
        buffer.state.contents.groups.deadlines.postpone(group, 1.0)
    buffer.flow.grouping.expire(2.0)
    stats = buffer.stats()
    assert (stats.num_open_groups, stats.num_overdue_groups) == (2, 1)
    assert "2/1" in stats.oldest_open_group
    [entry] = buffer.state.contents.by_seqs([whole.members[0].record.seq])
    buffer.state.contents.set_missing(entry, ("values",))
    whole.overdue = True
    stats = buffer.stats()
    assert (stats.num_overdue_groups, stats.num_waiting_for_fields) == (2, 1)


async def test_quarantined_groups_are_known_without_looking(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1), (2, 0), (2, 1)), group_size=2)
    contents = buffer.state.contents
    for entry in contents:
        contents.set_quarantine(entry, "no finite number")
    assert buffer.stats().num_quarantined_groups == 2
    await delete(buffer, uid(1, 0))
    assert len(contents.quarantined) == 3
    await buffer.drop("2/2", "aborted")
    assert buffer.stats().num_quarantined_groups == 1
    [rest] = contents
    contents.set_quarantine(rest, "")
    assert (buffer.stats().num_quarantined_groups, contents.quarantined) == (0, {})


async def test_what_is_stored_is_not_walked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = await world.holding(push((1, 0), (1, 1), (2, 0)), **GROUPS)

    def refuse(_: object) -> None:
        raise AssertionError("all groups are walked")

    monkeypatch.setattr(GroupTable, "__iter__", refuse)
    monkeypatch.setattr(type(buffer.state.contents), "__iter__", refuse)
    stats = buffer.stats()
    assert (stats.num_items, stats.num_open_groups) == (3, 1)


async def test_a_wait_is_counted_by_what_kept_it(world: World) -> None:
    consumers = [{"name": "trainer", "limiter": {"min_size": 3}}]
    buffer = await world.create(group_by="none", consumers=consumers)
    asked = asyncio.ensure_future(leased(buffer, 2, timeout_seconds=60.0))
    await until(lambda: buffer.state.consumer("trainer").waiters)
    began = time.monotonic()
    await buffer.push(push((1, 0), (2, 0)))
    assert not asked.done()
    await buffer.push(push((3, 0)))
    await asked
    empty, min_size, window = (
        counted(world, buffer, "sample_waited_seconds", consumer="trainer", reason=reason)
        for reason in ("empty", "min_size", "window")
    )
    assert empty > 0
    assert 0 < min_size <= time.monotonic() - began
    assert window == 0


async def test_gauges_are_read_on_the_loop_and_errors_come_out(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)), group_size=3)
    loop = asyncio.get_running_loop()
    gauges = Gauges(lambda: [buffer.stats()], loop)
    families = await asyncio.to_thread(lambda: list(gauges.collect()))
    values = {family.name: [s.value for s in family.samples] for family in families}
    assert values["experience_buffer_items"] == [2]
    assert values["experience_buffer_open_groups"] == [1]
    assert values["experience_buffer_ready_units"] == [2]
    assert values["experience_buffer_policy_version"] == []
    broken = Gauges(lambda: [][0], loop)
    with pytest.raises(IndexError):
        await asyncio.to_thread(lambda: list(broken.collect()))


async def test_what_a_consumer_would_wait_for_is_told_though_nobody_waits(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1), (2, 0)), **GROUPS)
    (trainer,) = buffer.stats().consumers
    assert (trainer.num_waiting, trainer.waiting_seconds, trainer.asked_batch_size) == (0, None, 0)
    assert (trainer.waiting_for, trainer.wait_reason) == ("", ""), "one is ready"
    await sampled(buffer, 3, min_batch_size=3)
    (trainer,) = buffer.stats().consumers
    assert (trainer.num_waiting, trainer.asked_batch_size) == (0, 3)
    assert trainer.waiting_for.startswith("1 ready of 3 groups; 1 group incomplete")
    assert trainer.wait_reason
    callers.named("gpu-3:88")
    asked = asyncio.ensure_future(leased(buffer, 2, timeout_seconds=60.0))
    await until(lambda: buffer.state.consumer("trainer").waiters)
    (trainer,) = buffer.stats().consumers
    assert (trainer.num_waiting, trainer.waiting_holders) == (1, ("gpu-3:88",))
    assert trainer.waiting_seconds is not None
    assert 0 <= trainer.waiting_seconds < 60
    assert trainer.waiting_for.startswith("1 ready of 2 groups")
    await buffer.push(push((2, 1)))
    await asked
    (trainer,) = buffer.stats().consumers
    assert (trainer.num_waiting, trainer.waiting_holders) == (0, ())


async def test_when_a_limit_will_be_reached_is_told_by_the_last_minutes(world: World) -> None:
    buffer = await world.holding(
        push((1, 0), (2, 0)), group_by="none", max_items=8, max_bytes=10**9
    )
    stats = buffer.stats()
    assert (stats.max_items, stats.max_bytes, stats.used_ratio) == (8, 10**9, 0.25)
    assert (stats.full_in_seconds, stats.full_by) == (None, ""), "nothing is known of before"
    began = clock.now()
    buffer.flow.state.telemetry.sample(began - 100.0, depth_of(buffer.state))
    await buffer.push(push((3, 0), (4, 0)))
    stats = buffer.stats()
    assert stats.full_by == "max_items"
    assert stats.full_in_seconds == pytest.approx(4 / (2 / 100.0), rel=0.05)
    await consume(buffer, 3)
    stats = buffer.stats()
    assert (stats.used_ratio, stats.full_in_seconds) == (0.125, None), "there is less than before"
    unbounded = (await world.create(2)).stats()
    assert (unbounded.max_items, unbounded.used_ratio) == (0, 0.0)


async def test_the_oldest_open_group_is_known_without_a_look_at_the_others(world: World) -> None:
    buffer = await world.holding(push((1, 0), (2, 0), (3, 0)), group_size=2)
    groups = buffer.state.contents.groups
    first, second = groups.get("2/1"), groups.get("2/2")
    assert first is not None
    assert second is not None
    groups.close(first, "sealed")
    assert groups.oldest_open is second
    groups.reopen(first, size=2)
    assert groups.oldest_open is first
    assert "'2/1' has 1 of 2" in buffer.stats().oldest_open_group
