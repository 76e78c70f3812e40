"""Experiences of one push, each with its group: new ones, ones that have come and gone."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from experience_buffer import errors
from experience_buffer_server.ingest import Push
from tests.unit.server.builders import World, eid, push, uid
from tests.unit.server.test_retention import Clock, clock, sample

__all__ = ["clock"]


async def test_groups_that_have_gone_are_looked_up_together(
    world: World, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await world.create(group_size=2)
    for task in (1, 2):
        await buffer.ingest.push(push((task, 0), (task, 1)))
    await buffer.desk.ack(await sample(buffer, 4))
    await buffer.drain()
    assert len(buffer.contents) == 0
    asked: list[list[str]] = []
    recall = world.store.recall

    def counted(buffer_id: int, kind: str, keys: Iterable[str]) -> list[bytes | None]:
        keys = list(keys)
        if kind == "group":
            asked.append(keys)
        return recall(buffer_id, kind, keys)

    monkeypatch.setattr(world.store, "recall", counted)
    members = [(1, 2), (5, 0), (2, 2), (5, 1), (1, 3), (6, 0)]
    found = await buffer.ingest.push(push(*members))
    late = (uid(1, 2), uid(2, 2), uid(1, 3))
    assert [one.uid for one in found if one.reason == "late"] == list(late)
    assert "group '2/2' is whole; set late_members" in found[2].message
    assert [one.uid for one in found if one.status == "stored"] == [uid(5, 0), uid(5, 1), uid(6, 0)]
    assert asked == [["2/1", "2/5", "2/2", "2/6"]]
    await buffer.ingest.push(push((6, 1)))
    assert len(asked) == 1
    assert [group.row.closed for group in buffer.contents.groups] == ["whole", "whole"]


async def test_a_group_is_closed_by_as_many_as_it_lacks(world: World) -> None:
    buffer = await world.create(group_size=3)
    await buffer.ingest.push(push((1, 0), (1, 1)))
    leaving = buffer.contents.by_uid(uid(1, 0))
    assert leaving is not None
    leaving.leaving = True
    await buffer.ingest.push(push((1, 2)))
    (group,) = buffer.contents.groups
    assert (group.row.closed, group.num_members) == ("", 2)
    await buffer.ingest.push(push((1, 3)))
    assert (group.row.closed, group.num_members) == ("whole", 3)


async def test_tombstones_alone_are_counted(world: World) -> None:
    buffer = await world.create()
    dead = [(eid(1, run), "gone") for run in range(98)]
    with pytest.raises(errors.InvalidRequestError, match="98 experiences in one push, the limit"):
        await buffer.ingest.push(Push(tombstones=dead))
    assert len(buffer.contents) == 0
    await buffer.ingest.push(Push(tombstones=dead[:-1]))


async def test_what_follows_the_last_member_in_one_push_is_late(world: World) -> None:
    buffer = await world.create(group_size=2)
    found = await buffer.ingest.push(push((1, 0), (1, 1), (1, 2), (2, 0), (1, 3)))
    assert [one.reason for one in found] == [None, None, "late", None, "late"]
    newer = await world.create(2, group_size=2, late_members="new_group")
    await newer.ingest.push(push((1, 0), (1, 1), (1, 2)))
    assert [group.num_members for group in newer.contents.groups] == [2, 1]


async def test_what_is_left_of_a_dropped_group_of_no_known_size(world: World, clock: Clock) -> None:
    buffer = await world.create(group_size=0)
    await buffer.ingest.push(push((1, 0), (1, 1), (1, 2)))
    lease = await sample(buffer, 1)
    await buffer.grouping.drop("2/1", "no use")
    (late,) = await buffer.ingest.push(push((1, 3)))
    assert "group '2/1' was dropped with 1 of 1 members (no use)" in late.message
    await buffer.desk.ack(lease)
    await buffer.drain()
    assert len(buffer.contents) == 0
