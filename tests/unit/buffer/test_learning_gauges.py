"""What Prometheus reads of learning and of age, and in which words a wait is counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.batch_picking import wait_of
from experience_buffer_server.buffer.gauges import Gauges
from experience_buffer_server.buffer.learning_gauges import Watch, Watched, families
from experience_buffer_server.buffer.oldest_ready import OldestReady
from experience_buffer_server.runtime import clock
from tests.unit.buffer_verbs import consume, leased, of_version, pushed
from tests.unit.builders import NUM_RESPONSE, World, push, settle

GROUPS: dict[str, Any] = {"group_size": 2, "consumers": [{"name": "trainer", "unit": "group"}]}
ITEMS: dict[str, Any] = {"group_by": "none", "consumers": ["trainer"]}


def label(buffer: Buffer, batch_size: int) -> str:
    return wait_of(buffer.state, buffer.consumer("trainer"), batch_size).label


def samples(watched: Watched) -> dict[str, float]:
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in families([watched])
        for sample in family.samples
    }


async def test_what_was_pushed_is_counted_for_learning(world: World) -> None:
    buffer = await world.create(**GROUPS)
    for task, rewards in ((1, (1.0, 1.0)), (2, (0.0, 1.0)), (3, (-3.0, 0.0))):
        for run, reward in enumerate(rewards):
            await buffer.push(pushed((task, run), reward=reward))
    found = samples(Watch().look(buffer))
    name = buffer.name
    assert found[f"experience_buffer_rewarded_experiences_total {name}"] == 6
    assert found[f"experience_buffer_solved_experiences_total {name}"] == 3
    assert found[f"experience_buffer_zero_variance_groups_total {name}"] == 1
    assert [
        found[f"experience_buffer_whole_groups_total {name} {solved}"]
        for solved in ("all", "some", "none")
    ] == [1, 1, 1]
    # A sum that may fall is no counter.
    assert f"experience_buffer_reward_sum {name}" not in found
    assert found[f"experience_buffer_response_tokens_sum {name}"] == 6 * NUM_RESPONSE
    assert found[f"experience_buffer_reward_bucket {name} -5"] == 0
    assert found[f"experience_buffer_reward_bucket {name} -2"] == 1
    assert found[f"experience_buffer_reward_bucket {name} 0"] == 3
    assert found[f"experience_buffer_reward_bucket {name} 0.9"] == 3
    assert found[f"experience_buffer_reward_bucket {name} 1"] == 6
    assert found[f"experience_buffer_reward_bucket {name} +Inf"] == 6
    assert found[f"experience_buffer_response_tokens_bucket {name} 16"] == 6
    assert found[f"experience_buffer_reward_mean {name}"] == 0.0
    assert found[f"experience_buffer_reward_stddev {name}"] == pytest.approx(2**0.5)


async def test_an_empty_buffer_has_no_mean(world: World) -> None:
    found = samples(Watch().look(await world.create(**GROUPS)))
    assert not [name for name in found if name.startswith("experience_buffer_reward_mean")]
    assert [value for name, value in found.items() if "age_seconds" in name] == [0.0, 0.0, 0.0]


async def test_what_has_waited_longest(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    buffer = await world.holding(push((1, 0), (1, 1)), **GROUPS)
    begin = clock.now()
    monkeypatch.setattr(clock, "now", lambda: begin + 100.0)
    await buffer.push(push((2, 0)))
    await buffer.push(push((3, 0), (3, 1)))
    monkeypatch.setattr(clock, "now", lambda: begin + 130.0)
    seen = watch.look(buffer)
    assert seen.oldest_open_group_seconds == pytest.approx(30.0, abs=1e-3)
    assert seen.oldest_ready_seconds["trainer"] == pytest.approx(130.0, abs=1.0)
    assert seen.oldest_lease_seconds == {"trainer": 0.0}
    lease = await leased(buffer)
    monkeypatch.setattr(clock, "now", lambda: begin + 137.0)
    seen = watch.look(buffer)
    assert seen.oldest_lease_seconds["trainer"] == pytest.approx(7.0, abs=1e-3)
    assert seen.oldest_ready_seconds["trainer"] == pytest.approx(37.0, abs=1e-3)
    await buffer.nack(lease.id, reason="again")
    monkeypatch.setattr(clock, "now", lambda: begin + 200.0)
    assert watch.look(buffer).oldest_ready_seconds["trainer"] == pytest.approx(200.0, abs=1.0)
    await consume(buffer, 2)
    assert watch.look(buffer).oldest_ready_seconds["trainer"] == 0.0


async def test_the_oldest_is_looked_for_a_little_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experience_buffer_server.buffer import oldest_ready

    monkeypatch.setattr(oldest_ready, "_MAX_LOOKS", 2)
    consumers = [{"name": "trainer"}, {"name": "critic"}]
    buffer = await world.holding(
        push(*((1, run) for run in range(7))), **(ITEMS | {"consumers": consumers})
    )
    await consume(buffer, 6)
    one, consumer = OldestReady(), buffer.consumer("trainer")
    now = clock.now() + 10.0
    found = [one.age_seconds(buffer.state, consumer, now) > 0 for _ in range(5)]
    assert found == [False, False, False, True, True]


async def test_why_a_batch_lacks_units(world: World) -> None:
    buffer = await world.create(**GROUPS)
    assert label(buffer, 1) == "empty"
    await buffer.push(push((1, 0)))
    assert label(buffer, 1) == "incomplete"
    assert label(buffer, 2) == "empty", "all that is there isn't enough"
    await buffer.push(push((1, 1)))
    assert label(buffer, 1) == ""
    assert label(buffer, 2) == "empty"
    await buffer.push(push((2, 0)))
    assert label(buffer, 2) == "incomplete"


async def test_a_wait_for_an_unpublished_version(world: World) -> None:
    buffer = await world.create(**ITEMS, on_future_version="hold")
    await buffer.publish(1)
    await buffer.push(of_version(3, (1, 0)))
    assert label(buffer, 1) == "held"
    assert label(buffer, 2) == "empty"
    await buffer.publish(3)
    assert label(buffer, 1) == ""


async def test_a_wait_for_advantages(world: World) -> None:
    buffer = await world.create(**GROUPS, advantage={"estimator": "grpo"})
    await buffer.push(push((1, 0), (1, 1)))
    assert label(buffer, 1) == "computing"
    world.computer.start()
    await settle(buffer)
    assert label(buffer, 1) == ""


async def test_what_is_watched_is_read_on_the_loop(world: World) -> None:
    buffer, watch = await world.holding(push((1, 0), (1, 1)), **GROUPS), Watch()
    loop = asyncio.get_running_loop()
    gauges = Gauges(lambda: [buffer.stats()], loop, lambda: [watch.look(buffer)])
    found = await asyncio.to_thread(lambda: {family.name for family in gauges.collect()})
    assert "experience_buffer_reward" in found
    assert "experience_buffer_oldest_ready_age_seconds" in found


def test_nothing_says_when_a_series_was_created(world: World) -> None:
    from prometheus_client import generate_latest

    world.metrics.pushed("math", "stored", "", 1)
    text = generate_latest(world.metrics.registry).decode()
    assert "_created" not in text
    assert 'experience_buffer_build_info{implementation="CPython"' in text
