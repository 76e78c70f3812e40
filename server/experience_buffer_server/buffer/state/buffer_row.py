"""The row of a buffer on disk: its settings, its policy version, its running moments.

All that changes the row stores it as a whole, so a change that is refused may be on disk all the same,
with another one. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from experience_buffer import errors
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.change import Changes
from experience_buffer_server.buffer.state.events import BufferEvents
from experience_buffer_server.runtime.tasks import Tasks
from experience_buffer_server.store.interface import WriteBatch


class StoredRow:
    """Stores the row. Not thread-safe."""

    def __init__(
        self, state: BufferState, events: BufferEvents, changes: Changes, tasks: Tasks
    ) -> None:
        self._state = state
        self._events = events
        self._changes = changes
        self._tasks = tasks
        self._turn = asyncio.Lock()

    async def publish(self, version: int) -> int | None:
        """Note the policy version that the trainer has published; returns the one before.

        It is judged by at once, and told to those who wait for it once it is on disk.

        Raises:
            InvalidRequestError: It is below 0.
            StoreFullError: It can't be stored; the one before holds again.
            BufferNotFoundError: The buffer was deleted meanwhile.
        """
        if version < 0:
            raise errors.InvalidRequestError(
                f"version {version} must be at least 0", subject="version"
            )
        return await self._tasks.finish(self._publish(version))

    async def _publish(self, version: int) -> int | None:
        # One after the other: the one before may not turn out to be refused.
        async with self._turn:
            self._state.check_open()
            row = self._state.row
            previous, row.policy_version = row.policy_version, version
            batch = self._changes.batch()
            batch.put_buffer(row)

            def stored() -> int | None:
                if not self._state.closed:
                    self._events.published(version)
                return previous

            def failed(error: BaseException) -> None:
                row.policy_version = previous
                self.taken_back()

            return await self._changes.submit(batch, stored, failed)

    def taken_back(self) -> None:
        """A change was refused: the disk may have it, with another one, until the row is stored again."""
        self._changes.store_again(self._put, [self._state.row.id])

    def _put(self, batch: WriteBatch, _: Sequence[int]) -> None:
        batch.put_buffer(self._state.row)
