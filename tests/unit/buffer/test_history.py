"""One experience in time: pushed, completed, annotated, computed, leased, acknowledged, in this order."""

from __future__ import annotations

from typing import Any

from experience_buffer.history import HistoryEvent
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.history import history
from experience_buffer_server.buffer.intake.annotation import Annotation
from experience_buffer_server.buffer.telemetry.push_log import MOST_RUNS, PushLog
from experience_buffer_server.runtime.callers import Caller, entered
from tests.unit.buffer_verbs import consume, entry_of, leased, of_version, sampled
from tests.unit.builders import World, push, settle, uid

GROUPS: dict[str, Any] = {"group_size": 2, "consumers": [{"name": "trainer", "unit": "group"}]}


def told(buffer: Buffer, task: int, run: int, **computation: Any) -> list[HistoryEvent]:
    return history(buffer, entry_of(buffer, task, run), computation or None)


def kinds(events: list[HistoryEvent]) -> list[str]:
    return [event.kind for event in events]


async def test_the_way_of_an_experience(world: World) -> None:
    buffer = await world.create(**GROUPS)
    entered(Caller("rollout-7", "ipv4:10.0.0.7:4711"))
    await buffer.push(push((1, 0)))
    assert kinds(told(buffer, 1, 0)) == ["pushed"]
    entered(Caller("10.0.0.8", "ipv4:10.0.0.8:4712"))
    await buffer.push(push((1, 1)))
    lease = await leased(buffer)
    events = told(buffer, 1, 0)
    assert kinds(events) == ["pushed", "completed", "leased"]
    assert [one.who for one in events] == ["rollout-7", "", "10.0.0.8:4712"]
    assert told(buffer, 1, 1)[0].who == "10.0.0.8:4712"
    assert events[-1].lease_id == lease.id
    assert events[-1].until_time == lease.deadline
    times = [one.time for one in events if one.time is not None]
    assert times == sorted(times)
    assert len(times) == 3
    await buffer.ack(lease.id, step=5)
    events = told(buffer, 1, 0)
    assert kinds(events) == ["pushed", "completed", "acknowledged"]
    assert (events[-1].consumer, events[-1].step) == ("trainer", 5)
    assert events[-1].time is not None
    await buffer.rewind("trainer", 4)
    assert kinds(told(buffer, 1, 0)) == ["pushed", "completed"]


async def test_what_came_back(world: World) -> None:
    consumers = [{"name": "trainer", "unit": "group", "max_deliveries": 2}]
    buffer = await world.holding(push((1, 0), (1, 1)), **(GROUPS | {"consumers": consumers}))
    await buffer.nack((await leased(buffer)).id, reason="broken")
    events = told(buffer, 1, 1)
    assert kinds(events) == ["pushed", "completed", "returned"]
    assert events[-1].message == "once, without an ack"
    await buffer.nack((await leased(buffer)).id, reason="broken")
    assert kinds(told(buffer, 1, 1)) == ["pushed", "completed", "returned", "quarantined"]


async def test_what_is_found_later(world: World) -> None:
    buffer = await world.computed(push((1, 0), (1, 1)), **GROUPS, advantage={"estimator": "grpo"})
    (row,) = world.store.advantages(buffer.id, [entry_of(buffer, 1, 0).record.seq])
    assert row is not None
    assert not isinstance(row, Exception)
    events = told(buffer, 1, 0, **row.details)
    assert kinds(events) == ["pushed", "completed", "computed"]
    assert events[-1].message == "grpo"
    assert events[-1].time is not None
    assert entry_of(buffer, 1, 1).advantage is not None
    await buffer.annotate([Annotation(uid=uid(1, 0), reward=7.0, info={"judge": "x" * 100})])
    await settle(buffer)
    (row,) = world.store.advantages(buffer.id, [entry_of(buffer, 1, 0).record.seq])
    assert row is not None
    assert not isinstance(row, Exception)
    events = told(buffer, 1, 0, **row.details)
    assert kinds(events) == ["pushed", "completed", "annotated", "computed"]
    assert events[2].message == "reward, judge"


async def test_what_nobody_noted_the_time_of_keeps_its_place(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)), **GROUPS)
    await consume(buffer, 1, step=3)
    again = await world.restart(buffer)
    events = told(again, 1, 0)
    assert [(one.kind, one.who, one.time is None) for one in events] == [
        ("pushed", "", False),
        ("completed", "", False),
        ("acknowledged", "", True),
    ]
    assert events[-1].step == 3


async def test_who_passed_it_over(world: World) -> None:
    consumers = [
        {"name": "trainer", "staleness": {"max_lag": 1, "on_stale": "keep"}},
        {"name": "critic"},
    ]
    buffer = await world.holding(of_version(1, (1, 0)), group_by="none", consumers=consumers)
    await buffer.publish(9)
    await sampled(buffer)
    last = told(buffer, 1, 0)[-1]
    assert (last.kind, last.consumer, last.message) == (
        "passed_over",
        "trainer",
        "passed over: too stale",
    )


async def test_failed_rollouts_have_a_past_too(world: World) -> None:
    buffer = await world.holding(push(dead=[(1, 0)]), **GROUPS)
    assert told(buffer, 1, 0)[0].message.startswith("a failed rollout")


def test_who_pushed_is_remembered_by_runs() -> None:
    log = PushLog()
    assert log.who(1) == ""
    log.pushed(1, 4, "a")
    log.pushed(5, 9, "a")
    log.pushed(12, 12, "b")
    assert [log.who(seq) for seq in (0, 1, 4, 5, 9, 10, 12, 13)] == [
        "",
        "a",
        "a",
        "a",
        "a",
        "",
        "b",
        "",
    ]
    for number in range(3 * MOST_RUNS):
        log.pushed(100 + number, 100 + number, f"worker-{number % 7}")
    assert len(log._runs) < 2 * MOST_RUNS
    assert log.who(100 + 3 * MOST_RUNS - 1) == f"worker-{(3 * MOST_RUNS - 1) % 7}"
    assert log.who(4) == ""
