"""What a sample stream has assembled and its reader hasn't taken yet.

Counts only: no I/O, no gRPC. Belongs to one stream and its event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from experience_buffer_server.responses import Hold

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
