"""Flow control of a sample stream: what its reader is ready for, and what it hasn't taken yet.

Also what the stream does at once: batches that it asks for, and answers that it owes. So leases and
acks get to the disk together, and while batches are sent. No I/O, no gRPC. Belongs to one stream and
its event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, Final

from experience_buffer_server.runtime.response_bytes import Hold
from experience_buffer_server.sampling.leases import Lease

_MAX_MESSAGES = 4
"""Messages that wait to be sent; beyond, none is added."""
FRAME_BYTES = 1024 * 1024
"""Size at which a part of a streamed batch is sent."""
SHARED_PART_BYTES = 4 * FRAME_BYTES
"""Of a batch of payloads, what is put into shared memory at once."""
MAX_BYTES = 3 * FRAME_BYTES
"""Bytes that wait to be sent, or are being sent; beyond, no frame is assembled."""
MAX_AHEAD: Final = 4
"""Leases of a stream that are on their way to the disk, or there and not being sent yet."""
_MAX_ANSWERS: Final = 64
"""Messages of a peer that are acted on at once; beyond, no more are read."""
Leased = tuple[Lease | None, str]
"""A batch, or why there is none."""


class Outgoing:
    """The messages of one stream on their way. Not thread-safe."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_MESSAGES)
        self._num_bytes = 0
        self._less = asyncio.Event()
        self._holds: deque[tuple[bytes, Hold]] = deque()
        """Of batches, each with the message that it ends with."""

    async def put(self, message: bytes, *, last_of: Hold | None = None) -> None:
        """Add a message, as soon as few enough wait.

        Args:
            message: What is to be sent: a `SampleStreamResponse` as it goes over the wire.
            last_of: What to release once it is sent.
        """
        await self._queue.put(message)
        self._num_bytes += len(message)
        if last_of is not None:
            self._holds.append((message, last_of))

    async def room(self) -> None:
        """Wait until another frame may be assembled."""
        while self._num_bytes > MAX_BYTES:
            self._less.clear()
            await self._less.wait()

    async def end(self) -> None:
        """Nothing more comes."""
        await self._queue.put(None)

    async def messages(self) -> AsyncGenerator[bytes]:
        """All of them; when the next one is asked for, one has been sent."""
        while (message := await self._queue.get()) is not None:
            yield message
            self._num_bytes -= len(message)
            self._less.set()
            if self._holds and self._holds[0][0] is message:
                self._holds.popleft()[1].release()
            del message

    def close(self) -> None:
        """Nobody reads any more: who still has something to say needs room."""
        while not self._queue.empty():
            self._queue.get_nowait()
        while self._holds:
            self._holds.popleft()[1].release()


class Credits:
    """The credits of one stream. Not thread-safe; belongs to its event loop."""

    def __init__(self) -> None:
        self.num_granted = 0
        """Batches in all."""
        self._num_batches = 0
        self._num_bytes: int | None = None
        """None: the client doesn't count bytes. Below 0 after a batch that exceeded them."""
        self.is_taken = False
        """A credit was taken for a batch of which nothing is on its way yet."""
        self._changed = asyncio.Event()
        self._is_over = False

    def grant(self, *, num_batches: int = 0, num_bytes: int = 0) -> None:
        """Add what the client grants."""
        self.num_granted += num_batches
        self._num_batches += num_batches
        if num_bytes:
            self._num_bytes = (self._num_bytes or 0) + num_bytes
        self._changed.set()

    @property
    def num_batches(self) -> int:
        """Batches that may be asked for now, besides one that was taken.

        Where bytes count, the next one may be only once it is known what this one has spent.
        """
        if self._num_bytes is None:
            return self._num_batches
        return 1 if self._num_batches and self._num_bytes > 0 and not self.is_taken else 0

    def take(self) -> None:
        """Use a credit for a batch; `spend` follows once it is being sent, or `put_back`."""
        self._num_batches -= 1
        self.is_taken = True

    def put_back(self) -> None:
        """The batch isn't sent: the credit is there for another one."""
        self._num_batches += 1
        self.is_taken = False

    def spend(self, num_bytes: int) -> None:
        """A batch of this size is being sent."""
        self.is_taken = False
        if self._num_bytes is not None:
            self._num_bytes -= num_bytes

    def end(self) -> None:
        """Nothing more is to be sent."""
        self._is_over = True
        self._changed.set()

    async def wait(self) -> bool:
        """Wait until a batch may be sent; False after the end."""
        while not self.num_batches and not self._is_over:
            self._changed.clear()
            await self._changed.wait()
        return not self._is_over


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
