"""A buffer with an archive, and what writes and reads it in the test's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experience_buffer_server.archive.lookup import Lookup
from experience_buffer_server.archive.writer_process import Writer
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.runtime import clock
from tests.unit.builders import World, want


class Archive:
    """The archive of one buffer, written when it is told to."""

    def __init__(self, world: World, root: Path) -> None:
        self.world = world
        self.root = root
        self.writer = Writer(root, world.store)

    async def create(self, **changes: Any) -> Buffer:
        """A buffer whose consumer takes items."""
        return await self.world.create(**({"group_by": "none", "archive": {}} | changes))

    async def write(self, buffer: Buffer, **limits: Any) -> dict[str, Any]:
        """Write what waits; what the writer answers."""
        box = buffer.state.outbox
        taken = box.take(10**6, 1 << 40)
        refused, box.refused = [tuple(one) for one in box.refused], []
        answer = self.writer.handle(
            {"kind": "write", "buffer": buffer.id, "name": buffer.name, "seqs": taken}
            | {"refused": refused, "max_age_seconds": 0.0, "max_bytes": 1 << 40}
            | {"now": clock.now()}
            | limits
        )
        if "error" in answer:
            box.not_written(taken)
        else:
            await box.written(taken)
        return answer

    def lookup(self, buffer: Buffer) -> Lookup:
        """What looks into it, as a process would that has just begun."""
        return Lookup(self.root / str(buffer.id), buffer.id, self.world.store)

    def files(self, buffer: Buffer) -> list[str]:
        """Names of its files."""
        return sorted(file.name for file in (self.root / str(buffer.id)).iterdir())


async def consume(buffer: Buffer, count: int, *, step: int | None = None) -> None:
    """Sample and acknowledge so many experiences."""
    lease, _ = await buffer.sample("trainer", want(count), buffer.state.version_changed)
    assert lease is not None
    await buffer.ack(lease.id, step=step)
    await buffer.drain()


@pytest.fixture
def archive(world: World, tmp_path: Path) -> Archive:
    return Archive(world, tmp_path / "archive")
