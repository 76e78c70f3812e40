"""The advantage worker's arithmetic in a thread of this process: a process of its own costs a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack

from experience_buffer_server.buffer.compute.worker import compute_launch
from experience_buffer_server.runtime.child_process import ChildGoneError
from experience_buffer_server.store.interface import PayloadReader


class LocalWorker:
    """Answers as `runtime.child_process.Child` does, in the order of the requests."""

    def __init__(self, reader: Callable[[], PayloadReader]) -> None:
        self._reader = reader
        self._thread = ThreadPoolExecutor(1)
        self.gone = False
        self.greeting = {"name": "cpu", "note": "", "is_compiling": False}

    async def request(self, message: Any) -> Any:
        if self.gone:
            raise ChildGoneError("closed", was_running=False)
        request = msgpack.unpackb(msgpack.packb(message))
        loop = asyncio.get_running_loop()
        return msgpack.unpackb(await loop.run_in_executor(self._thread, self._compute, request))

    def _compute(self, request: Any) -> bytes:
        answer = compute_launch(self._reader(), request, device="cpu", threads=1)
        return msgpack.packb(answer)  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Finish what is under way and end."""
        self.gone = True
        await asyncio.to_thread(self._thread.shutdown)
