"""Groups as they are told: members, missing runs, and why one isn't delivered, in words."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer.looking import GroupInfo
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.inspection.groups import group_info
from experience_buffer_server.runtime import clock
from tests.unit.buffer_verbs import consume, leased, of_version, pushed, sampled
from tests.unit.builders import World, push, settle, uid

GROUPS: dict[str, Any] = {"group_size": 3, "consumers": [{"name": "trainer", "unit": "group"}]}


def told(buffer: Buffer, key: str, *, after: float = 0.0) -> GroupInfo:
    group = buffer.state.contents.groups.get(key)
    assert group is not None
    words = buffer.flow.computing.describe()
    return group_info(buffer.state, group, clock.now() + after, words)


async def test_an_open_group_says_which_runs_it_lacks_and_what_its_deadline_does(
    world: World,
) -> None:
    buffer = await world.holding(
        push((1, 2), dead=[(1, 0)]), group_deadline_seconds=60.0, on_group_deadline="drop", **GROUPS
    )
    info = told(buffer, "2/1", after=7.0)
    assert (info.state, info.num_members, info.group_size, info.num_missing) == ("open", 2, 3, 1)
    assert (info.missing_runs, info.num_tombstones, info.closed) == ((1,), 1, "")
    assert [(m.run, m.state, m.reward) for m in info.members] == [
        (0, "tombstone", None),
        (2, "waiting_for_group", pytest.approx(0.4)),
    ]
    assert info.members[0].message == "gone"
    assert info.deadline_time == pytest.approx(info.create_time + 60.0)
    assert (info.on_deadline, info.is_overdue) == ("drop", False)
    assert info.age_seconds == pytest.approx(7.0, abs=1.0)
    assert "has 2 of 3 members after 7." in info.waits_for
    assert "; run 1 is missing; at its deadline, in 5" in info.waits_for
    assert info.waits_for.endswith("it is dropped")
    assert [(place.consumer, place.state) for place in info.places] == [
        ("trainer", "waiting_for_group")
    ]


async def test_runs_that_dont_count_from_0_are_only_counted(world: World) -> None:
    buffer = await world.holding(push((1, 7)), **GROUPS)
    info = told(buffer, "2/1")
    assert (info.num_missing, info.missing_runs) == (2, ())
    buffer = await world.create(2, group_size=0, consumers=GROUPS["consumers"])
    await buffer.push(push((1, 0)))
    info = told(buffer, "2/1")
    assert (info.group_size, info.num_missing, info.missing_runs) == (0, None, ())
    assert "its size isn't known: seal it" in info.waits_for


async def test_a_group_goes_through_its_states(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1), (1, 2)), **GROUPS)
    assert (told(buffer, "2/1").state, told(buffer, "2/1").waits_for) == ("ready", "")
    lease = await leased(buffer)
    info = told(buffer, "2/1")
    assert (info.state, info.places[0].lease_id) == ("leased", lease.id)
    await buffer.ack(lease.id, step=2)
    info = told(buffer, "2/1")
    assert (info.state, info.places[0].state, info.places[0].step) == ("retained", "retained", 2)
    assert info.close_time is not None
    await buffer.push(push((2, 0), (2, 1), (2, 2)))
    lease = await leased(buffer)
    await buffer.drop("2/2", "aborted")
    info = told(buffer, "2/2")
    assert (info.state, info.closed) == ("dropped", "dropped")
    assert info.waits_for == "dropped: aborted; it leaves when nobody holds any of it"
    assert info.places[0].state == "leased"


async def test_a_group_that_waits_for_fields_or_is_computed_says_so(world: World) -> None:
    buffer = await world.holding(
        push((1, 0), (1, 1)),
        group_size=2,
        advantage={"estimator": "remax"},
        on_missing_field="wait",
    )
    info = told(buffer, "2/1")
    assert info.state == "waiting_for_fields"
    assert info.waits_for == "2 members lack baseline_reward: add them with annotate"
    buffer = await world.create(2, group_size=2, advantage={"estimator": "grpo"})
    await buffer.push(push((1, 0), (1, 1)))
    info = told(buffer, "2/1")
    assert info.state == "computing"
    assert info.waits_for.startswith("its advantages aren't there yet: the advantages of 1 group")
    for entry in buffer.state.contents:
        buffer.state.contents.set_quarantine(entry, "no finite number")
    info = told(buffer, "2/1")
    assert (info.state, info.waits_for) == ("quarantined", "no finite number")
    assert info.members[0].message == "no finite number"


async def test_what_came_back_too_often_or_is_held_says_for_whom(world: World) -> None:
    consumers = [{"name": "trainer", "unit": "group", "max_deliveries": 1}, "critic"]
    buffer = await world.holding(push((1, 0)), group_size=1, consumers=consumers)
    lease = await leased(buffer)
    await buffer.nack(lease.id, reason="out of memory")
    await buffer.drain()
    info = told(buffer, "2/1")
    assert info.state == "ready", "another consumer may have it"
    assert info.waits_for.startswith("trainer: delivered 1 times to 'trainer' without")
    assert [place.state for place in info.places] == ["quarantined", "ready"]
    await consume(buffer, 1, "critic", step=1)
    assert told(buffer, "2/1").state == "quarantined"
    await buffer.publish(1)
    await buffer.push(of_version(2, (2, 0)))
    info = told(buffer, "2/2")
    assert (info.state, info.staleness) == ("held", -1)
    assert info.waits_for.startswith("trainer: waits for policy version 2 to be published")


async def test_members_that_were_consumed_before_count_and_arent_named(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)), group_size=4)
    await consume(buffer, 1)
    await settle(buffer)
    info = told(buffer, "2/1")
    assert (info.num_members, info.num_missing, info.missing_runs) == (2, 2, ())
    assert [member.uid for member in info.members] == [uid(1, 1)]
    assert "nobody here takes groups" in info.waits_for


async def test_many_members_are_told_up_to_a_bound(world: World) -> None:
    world.limits = world.limits.model_copy(update={"max_push_items": 4096})
    buffer = await world.holding(pushed(*((1, run) for run in range(300))), group_size=2000)
    info = told(buffer, "2/1")
    assert [member.run for member in info.members] == list(range(256))
    assert info.missing_runs == tuple(range(300, 556))
    assert (info.num_members, info.num_missing) == (300, 1700)
    assert "runs 300, 301, 302, 303, 304, 305, 306, 307, ... are missing" in info.waits_for
    await sampled(buffer, 1)
