"""What a buffer tells of its past: the same that was pushed, delivered, trained on, and left."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest

from experience_buffer import errors
from experience_buffer.history import StepInfo, TrendPoint, Trends
from experience_buffer_server.buffer import past
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.flow import depth_of
from experience_buffer_server.buffer.intake.annotation import Annotation
from experience_buffer_server.buffer.telemetry.trend_log import INTERVAL_SECONDS, KEPT_SECONDS
from experience_buffer_server.runtime import clock
from tests.unit.buffer_verbs import change, consume, leased, of_version, pushed, sampled
from tests.unit.builders import NUM_RESPONSE, World, push, settle, uid, until

GROUPS: dict[str, Any] = {"group_size": 2, "consumers": [{"name": "trainer", "unit": "group"}]}
GRPO = {"estimator": "grpo"}


def tick(buffer: Buffer, seconds: float = INTERVAL_SECONDS) -> None:
    """Let the next point be made, so many seconds from the last one."""
    log = buffer.state.telemetry.trends
    buffer.state.telemetry.sample(log._last_time + seconds, depth_of(buffer.state))


def points(buffer: Buffer) -> tuple[TrendPoint, ...]:
    return trends(buffer).points


def trends(buffer: Buffer) -> Trends:
    return past.trends(buffer, 0.0)


def steps(buffer: Buffer, consumer: str = "trainer", step: int | None = None) -> list[StepInfo]:
    return list(past.steps(buffer, consumer, step, 0))


def reasons(buffer: Buffer, **given: Any) -> list[tuple[str, str]]:
    asked: dict[str, Any] = {"reason": "", "unused_only": False, "limit": 0} | given
    return [(each.uid, each.reason) for each in past.departures(buffer, **asked).departures]


# --- trends


async def test_a_point_says_what_came_and_went_in_its_time(world: World) -> None:
    buffer = await world.holding(of_version(3, (1, 0), (1, 1), (2, 0), (2, 1)), **GROUPS)
    await buffer.publish(5)
    await consume(buffer, 1, step=7)
    await buffer.push(push((3, 0)))
    await buffer.drop("2/2", "aborted")
    await until(lambda: buffer.num_items == 1 + 2)
    tick(buffer, 4.0)
    (point,) = points(buffer)
    assert (point.num_pushed, point.num_trained, point.num_delivered, point.num_unused) == (
        5,
        2,
        2,
        2,
    )
    assert point.num_items == buffer.num_items
    assert point.num_bytes == buffer.num_bytes
    assert point.num_pushed_bytes > point.num_bytes
    assert (point.seconds, point.num_open_groups, point.num_ready_units) == (4.0, 1, 0)
    assert point.mean_reward == pytest.approx(0.4 / 5)
    assert point.solve_ratio == 2 / 5
    assert point.mean_response_tokens == NUM_RESPONSE
    assert (point.mean_staleness, point.max_staleness) == (2.0, 2)
    assert point.mean_seconds_in_buffer is not None
    assert (point.num_groups, point.num_zero_variance_groups) == (2, 0)
    (consumer,) = point.consumers
    assert (consumer.name, consumer.num_delivered, consumer.num_acked) == ("trainer", 2, 2)
    found = trends(buffer)
    assert sum(found.rewards.counts) == 5
    assert sum(found.response_tokens.counts) == 5
    assert sum(found.staleness.counts) == sum(found.seconds_in_buffer.counts) == 2
    assert not found.advantages.counts


async def test_raw_consumers_train_nothing(world: World) -> None:
    consumers = [{"name": "critic", "raw": True}, "trainer"]
    buffer = await world.holding(push((1, 0), (2, 0)), group_by="none", consumers=consumers)
    await consume(buffer, 2, "critic")
    tick(buffer)
    (point,) = points(buffer)
    assert (point.num_trained, point.num_delivered, point.num_ready_units) == (0, 0, 2)
    assert point.mean_seconds_in_buffer is None
    assert [consumer.num_acked for consumer in point.consumers] == [2, 0]


async def test_means_of_advantages_have_a_sign(world: World) -> None:
    buffer = await world.computing(pushed((1, 0), reward=0.0), **GROUPS, advantage=GRPO)
    await buffer.push(pushed((1, 1), reward=1.0))
    await settle(buffer)
    tick(buffer)
    spread = trends(buffer).advantages
    assert spread.min is not None
    assert spread.max is not None
    assert spread.min == pytest.approx(-spread.max)
    assert spread.mean == pytest.approx(0.0, abs=1e-6)
    assert spread.max > 0.5
    await consume(buffer, 1, step=0)
    (step,) = steps(buffer)
    assert step.advantages == spread


async def test_an_idle_buffer_keeps_its_points_small(world: World) -> None:
    buffer = await world.holding(push((1, 0)), group_by="none", consumers=["trainer"])
    for _ in range(400):
        tick(buffer)
    found = points(buffer)
    assert len(buffer.state.telemetry.trends._points) <= 2
    assert len(found) == KEPT_SECONDS / INTERVAL_SECONDS + 1
    assert len(buffer.state.telemetry.trends._points[-1][1]) == len(found)
    assert {point.num_items for point in found} == {1}
    assert {round(b.time - a.time, 6) for a, b in pairwise(found)} == {5.0}
    assert len(buffer.state.telemetry.trends._minutes) <= 17


async def test_how_far_back(world: World) -> None:
    buffer = await world.holding(push((1, 0)), group_by="none", consumers=["trainer"])
    tick(buffer, 1.0)
    with pytest.raises(errors.InvalidRequestError):
        past.trends(buffer, -1.0)
    with pytest.raises(errors.InvalidRequestError):
        past.trends(buffer, float("nan"))
    assert len(past.trends(buffer, 1e9).points) == 1


async def test_the_clock_makes_points(world: World) -> None:
    buffer = await world.holding(push((1, 0)), group_by="none", consumers=["trainer"])
    buffer.tick(clock.now() + INTERVAL_SECONDS)
    assert points(buffer)
    tick(buffer)
    buffer.tick(points(buffer)[-1].time + 0.1)
    assert len(points(buffer)) == 2


# --- steps


async def test_a_step_says_what_it_consumed(world: World) -> None:
    buffer = await world.create(**GROUPS)
    await buffer.publish(4)
    for task, reward in ((1, 0.0), (2, None)):
        for run in range(2):
            given = {} if reward is None else {"reward": reward}
            await buffer.push(pushed((task, run), info={"model_version": 3 - run}, **given))
    before = time.time()
    first, second = await leased(buffer, 1), await leased(buffer, 1)
    await buffer.publish(9)
    for lease in (first, second):
        await buffer.ack(lease.id, step=11)
    (step,) = steps(buffer)
    assert (step.consumer, step.step, step.num_experiences) == ("trainer", 11, 4)
    assert (step.num_groups, step.num_leases, step.groups) == (2, 2, ("2/1", "2/2"))
    assert (step.num_compared_groups, step.num_zero_variance_groups) == (2, 1)
    assert step.response_tokens == 4 * NUM_RESPONSE
    assert (step.mean_staleness, step.max_staleness) == (1.5, 2), "as it was at delivery"
    assert step.first_ack_time is not None
    assert step.last_ack_time is not None
    assert before - 1 < step.first_ack_time <= step.last_ack_time < before + 60
    assert sum(step.rewards.counts) == 4
    assert step.is_retained
    assert not step.is_partial
    await buffer.declare_safe("trainer", 11)
    assert not steps(buffer)[0].is_retained
    assert steps(buffer)[0].num_experiences == 4, "what has left was consumed all the same"


async def test_a_rewound_step_never_happened(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1), (2, 0), (2, 1)), **GROUPS)
    await consume(buffer, 1, step=0)
    await consume(buffer, 1, step=1)
    assert [step.step for step in steps(buffer)] == [1, 0]
    await buffer.rewind("trainer", 0)
    assert [step.step for step in steps(buffer)] == [0]
    await consume(buffer, 1, step=1)
    assert steps(buffer, step=1)[0].num_experiences == 2
    assert not steps(buffer, step=2)
    await buffer.declare_safe("trainer", 1)
    await until(lambda: buffer.num_items == 0)
    found = past.departures(buffer, reason="", unused_only=False, limit=0).departures
    assert sorted([ack.step for ack in one.acked_by] for one in found) == [[0], [0], [1], [1]]


async def test_a_rewind_keeps_what_was_acknowledged_up_to_its_step(world: World) -> None:
    consumers = [{"name": "trainer", "replay": True}, {"name": "critic"}]
    buffer = await world.holding(push((1, 0)), group_by="none", consumers=consumers)
    for step in (1, 2, 3):
        await consume(buffer, 1, step=step)
    await consume(buffer, 1, "critic", step=9)
    await buffer.rewind("trainer", 2)
    seq = next(iter(buffer.state.contents)).record.seq
    found = [(ack.consumer, ack.step) for ack in buffer.state.telemetry.acks(seq)]
    assert found == [("trainer", 1), ("trainer", 2), ("critic", 9)]


async def test_what_a_rewind_can_undo_is_known_after_a_restart(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1), (2, 0), (2, 1)), **GROUPS)
    await consume(buffer, 1, step=3)
    await consume(buffer, 1)  # For good: it leaves.
    again = await world.restart(buffer)
    (step,) = steps(again)
    assert (step.step, step.num_experiences, step.num_groups) == (3, 2, 1)
    assert (step.first_ack_time, step.mean_staleness) == (None, None)
    assert step.is_partial
    assert step.is_retained
    again.state.telemetry.trends.count()
    assert again.state.telemetry.learning.groups == {"all": 0, "some": 0, "none": 0}
    await again.declare_safe("trainer", 3)
    (one, _) = past.departures(again, reason="", unused_only=False, limit=0).departures
    assert [(ack.consumer, ack.step, ack.time) for ack in one.acked_by] == [("trainer", 3, None)]


async def test_a_thousand_steps(world: World) -> None:
    buffer = await world.create(group_by="none", consumers=[{"name": "trainer", "replay": True}])
    await buffer.push(push((1, 0)))
    telemetry = buffer.state.telemetry
    entry = next(iter(buffer.state.contents))
    for number in range(1200):
        telemetry.steps.acked("trainer", number, [entry], None, 1.0)
    found = list(past.steps(buffer, "trainer", None, 1000))
    assert (len(found), found[0].step, found[-1].step) == (1000, 1199, 200)
    assert len(list(past.steps(buffer, "", None, 3))) == 3
    with pytest.raises(errors.InvalidRequestError, match="1001 is over 1000"):
        list(past.steps(buffer, "", None, 1001))
    with pytest.raises(errors.ConsumerNotFoundError):
        list(past.steps(buffer, "nobody", None, 1))


async def test_steps_go_with_their_consumer(world: World) -> None:
    consumers = [{"name": "actor", "unit": "group"}, {"name": "critic", "unit": "group"}]
    buffer = await world.holding(push((1, 0), (1, 1)), **(GROUPS | {"consumers": consumers}))
    await consume(buffer, 1, "actor", step=2)
    await consume(buffer, 1, "critic", step=5)
    assert [(step.consumer, step.step) for step in past.steps(buffer, "", None, 0)] == [
        ("actor", 2),
        ("critic", 5),
    ]
    await change(buffer, consumers=consumers[1:])
    assert [step.consumer for step in past.steps(buffer, "", None, 0)] == ["critic"]


# --- departures


async def test_who_left_and_why(world: World) -> None:
    buffer = await world.holding(
        push((1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), dead=[(4, 1)]), **GROUPS
    )
    await consume(buffer, 1, step=6)
    await buffer.drop("2/2", "its tool broke")
    entry = buffer.find(uid(3, 0))
    assert entry is not None
    await buffer.delete([entry])
    await buffer.declare_safe("trainer", 6)
    found = past.departures(buffer, reason="", unused_only=False, limit=0)
    assert [(one.uid, one.reason) for one in found.departures] == [
        (uid(1, 1), "consumed"),
        (uid(1, 0), "consumed"),
        (uid(3, 0), "deleted"),
        (uid(2, 1), "group_dropped"),
        (uid(2, 0), "group_dropped"),
    ]
    first, dropped = found.departures[0], found.departures[-1]
    assert (first.group, first.is_trained, first.reward) == ("2/1", True, 0.2)
    assert [(ack.consumer, ack.step) for ack in first.acked_by] == [("trainer", 6)]
    assert first.acked_by[0].time is not None
    assert (dropped.message, dropped.is_trained, dropped.acked_by) == ("its tool broke", False, ())
    assert {one.reason: one.total for one in found.counts} == {
        "consumed": 2,
        "group_dropped": 2,
        "deleted": 1,
    }
    assert [sum(one.recent) for one in found.counts] == [2, 2, 1]
    assert len(found.window_times) in (1, 2)
    assert reasons(buffer, reason="deleted") == [(uid(3, 0), "deleted")]
    assert len(reasons(buffer, unused_only=True)) == 3
    assert len(reasons(buffer, limit=1)) == 1
    assert reasons(buffer, reason="no such") == []


async def test_tombstones_are_no_experiences_that_left(world: World) -> None:
    buffer = await world.holding(push((4, 0), dead=[(4, 1)]), **GROUPS)
    await consume(buffer, 1)
    assert [one for one, _ in reasons(buffer)] == [uid(4, 0)]


async def test_a_stale_one_left_for_that(world: World) -> None:
    consumer = {"name": "trainer", "staleness": {"max_lag": 1, "on_stale": "drop"}}
    buffer = await world.create(group_by="none", consumers=[consumer])
    await buffer.push(of_version(1, (1, 0)))
    await buffer.publish(9)
    await sampled(buffer)
    await until(lambda: buffer.num_items == 0)
    assert reasons(buffer) == [(uid(1, 0), "stale")]
    assert reasons(buffer, unused_only=True) == reasons(buffer)


async def test_groups_that_became_whole_are_counted_once(world: World) -> None:
    buffer = await world.create(**GROUPS)
    learning = buffer.state.telemetry.learning
    for task, rewards in ((1, (1.0, 1.0)), (2, (0.0, 1.0)), (3, (-1.0, 0.0)), (4, (0.0, 0.0))):
        for run, reward in enumerate(rewards):
            await buffer.push(pushed((task, run), reward=reward))
    assert learning.groups == {"all": 1, "some": 1, "none": 2}
    assert learning.num_zero_variance_groups == 2
    buffer.state.telemetry.trends.count()
    assert (learning.num_rewarded, learning.num_solved) == (8, 3)
    await buffer.push(pushed((5, 0)))
    await buffer.push(push(dead=[(5, 1)]))
    assert sum(learning.groups.values()) == 4, "one reward is compared with none"


async def test_rewards_that_come_later_count_once(world: World) -> None:
    buffer = await world.create(
        group_size=2,
        consumers=[{"name": "trainer", "unit": "group"}],
        advantage={"estimator": "grpo"},
        on_missing_field="wait",
    )
    await buffer.push(pushed((1, 0), (1, 1), reward=None))
    learning = buffer.state.telemetry.learning
    assert sum(learning.groups.values()) == 0
    for run, reward in ((0, 1.0), (1, 1.0), (1, 0.5)):
        await buffer.annotate([Annotation(uid=uid(1, run), reward=reward)])
    tick(buffer)
    assert (learning.num_rewarded, learning.num_solved) == (2, 2)
    assert learning.groups == {"all": 1, "some": 0, "none": 0}
    (point,) = points(buffer)
    assert (point.num_pushed, point.mean_reward, point.solve_ratio) == (2, 1.0, 1.0)


async def test_with_an_archive_the_times_of_steps_outlast_a_restart(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1), (2, 0), (2, 1)), **GROUPS, archive={})
    for step in (3, 4):
        await consume(buffer, 1, step=step)
    before = steps(buffer)
    after = steps(await world.restart(buffer))
    assert [(one.step, one.is_partial) for one in after] == [(4, True), (3, True)]
    for one, same in zip(before, after, strict=True):
        assert one.first_ack_time is not None
        assert same.first_ack_time == pytest.approx(one.first_ack_time, abs=0.5)
