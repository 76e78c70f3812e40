"""Experiences by what they are, page by page: every one once, and only those that are wanted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from experience_buffer import ConsumerNotFoundError, InvalidRequestError
from experience_buffer.looking import ExperienceState
from experience_buffer_server.buffer import present
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.inspection import experiences, glance
from experience_buffer_server.buffer.inspection.places import STATES, place_of, state_of
from experience_buffer_server.buffer.inspection.wanted import Wanted
from experience_buffer_server.buffer.state.entries import Entry
from tests.unit.buffer_verbs import consume, entry_of, leased, of_version, pushed
from tests.unit.builders import World, push, settle, uid

TWO: dict[str, Any] = {"group_by": "none", "consumers": ["trainer", "critic"]}


async def found(
    buffer: Buffer, *, size: int = 2, newest_first: bool = False, **wanted: Any
) -> list[tuple[int, int]]:
    """Task and run of what all pages have."""
    entries: list[Entry] = []
    token = ""
    while True:
        page, token = await present.experience_page(
            buffer, Wanted(**wanted), token=token, size=size, newest_first=newest_first
        )
        entries += page
        if not token:
            return [(int(entry.record.task), entry.record.run) for entry in entries]


async def test_by_what_was_pushed(world: World) -> None:
    buffer = await world.holding(
        of_version(3, (1, 0), (1, 1)),
        of_version(5, (2, 5)),
        push((3, 0), dead=[(3, 1)]),
        group_size=9,
    )
    await buffer.publish(7)
    everything = [(1, 0), (1, 1), (2, 5), (3, 0), (3, 1)]
    assert await found(buffer) == everything
    assert await found(buffer, newest_first=True) == everything[::-1]
    assert await found(buffer, reward=(0.1, 0.2)) == [(1, 1)]
    assert await found(buffer, reward=(0.2, math.inf)) == [(1, 1), (2, 5)]
    assert await found(buffer, reward=(-math.inf, 0.0)) == [(1, 0), (3, 0)]
    assert await found(buffer, policy_version=(4, 5)) == [(2, 5)]
    assert await found(buffer, staleness=(3, math.inf)) == [(1, 0), (1, 1)]
    assert await found(buffer, response_tokens=(8, 9)) == []
    assert await found(buffer, response_tokens=(7, 7)) == everything[:4]
    assert await found(buffer, uid_prefix="2/1/") == [(1, 0), (1, 1)]
    assert await found(buffer, text="/5/") == [(2, 5)]
    assert await found(buffer, tid="2/1") == [(1, 0), (1, 1)]
    assert await found(buffer, rid="2/1/1") == [(1, 1)]
    assert await found(buffer, sid="2/3/0") == [(3, 0), (3, 1)]
    assert await found(buffer, state="tombstone") == [(3, 1)]
    time = entry_of(buffer, 2, 5).record.push_time
    assert (2, 5) in await found(buffer, push_time=(time, time))
    assert await found(buffer, push_time=(time + 1000, math.inf)) == []
    assert await found(buffer, reward=(0.2, math.inf), text="/5/", policy_version=(5, 5)) == [
        (2, 5)
    ]


async def test_whether_the_response_was_cut_off(world: World) -> None:
    buffer = await world.create(**TWO)
    await buffer.push(pushed((1, 0), truncate_status="response_truncated"))
    await buffer.push(pushed((1, 1)))
    assert await found(buffer, truncated=True) == [(1, 0)]
    assert await found(buffer, truncated=False) == [(1, 1)]
    assert [e.truncated for e in buffer.state.contents] == [True, False]
    buffer = await world.restart(buffer)
    assert await found(buffer, truncated=True) == [(1, 0)]


async def test_by_flags_of_the_computation(world: World) -> None:
    buffer = await world.computed(
        pushed((1, 0), (1, 1), reward=1.0),
        push((2, 0), (2, 1), (3, 0)),
        group_size=2,
        advantage={"estimator": "grpo", "zero_variance": "mask"},
    )
    assert await found(buffer, flags=("zero_variance",)) == [(1, 0), (1, 1)]
    assert await found(buffer, flags=("zero_variance", "masked"), size=1) == [(1, 0), (1, 1)]
    assert await found(buffer, flags=("singleton",)) == []


async def test_where_it_is_as_a_whole_and_for_one_consumer(world: World) -> None:
    buffer = await world.holding(push(*((task, 0) for task in range(6))), **TWO)
    await consume(buffer, 1, step=3)
    await leased(buffer, 2)
    await consume(buffer, 2, "critic", step=4)
    assert await found(buffer, state="leased") == [(1, 0), (2, 0)]
    assert await found(buffer, state="ready") == [(3, 0), (4, 0), (5, 0)]
    assert await found(buffer, state="retained") == [(0, 0)]
    assert await found(buffer, consumer="critic", state="ready") == [(2, 0), (3, 0), (4, 0), (5, 0)]
    assert await found(buffer, consumer="critic", state="leased") == []
    assert await found(buffer, consumer="trainer", state="retained") == [(0, 0)]
    assert await found(buffer, step=4) == [(0, 0), (1, 0)]
    assert await found(buffer, step=4, consumer="trainer") == []
    assert await found(buffer, step=3, consumer="trainer", state="retained") == [(0, 0)]
    with pytest.raises(ConsumerNotFoundError):
        await found(buffer, consumer="nobody", state="ready")
    with pytest.raises(InvalidRequestError, match="give a state or a step"):
        await found(buffer, consumer="critic")


async def every_state(world: World) -> Buffer:
    consumers = [
        {"name": "trainer", "unit": "group", "max_deliveries": 1},
        {"name": "critic", "raw": True},
        {"name": "replayer", "replay": True},
    ]
    buffer = await world.computed(
        push(*((task, run) for task in range(6) for run in range(2))),
        group_size=2,
        consumers=consumers,
        advantage={"estimator": "rloo"},
    )
    await buffer.nack((await leased(buffer)).id, reason="out of memory")
    await consume(buffer, 1, step=1)
    await leased(buffer, 1)
    await leased(buffer, 3, "critic")
    await consume(buffer, 2, "critic", step=2)
    await consume(buffer, 3, "replayer", step=2)
    await buffer.publish(1)
    await buffer.push(of_version(2, (7, 0), (7, 1)))
    await buffer.push(push((8, 0), dead=[(9, 0)]))
    await settle(buffer)
    for run in range(2):
        entry = entry_of(buffer, 5, run)
        buffer.state.contents.set_quarantine(entry, "no finite number")
    return buffer


@pytest.mark.parametrize("most", [0, 20_000])
async def test_what_leads_to_them_finds_what_a_look_at_all_finds(
    world: World, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    buffer = await every_state(world)
    monkeypatch.setattr(experiences, "_MOST_LED_TO", most)
    seen: set[str] = set()
    for state in STATES:
        expected = names([e for e in buffer.state.contents if state_of(buffer.state, e) == state])
        assert await found(buffer, state=state) == expected
        seen |= {state} if expected else set()
        for name, consumer in buffer.state.consumers.items():
            expected = names(
                [e for e in buffer.state.contents if place_of(buffer.state, consumer, e) == state]
            )
            assert await found(buffer, state=state, consumer=name) == expected, (state, name)
            seen |= {state} if expected else set()
            assert (
                await found(buffer, state=state, consumer=name, newest_first=True) == expected[::-1]
            )
    assert {"leased", "quarantined", "retained", "held", "tombstone"} <= seen
    for task in range(10):
        assert await found(buffer, tid=f"2/{task}") == names(
            [e for e in buffer.state.contents if e.record.tid == f"2/{task}"]
        )


def names(entries: list[Entry]) -> list[tuple[int, int]]:
    return [(int(entry.record.task), entry.record.run) for entry in entries]


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("state", [None, "ready"])
async def test_what_comes_and_leaves_in_between_neither_doubles_nor_hides(
    world: World, newest_first: bool, state: ExperienceState | None
) -> None:
    world.limits = world.limits.model_copy(update={"max_push_items": 4096})
    buffer = await world.holding(push(*((task, 0) for task in range(300))), group_by="none")
    seen: list[tuple[int, int]] = []
    gone: set[tuple[int, int]] = set()
    token = ""
    for number in range(200):
        page, token = await present.experience_page(
            buffer, Wanted(state=state), token=token, size=7, newest_first=newest_first
        )
        seen += names(page)
        if not token:
            break
        await buffer.push(push((1000 + number, 0)))
        leaving = [(3 * number, 0), (299 - 2 * number, 0), seen[-1]]
        entries = [e for pair in leaving if (e := buffer.find(uid(*pair))) is not None]
        await buffer.delete(list(dict.fromkeys(entries)))
        gone |= set(leaving)
    assert not token
    assert len(seen) == len(set(seen))
    assert {(task, 0) for task in range(300)} - gone <= set(seen)


async def test_a_call_looks_for_a_bounded_time_and_the_next_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.limits = world.limits.model_copy(update={"max_push_items": 4096})
    buffer = await world.holding(push(*((task, 0) for task in range(300))), group_by="none")
    monkeypatch.setattr(glance, "_MOST_SECONDS", 0.0)
    page, token = await present.experience_page(
        buffer, Wanted(text="/299/"), token="", size=5, newest_first=False
    )
    assert (page, token != "") == ([], True)
    assert await found(buffer, text="/299/") == [(299, 0)]
    for bad in ("-5", "x", "9" * 21, "1\n"):
        with pytest.raises(InvalidRequestError, match="page_token"):
            await present.experience_page(buffer, Wanted(), token=bad, size=5, newest_first=False)
