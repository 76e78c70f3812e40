"""A store whose process dies on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, cast

from experience_buffer_server.store.interface import WriteBatch


class MortalStore:
    """A store whose process can die: from then on nothing that is submitted gets to the disk."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._on_their_way: list[Awaitable[None]] = []
        self._lost: list[asyncio.Future[None]] = []
        self.commits_left: int | None = None
        """Commits until the end; None: it isn't near."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def commit(self, batch: WriteBatch) -> Awaitable[None]:
        """As `Store.commit`, as long as it lives."""
        if self.commits_left is None:
            return cast(Awaitable[None], self._store.commit(batch))
        if self.commits_left == 0:
            self._lost.append(asyncio.get_running_loop().create_future())
            return self._lost[-1]
        self.commits_left -= 1
        self._on_their_way.append(asyncio.ensure_future(self._store.commit(batch)))
        return self._on_their_way[-1]

    async def die(self) -> None:
        """Everything that was submitted in time is on disk, and nobody hears of the rest."""
        for commit in self._on_their_way:
            await commit
        self._on_their_way.clear()
        for _ in range(20):
            await asyncio.sleep(0)
            for lost in self._lost:
                lost.cancel()
        self._lost.clear()
        self.commits_left = None
