"""Worlds whose store is in memory, but for tests that are marked `on_disk`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.builders import World


@pytest.fixture
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    on_disk = request.node.get_closest_marker("on_disk") is not None
    world = World(tmp_path / "store", in_memory=not on_disk)
    await world.open()
    yield world
    await world.close()
