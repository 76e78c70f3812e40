"""Buffers by name: created, changed, deleted, loaded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from experience_buffer import errors
from experience_buffer_server.settings.server import Settings
from tests.unit.builders import World, push, settings


async def test_buffers_are_created_changed_and_deleted(world: World) -> None:
    registry = world.registry()
    await registry.load()
    assert [buffer.name for buffer in registry.all()] == ["default"]
    with pytest.raises(errors.InvalidRequestError, match="buffer name 'a b'"):
        await registry.create("a b", settings())
    first = await registry.create("math", settings(group_size=3))
    assert await registry.create("math", settings(group_size=3), exist_ok=True) is first
    with pytest.raises(errors.AlreadyExistsError, match="settings: group_size is 3, not 5; create"):
        await registry.create("math", settings(group_size=5), exist_ok=True)
    with pytest.raises(errors.AlreadyExistsError, match="with exist_ok that it may be"):
        await registry.create("math", settings(group_size=3))
    await asyncio.gather(
        registry.update("math", {"group_size": 7}), registry.update("math", {"lease_seconds": 11.0})
    )
    await first.push(push((1, 0)))
    with pytest.raises(errors.WrongStateError, match="holds 1 experiences grouped by task"):
        await registry.update("math", {"group_by": "run"})
    assert await registry.get("math").publish(13) is None
    again = world.registry()
    await again.load()
    assert again.get("math").settings == settings(group_size=7, lease_seconds=11.0)
    assert again.get("math").row.policy_version == 13
    with pytest.raises(errors.WrongStateError, match="set force"):
        await registry.delete("math", force=False)
    assert await registry.delete("math", force=True) == 1
    with pytest.raises(errors.BufferNotFoundError, match="no buffer 'math'"):
        registry.get("math")


async def test_an_archive_needs_a_store_on_a_disk(world: World) -> None:
    """Said by the file, by `create_buffer` and by `update_buffer` in the same words."""
    registry = world.registry()
    with pytest.raises(errors.InvalidRequestError, match=r"archive: .*this one is in memory"):
        await registry.create("math", settings(archive={}))
    await registry.create("math", settings())
    with pytest.raises(errors.InvalidRequestError, match=r"archive: .*this one is in memory"):
        await registry.update("math", {"archive": {"max_age_seconds": 61.5}})
    assert registry.get("math").settings.archive is None
    given: dict[str, Any] = {"store": {"memory": True}, "buffers": {"math": {"archive": {}}}}
    with pytest.raises(ValueError, match=r"buffers\.math\.archive: .*this one is in memory"):
        Settings(**given)
