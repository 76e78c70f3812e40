"""Snapshots of a server that is short of something."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from experience_buffer import errors
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.settings.server import SnapshotsSection
from experience_buffer_server.store.lmdb.snapshots.snapshots import Snapshots, run_copy
from tests.unit.builders import World

pytestmark = pytest.mark.on_disk


@contextmanager
def no_descriptors() -> Iterator[None]:
    """As if the process had as many files open as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _count(metrics: Metrics, outcome: str) -> float:
    name = "experience_buffer_snapshots_total"
    return metrics.registry.get_sample_value(name, {"outcome": outcome}) or 0.0


async def test_the_clock_goes_on_after_a_snapshot_that_could_not_begin(
    world: World, tmp_path: Path
) -> None:
    metrics, to = Metrics(), tmp_path / "to"
    section = SnapshotsSection(path=to, interval_seconds=0.01, nice=0)
    snapshots = Snapshots(section, world.path, metrics)
    with no_descriptors():
        with pytest.raises(errors.InternalServerError, match="can't start the process"):
            await snapshots.take()
        await snapshots.start()
        async with asyncio.timeout(20):
            while _count(metrics, "failed") < 2:
                await asyncio.sleep(0.01)
    async with asyncio.timeout(20):
        while not _count(metrics, "taken"):
            await asyncio.sleep(0.01)
    await snapshots.close()
    assert [path.name for path in to.glob("snapshot-*")]


async def test_a_copy_that_no_thread_can_wait_for_ends(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(
        "experience_buffer_server.store.lmdb.snapshots.snapshots.asyncio.to_thread", refuse
    )
    answer = await run_copy(world.path, tmp_path / "to")
    assert (answer.outcome, "can't start new thread" in answer.message) == ("failed", True)


def test_a_folder_that_is_empty_text_is_none() -> None:
    """As of a variable that is set to nothing."""
    assert SnapshotsSection.model_validate({"path": ""}).path is None
