"""Experiences of one push, each with its group: new ones, ones that have come and gone."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from experience_buffer import errors
from experience_buffer_server.buffer.intake.placement import Forecast, forecast
from experience_buffer_server.buffer.intake.push_reading import Outcome, Push
from experience_buffer_server.buffer.intake.push_room import Patience
from tests.unit.buffer.leaving.test_retention import sample
from tests.unit.buffer_verbs import entry_of
from tests.unit.builders import World, eid, push, uid


async def test_groups_that_have_gone_are_looked_up_together(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await world.create(group_size=2)
    for task in (1, 2):
        await buffer.push(push((task, 0), (task, 1)))
    await buffer.ack(await sample(buffer, 4))
    await buffer.drain()
    assert len(buffer.state.contents) == 0
    asked: list[list[str]] = []
    recall = world.store.recall

    def counted(buffer_id: int, kind: str, keys: Iterable[str]) -> list[bytes | None]:
        keys = list(keys)
        if kind == "group":
            asked.append(keys)
        return recall(buffer_id, kind, keys)

    monkeypatch.setattr(world.store, "recall", counted)
    members = [(1, 2), (5, 0), (2, 2), (5, 1), (1, 3), (6, 0)]
    found = await buffer.push(push(*members))
    late = (uid(1, 2), uid(2, 2), uid(1, 3))
    assert [one.uid for one in found if one.reason == "late"] == list(late)
    assert "group '2/2' is whole; set late_members" in found[2].message
    assert [one.uid for one in found if one.status == "stored"] == [uid(5, 0), uid(5, 1), uid(6, 0)]
    assert asked == [["2/1", "2/5", "2/2", "2/6"]]
    await buffer.push(push((6, 1)))
    assert len(asked) == 1
    assert [group.row.closed for group in buffer.state.contents.groups] == ["whole", "whole"]


async def test_a_group_is_closed_by_as_many_as_it_lacks(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)), group_size=3)
    leaving = entry_of(buffer, 1, 0)
    leaving.leaving = True
    await buffer.push(push((1, 2)))
    (group,) = buffer.state.contents.groups
    assert (group.row.closed, group.num_members) == ("", 2)
    await buffer.push(push((1, 3)))
    assert (group.row.closed, group.num_members) == ("whole", 3)


async def test_tombstones_alone_are_counted(world: World) -> None:
    buffer = await world.create()
    dead = [(eid(1, run), "gone") for run in range(98)]
    with pytest.raises(errors.InvalidRequestError, match="98 experiences in one push, the limit"):
        await buffer.push(Push(tombstones=dead))
    assert len(buffer.state.contents) == 0
    await buffer.push(Push(tombstones=dead[:-1]))


async def test_what_follows_the_last_member_in_one_push_is_late(world: World) -> None:
    buffer = await world.create(group_size=2)
    found = await buffer.push(push((1, 0), (1, 1), (1, 2), (2, 0), (1, 3)))
    assert [one.reason for one in found] == [None, None, "late", None, "late"]
    again = await buffer.push(push((1, 4), (1, 4), (2, 1), (2, 1)))
    assert [one.status for one in again] == ["refused", "refused", "stored", "duplicate"]
    newer = await world.create(2, group_size=2, late_members="new_group")
    await newer.push(push((1, 0), (1, 1), (1, 2)))
    assert [group.num_members for group in newer.state.contents.groups] == [2, 1]


async def test_what_is_left_of_a_dropped_group_of_no_known_size(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1), (1, 2)), group_size=0)
    lease = await sample(buffer, 1)
    await buffer.drop("2/1", "no use")
    (late,) = await buffer.push(push((1, 3)))
    assert "group '2/1' was dropped with 1 of 1 members (no use)" in late.message
    await buffer.ack(lease)
    await buffer.drain()
    assert len(buffer.state.contents) == 0


def reasons(found: Sequence[Outcome]) -> list[str | None]:
    return [one.reason for one in found]


@pytest.mark.parametrize("on_full", ["refuse", "evict", "block"])
async def test_what_comes_too_late_needs_no_room(world: World, on_full: str) -> None:
    buffer = await world.create(group_size=2, on_full=on_full, max_items=4)
    await buffer.push(push((1, 0), (1, 1), (2, 0), (2, 1)))
    patience = Patience(deadline=time.monotonic() + 60, stop=asyncio.Event())
    found = await asyncio.wait_for(buffer.push(push((2, 2), (1, 2)), patience), 10)
    assert reasons(found) == ["late", "late"]
    assert [group.num_members for group in buffer.state.contents.groups] == [2, 2]


async def test_only_what_joins_makes_room(world: World) -> None:
    buffer = await world.create(group_size=2, on_full="evict", max_items=6)
    await buffer.push(push((1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)))
    found = await buffer.push(push(*((4, run) for run in range(6))))
    await buffer.drain()
    assert reasons(found) == [None, None, *["late"] * 4]
    assert [group.row.key for group in buffer.state.contents.groups] == ["2/2", "2/3", "2/4"]


@pytest.mark.parametrize("unit", ["group", "item"])
async def test_a_limiter_counts_each_group_that_a_push_opens(world: World, unit: str) -> None:
    most = 2 if unit == "group" else 4
    limiter = {"samples_per_insert": 1, "min_diff": 0, "max_diff": most}
    consumer = {"name": "trainer", "unit": unit, "limiter": limiter}
    buffer = await world.create(
        group_size=2,
        late_members="new_group",
        consumers=[consumer],
        advantage={"estimator": "rloo"},
    )
    with pytest.raises(errors.ResourceExhaustedError, match="trainer"):
        await buffer.push(push(*((1, run) for run in range(5))))
    await buffer.push(push((1, 0), (1, 1), (1, 2)))
    await buffer.push(push((1, 3)))
    with pytest.raises(errors.ResourceExhaustedError, match="trainer"):
        await buffer.push(push((1, 4)))
    assert [group.num_members for group in buffer.state.contents.groups] == [2, 2]


async def test_a_place_is_for_one_group_of_its_key(world: World) -> None:
    pacing = {"consumer": "trainer", "max_staleness": 0, "batch_size": 2}
    buffer = await world.create(
        group_size=2,
        late_members="new_group",
        consumers=[{"name": "trainer", "unit": "group"}],
        pacing=pacing,
    )
    now = time.time()
    assert buffer.flow.pacing.reserve(["2/1"], now=now, ttl_seconds=60).granted == ["2/1"]
    with pytest.raises(errors.ResourceExhaustedError, match="this push begins 2"):
        await buffer.push(push(*((1, run) for run in range(6))))
    await buffer.push(push(*((1, run) for run in range(3))))
    await buffer.push(push((1, 3)))
    # Another group of that key takes a place, and there is none.
    assert not buffer.flow.pacing.reserve(["2/1"], now=now, ttl_seconds=60).granted
    with pytest.raises(errors.ResourceExhaustedError, match="this push begins 1"):
        await buffer.push(push((1, 4)))


@pytest.mark.parametrize("late_members", ["refuse", "new_group"])
@pytest.mark.parametrize("seed", range(4))
async def test_what_is_forecast_happens(
    world: World, monkeypatch: pytest.MonkeyPatch, late_members: str, seed: int
) -> None:
    chance = random.Random(seed)
    buffer = await world.create(group_size=chance.choice([0, 2, 3]), late_members=late_members)
    forecasts: list[Forecast] = []

    def noted(*given: Any) -> Forecast:
        forecasts.append(forecast(*given))
        return forecasts[-1]

    monkeypatch.setattr("experience_buffer_server.buffer.intake.push_reading.forecast", noted)
    for number in range(60):
        members = {
            (chance.randrange(4), chance.randrange(200)) for _ in range(chance.randint(1, 9))
        }
        dead = [(9, number)] if chance.random() < 0.2 else []
        ids = {group.row.id for group in buffer.state.contents.groups}
        before = set(map(id, buffer.state.contents))
        sent = push(*members, dead=dead, size=chance.choice([0, 0, 0, 2, 3, 4]))
        await buffer.push(sent)
        new = [entry for entry in buffer.state.contents if id(entry) not in before]
        opened = [group for group in buffer.state.contents.groups if group.row.id not in ids]
        seen = forecasts[-1]
        assert [one.uid for one in seen.joining] == [entry.record.uid for entry in new]
        assert [one.uid for one in seen.opening] == [
            entry.record.uid for entry in new if entry.group in opened
        ]
        assert seen.opened == Counter(group.row.key for group in opened)
        if chance.random() < 0.3:
            doomed = chance.choice(list(buffer.state.contents))
            await buffer.delete([doomed])
