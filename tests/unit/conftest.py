"""A store and buffers per test."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experience_buffer_server.store.lmdb import writer_link
from tests.nursery import nursery
from tests.unit.builders import World


def _popen(*arguments: Any, **options: Any) -> Any:
    """The nursery's, which starts with its first process."""
    return nursery().popen(*arguments, **options)


@pytest.fixture(autouse=True, scope="session")
def forked_writers() -> Iterator[None]:
    """Stores' writers are forked: a test takes less time than the import of their modules."""
    with pytest.MonkeyPatch.context() as patch:
        forked = SimpleNamespace(Popen=_popen, DEVNULL=subprocess.DEVNULL)
        patch.setattr(writer_link, "subprocess", forked)
        yield


@pytest.fixture
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """One whose store is in memory, but for tests that are marked `on_disk`."""
    on_disk = request.node.get_closest_marker("on_disk") is not None
    world = World(tmp_path / "store", in_memory=not on_disk)
    await world.open()
    yield world
    await world.close()
