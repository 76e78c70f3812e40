"""Groups page by page: every one once, whatever comes and goes in between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from experience_buffer import InvalidRequestError
from experience_buffer.looking import GroupOrder
from experience_buffer_server.buffer import present
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.inspection import glance
from experience_buffer_server.buffer.inspection.group_pages import GroupsWanted
from tests.unit.buffer_verbs import leased, of_version
from tests.unit.builders import World, push

PAIRS: dict[str, Any] = {"group_size": 2, "consumers": [{"name": "trainer", "unit": "group"}]}


async def keys(buffer: Buffer, **asked: Any) -> list[str]:
    """The keys of all pages."""
    found: list[str] = []
    token = ""
    while True:
        page, token = await present.group_page(buffer, wanted(token=token, **asked))
        found += [info.group for info in page]
        if not token:
            return found


def wanted(**asked: Any) -> GroupsWanted:
    values: dict[str, Any] = {
        "states": frozenset(),
        "prefix": "",
        "order": "stuck",
        "size": 2,
        "token": "",
    }
    return GroupsWanted(**(values | asked))


async def several(world: World) -> Buffer:
    """Groups 1, 3 and 5 are ready, 2 and 4 open, 6 held; 3 is on lease."""
    buffer = await world.create(**PAIRS)
    for task in (1, 2, 3, 4, 5):
        await buffer.push(push((task, 0)) if task in (2, 4) else push((task, 0), (task, 1)))
    first, second = await leased(buffer), await leased(buffer)
    await buffer.nack(first.id, reason="not this one")
    assert second.state == "open"
    await buffer.publish(1)
    await buffer.push(of_version(2, (6, 0), (6, 1)))
    return buffer


async def test_what_is_stuck_comes_first_then_the_oldest(world: World) -> None:
    buffer = await several(world)
    stuck = ["2/2", "2/4", "2/6"]
    for size in (1, 2, 3, 4, 100):
        assert await keys(buffer, size=size) == [*stuck, "2/1", "2/3", "2/5"]
        assert await keys(buffer, size=size, order="oldest") == [f"2/{n}" for n in range(1, 7)]
        assert await keys(buffer, size=size, order="newest") == [f"2/{n}" for n in range(6, 0, -1)]
        assert await keys(buffer, size=size, order="key") == [f"2/{n}" for n in range(1, 7)]


@pytest.mark.parametrize("order", ["stuck", "oldest", "newest", "key"])
async def test_by_state_and_by_prefix(world: World, order: GroupOrder) -> None:
    buffer = await several(world)
    by_state = {
        "open": {"2/2", "2/4"},
        "ready": {"2/1", "2/5"},
        "leased": {"2/3"},
        "held": {"2/6"},
        "computing": set(),
    }
    for state, expected in by_state.items():
        assert set(await keys(buffer, states=frozenset([state]), order=order)) == expected
    both = frozenset(["open", "held"])
    assert set(await keys(buffer, states=both, order=order)) == {"2/2", "2/4", "2/6"}
    assert await keys(buffer, prefix="2/5", order=order) == ["2/5"]
    assert await keys(buffer, prefix="3/", order=order) == []


async def test_keys_are_in_the_order_of_text_and_one_may_come_again(world: World) -> None:
    buffer = await world.create(group_size=1, late_members="new_group")
    for task in (10, 9, 100):
        await buffer.push(push((task, 0)))
    await buffer.push(push((9, 1)))
    assert await keys(buffer, order="key", size=1) == ["2/10", "2/100", "2/9", "2/9"]


@pytest.mark.parametrize("order", ["stuck", "oldest", "newest", "key"])
async def test_what_comes_and_goes_in_between_neither_doubles_nor_hides(
    world: World, order: GroupOrder
) -> None:
    buffer = await world.create(group_size=2)
    for task in range(30, 60):
        await buffer.push(push((task, 0)))
    found: list[str] = []
    token, dropped = "", set()
    for number in range(100):
        page, token = await present.group_page(buffer, wanted(token=token, order=order, size=4))
        found += [info.group for info in page]
        if not token:
            break
        await buffer.push(push((60 + number, 0)))
        for task in (30 + number, 59 - number):
            await buffer.drop(f"2/{task}", "in between")
            dropped.add(f"2/{task}")
        await buffer.drain()
    assert len(found) == len(set(found))
    staying = {f"2/{task}" for task in range(30, 60)} - dropped
    assert staying <= set(found)


async def test_a_token_of_another_order_is_refused(world: World) -> None:
    buffer = await several(world)
    _, token = await present.group_page(buffer, wanted(order="newest"))
    assert token
    for bad in (token, "s0", "x", "s0-" + "9" * 21, "s2-1", "s0-1\n"):
        with pytest.raises(InvalidRequestError, match="page_token"):
            await present.group_page(buffer, wanted(token=bad))


async def test_others_are_answered_in_between_and_no_call_looks_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await world.create(group_size=2)
    await buffer.push(push(*((task, 0) for task in range(97))))
    monkeypatch.setattr(glance, "_SLICE_SECONDS", 0.0)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert await keys(buffer, states=frozenset(["ready"]), size=50) == []
    counting.cancel()
    assert turns > 2
    monkeypatch.setattr(glance, "_MOST_SECONDS", 0.0)
    page, token = await present.group_page(buffer, wanted(states=frozenset(["ready"]), size=50))
    assert (page, token) == ([], "s0-97"), "it goes on behind what was looked at"
    assert await keys(buffer, states=frozenset(["ready"]), size=50) == []
