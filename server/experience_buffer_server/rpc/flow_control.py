"""Flow control of a sample stream: what its reader is ready for, and what it hasn't taken yet.

Counts only: no I/O, no gRPC. Belongs to one stream and its event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from experience_buffer_server.runtime.response_bytes import Hold

_MAX_MESSAGES = 4
"""Messages that wait to be sent; beyond, none is added."""
FRAME_BYTES = 1024 * 1024
"""Size at which a part of a streamed batch is sent."""
SHARED_PART_BYTES = 4 * FRAME_BYTES
"""Of a batch of payloads, what is put into shared memory at once."""
MAX_BYTES = 3 * FRAME_BYTES
"""Bytes that wait to be sent, or are being sent; beyond, no frame is assembled."""


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
