"""Groups that were stored when a task with a `/` and a batch with one could have the same key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from experience_buffer import EID, eid
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.store import record
from tests.unit.buffer.intake.test_group_keys import groups, push_of
from tests.unit.buffer_verbs import sampled
from tests.unit.builders import World, settle

pytestmark = pytest.mark.on_disk


@contextmanager
def before() -> Iterator[None]:
    """As it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eid, "task_in_key", str)
        patch.setattr(record, "task_in_key", str)
        yield


async def updated(world: World, buffer: Buffer) -> Buffer:
    """The buffer after two starts of this version, which say the same."""
    fresh = await world.restart(buffer)
    first = groups(fresh)
    fresh = await world.restart(fresh)
    assert groups(fresh) == first
    return fresh


@pytest.mark.parametrize("group_by", ["task", "run", "step"])
@pytest.mark.parametrize("task", ["eval/1", "a%2Fb", "50%25", "%/"])
async def test_an_open_group_goes_on_under_its_key(world: World, task: str, group_by: str) -> None:
    first, second, other = EID(0, task), EID(0, task), EID("0/eval", 1)
    with before():
        buffer = await world.holding(push_of(first), group_size=2, group_by=group_by)
        assert f"0/{task}" in next(iter(groups(buffer)))
    buffer = await updated(world, buffer)
    await buffer.push(push_of(other, second))
    key = {"task": second.tid, "run": second.rid, "step": second.sid}[group_by]
    assert groups(buffer)[key] == [first.uid, second.uid]
    assert len(groups(buffer)) == 2


async def test_texts_that_tell_them_apart_stay(world: World) -> None:
    with before():
        buffer = await world.holding(push_of(EID("0/eval", 1), EID("0/eval%2F", "50%")))
    await updated(world, buffer)
    assert set(groups(buffer)) == {"0/eval/1", "0/eval%2F/50%"}


@pytest.mark.parametrize("size", [2, 3])
async def test_a_group_of_several_tasks_is_set_aside(world: World, size: int) -> None:
    with before():
        pushed = push_of(EID("0/eval", 1), EID(0, "eval/1"))
        consumers = [{"name": "trainer", "unit": "group"}]
        buffer = await world.holding(pushed, group_size=size, consumers=consumers)
        assert len(groups(buffer)) == 1
    buffer = await updated(world, buffer)
    await settle(buffer)
    lease, _ = await sampled(buffer, 1)
    assert lease is None
    (group,) = buffer.state.contents.groups
    assert "took the tasks '0/eval%2F1', '0/eval/1' for one; drop the group" in group.damage
    assert await buffer.drop("0/eval/1", "two tasks") == 2
