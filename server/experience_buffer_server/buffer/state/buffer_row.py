"""The row of a buffer on disk: its settings, its policy version, its running moments.

All that changes the row stores it as a whole, so a change that is refused may be on disk all the same,
with another one. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from experience_buffer import errors
from experience_buffer_server.buffer.state.change import Changes
from experience_buffer_server.runtime.tasks import Tasks
from experience_buffer_server.store.interface import BufferRow, WriteBatch


class Owner(Protocol):
    """The buffer."""

    row: BufferRow
    closed: bool

    @property
    def name(self) -> str:
        """Its name."""

    def published(self, version: int) -> None:
        """A policy version is on disk."""


class StoredRow:
    """Stores the row. Not thread-safe."""

    def __init__(self, owner: Owner, changes: Changes, tasks: Tasks) -> None:
        self._owner = owner
        self._changes = changes
        self._tasks = tasks
        self._turn = asyncio.Lock()

    async def publish(self, version: int) -> int | None:
        """Note the policy version that the trainer has published; returns the one before.

        It is judged by at once, and told to those who wait for it once it is on disk.

        Raises:
            StoreFullError: It can't be stored; the one before holds again.
            BufferNotFoundError: The buffer was deleted meanwhile.
        """
        return await self._tasks.finish(self._publish(version))

    async def _publish(self, version: int) -> int | None:
        # One after the other: the one before may not turn out to be refused.
        async with self._turn:
            if self._owner.closed:
                raise errors.BufferNotFoundError(
                    f"buffer {self._owner.name!r} was deleted", subject=self._owner.name
                )
            row = self._owner.row
            previous, row.policy_version = row.policy_version, version
            batch = self._changes.batch()
            batch.put_buffer(row)

            def stored() -> int | None:
                if not self._owner.closed:
                    self._owner.published(version)
                return previous

            def failed(error: BaseException) -> None:
                row.policy_version = previous
                self.taken_back()

            return await self._changes.submit(batch, stored, failed)

    def taken_back(self) -> None:
        """A change was refused: the disk may have it, with another one, until the row is stored again."""
        self._changes.store_again(self._put, [self._owner.row.id])

    def _put(self, batch: WriteBatch, _: Sequence[int]) -> None:
        batch.put_buffer(self._owner.row)
