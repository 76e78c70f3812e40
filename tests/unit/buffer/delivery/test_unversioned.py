"""Experiences without policy version, of before a window that is judged by versions: nobody calls them fresh."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.annotation import Annotation
from experience_buffer_server.buffer.settings_checks import changed_settings
from tests.unit.buffer_verbs import of_version, sampled, take
from tests.unit.builders import World, uid

WINDOW: dict[str, Any] = {"staleness": {"max_lag": 2}}


async def change(buffer: Buffer, **changes: Any) -> None:
    await buffer.change_settings(changed_settings(buffer, changes))


async def with_window(world: World, *versions: int | None, **consumer: Any) -> Buffer:
    """A buffer of experiences with these versions, to which a window came afterwards."""
    pushes = [of_version(version, (0, run)) for run, version in enumerate(versions)]
    buffer = await world.holding(*pushes, group_size=len(versions))
    trainer = {"name": "trainer", **consumer}
    await change(buffer, consumers=[trainer])
    await change(buffer, consumers=[trainer | WINDOW])
    return buffer


async def shortfall(buffer: Buffer) -> str:
    lease, why = await sampled(buffer, 1)
    assert lease is None
    return why


HELD = (
    "1 held because no policy version is known, by which staleness.max_lag = 2 is judged; annotate"
)


@pytest.mark.parametrize("published", [None, 7])
@pytest.mark.parametrize("on_stale", ["drop", "keep", "mark"])
async def test_they_are_held_and_said_so(
    world: World, on_stale: str, published: int | None
) -> None:
    buffer = await with_window(world, None)
    if published is not None:
        await buffer.publish(published)
    await change(
        buffer, consumers=[{"name": "trainer", "staleness": {"max_lag": 2, "on_stale": on_stale}}]
    )
    assert HELD in await shortfall(buffer)
    entry = buffer.find(uid(0, 0))
    assert entry is not None
    assert buffer.state_of(entry) == "held"
    assert buffer.kept_from(entry).startswith("no policy version is known")
    assert buffer.stats().consumers[0].num_held_units == 1
    await buffer.publish(9)
    assert HELD in await shortfall(buffer)
    assert len(buffer.state.contents) == 1


async def test_those_with_a_version_come(world: World) -> None:
    buffer = await with_window(world, None, 7)
    await buffer.publish(7)
    assert await take(buffer, 1)
    assert HELD in await shortfall(buffer)


async def test_a_group_is_as_unknown_as_any_member(world: World) -> None:
    buffer = await with_window(world, 7, None, unit="group")
    await buffer.publish(7)
    assert HELD in await shortfall(buffer)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("unit", ["item", "group"])
async def test_an_annotation_says_it(world: World, unit: str, raw: bool) -> None:
    buffer = await with_window(world, None, unit=unit, raw=raw)
    await buffer.publish(7)
    assert HELD in await shortfall(buffer)
    (outcome,) = await buffer.annotate([Annotation(uid=uid(0, 0), info={"model_version": 6})])
    assert outcome.reason is None
    assert await take(buffer)


async def test_annotating_something_else_leaves_them_held(world: World) -> None:
    buffer = await with_window(world, None)
    await buffer.publish(7)
    (outcome,) = await buffer.annotate([Annotation(uid=uid(0, 0), reward=2.0)])
    assert outcome.reason is None
    assert HELD in await shortfall(buffer)


@pytest.mark.parametrize(
    "changes",
    [
        {"on_missing_version": "deliver"},
        {"consumers": [{"name": "trainer"}]},
        {"consumers": [{"name": "trainer", "staleness": {"max_age_seconds": 500.0}}]},
    ],
)
async def test_they_come_once_nothing_is_judged_by_it(
    world: World, changes: dict[str, Any]
) -> None:
    buffer = await with_window(world, None)
    await buffer.publish(7)
    assert HELD in await shortfall(buffer)
    await change(buffer, **changes)
    assert await take(buffer)


@pytest.mark.on_disk
async def test_a_restart_changes_nothing(world: World) -> None:
    buffer = await with_window(world, None)
    assert HELD in await shortfall(await world.restart(buffer))
