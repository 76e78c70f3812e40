"""What a sample stream does at once: batches that it asks for, and answers that it owes.

So leases and acks get to the disk together, and while batches are sent. Both belong to one stream
and its event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from experience_buffer_server.sampling.leases import Lease

MAX_AHEAD: Final = 4
"""Leases of a stream that are on their way to the disk, or there and not being sent yet."""
_MAX_ANSWERS: Final = 64
"""Messages of a peer that are acted on at once; beyond, no more are read."""
Leased = tuple[Lease | None, str]
"""A batch, or why there is none."""


class Ahead:
    """Batches that were asked for and not sent yet, in the order in which they are sent.

    Args:
        sample: Asks for a batch.
        give_back: Takes leases of which nothing was sent.
    """

    def __init__(
        self,
        sample: Callable[[], Coroutine[Any, Any, Leased]],
        give_back: Callable[[Lease], None],
    ) -> None:
        self._sample = sample
        self._give_back = give_back
        self._tasks: deque[asyncio.Task[Leased]] = deque()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    def ask(self) -> None:
        """Ask for one more, which nobody would send after `close`."""
        if self._is_closed:
            return
        self._tasks.append(asyncio.get_running_loop().create_task(self._sample()))

    async def next(self) -> Leased:
        """The one that was asked for first.

        A cancelled call cancels what it waits for, and leaves it in line for `close`.
        """
        leased = await self._tasks[0]
        if self._is_closed:
            # What should have been cancelled came to its end; `close` gives it back.
            raise asyncio.CancelledError
        self._tasks.popleft()
        return leased

    def close(self) -> None:
        """No more are sent. Idempotent."""
        self._is_closed = True
        for task in self._tasks:
            task.add_done_callback(self._ended)
            # What is cancelled before its lease is granted gives its units back itself.
            task.cancel()
        self._tasks.clear()

    def _ended(self, task: asyncio.Task[Leased]) -> None:
        if task.cancelled() or task.exception() is not None:
            return
        lease, _ = task.result()
        if lease is not None:
            self._give_back(lease)


class Answers:
    """Answers to a peer's messages: made beside each other, given in the messages' order.

    Args:
        put: Takes an answer.
    """

    def __init__(self, put: Callable[[bytes], Awaitable[None]]) -> None:
        self._put = put
        self._tasks: set[asyncio.Task[None]] = set()
        self._last: asyncio.Task[None] | None = None

    async def begin(self, make: Callable[[], Awaitable[bytes]]) -> None:
        """Make an answer, as soon as few enough are being made."""
        await self.wait(_MAX_ANSWERS - 1)
        self._last = asyncio.get_running_loop().create_task(self._answer(make, self._last))
        self._tasks.add(self._last)

    async def _answer(
        self, make: Callable[[], Awaitable[bytes]], before: asyncio.Task[None] | None
    ) -> None:
        answer = await make()
        if before is not None and not before.done():
            await asyncio.wait((before,))
        await self._put(answer)

    async def wait(self, most: int = 0) -> None:
        """Wait until at most so many are being made."""
        while True:
            done = {task for task in self._tasks if task.done()}
            self._tasks -= done
            for task in done:
                task.result()
            if len(self._tasks) <= most:
                return
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def close(self) -> None:
        """Nobody is answered any more; what was begun to be stored goes on."""
        for task in self._tasks:
            task.cancel()
