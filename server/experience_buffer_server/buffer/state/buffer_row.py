"""The row of a buffer on disk: its settings, its policy version, its running moments.

All that changes the row stores it as a whole, so a change that is refused may be on disk all the same,
with another one. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol

from experience_buffer import errors
from experience_buffer_server.runtime.tasks import Tasks
from experience_buffer_server.store.interface import BufferRow, Store, StoreFullError

_RETRY_SECONDS = 1.0
"""Between attempts to store the row again."""


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

    def __init__(self, owner: Owner, store: Store, tasks: Tasks) -> None:
        self._owner = owner
        self._store = store
        self._tasks = tasks
        self._turn = asyncio.Lock()
        self._is_ahead = False
        """The disk may have what was refused."""
        self._next_retry = 0.0

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
            try:
                await self._stored()
            except BaseException as error:
                row.policy_version = previous
                if isinstance(error, StoreFullError):
                    self.taken_back()
                raise
            if not self._owner.closed:
                self._owner.published(version)
            return previous

    def taken_back(self) -> None:
        """A change was refused for lack of room: store what holds again, until there is room."""
        self._is_ahead = True
        self._tasks.spawn(self._correct())

    def tick(self, now: float) -> None:
        """Try again what found no room."""
        if self._is_ahead and now >= self._next_retry:
            self._next_retry = now + _RETRY_SECONDS
            self._tasks.spawn(self._correct())

    async def _correct(self) -> None:
        self._is_ahead = False
        try:
            await self._stored()
        except StoreFullError:
            self._is_ahead = True
            raise

    def _stored(self) -> Awaitable[None]:
        batch = self._store.batch()
        batch.put_buffer(self._owner.row)
        return self._store.commit(batch)
