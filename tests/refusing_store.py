"""A store that finds no room for chosen commits, takes its time, or dies, over the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from experience_buffer_server.store.interface import Store, StoreFullError, WriteBatch


class Refusals:
    """Decides about the commits of a world's store. It ends with the store's next opening."""

    def __init__(self, store: Store) -> None:
        self.num_next = 0
        """How many of the next commits are refused."""
        self.held: asyncio.Event | None = None
        """Commits are stored, and heard of once this is set."""
        self._commit = store.commit
        vars(store)["commit"] = self.commit

    def commit(self, batch: WriteBatch) -> Awaitable[None]:
        """As the real one, but for those refused."""
        if self.num_next:
            self.num_next -= 1
            return asyncio.ensure_future(_refuse())
        committed = asyncio.ensure_future(self._commit(batch))
        if self.held is None:
            return committed
        return asyncio.ensure_future(_hold(committed, self.held))


class Held:
    """The next commit of a world's store, which never gets there; the ones after it are real."""

    def __init__(self, store: Store) -> None:
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        commit = store.commit

        def hold(batch: WriteBatch) -> Awaitable[None]:
            vars(store)["commit"] = commit
            return self._end

        vars(store)["commit"] = hold

    def refuse(self) -> None:
        """It ends."""
        self._end.set_exception(StoreFullError("the disk is full"))


class Mortality:
    """Lets a store's process die: from then on nothing that is submitted gets to the disk."""

    def __init__(self, store: Store) -> None:
        self._commit = store.commit
        vars(store)["commit"] = self.commit
        self._on_their_way: list[Awaitable[None]] = []
        self._lost: list[asyncio.Future[None]] = []
        self.commits_left: int | None = None
        """Commits until the end; None: it isn't near."""

    def commit(self, batch: WriteBatch) -> Awaitable[None]:
        """As the real one, as long as it lives."""
        if self.commits_left is None:
            return self._commit(batch)
        if self.commits_left == 0:
            self._lost.append(asyncio.get_running_loop().create_future())
            return self._lost[-1]
        self.commits_left -= 1
        self._on_their_way.append(asyncio.ensure_future(self._commit(batch)))
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


async def begin(work: Any) -> asyncio.Task[Any]:
    """Start a call and let it go as far as its first commit."""
    task: asyncio.Task[Any] = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def _refuse() -> None:
    await asyncio.sleep(0)
    raise StoreFullError("the disk is full")


async def _hold(committed: Awaitable[None], held: asyncio.Event) -> None:
    await committed
    await held.wait()
