"""What a sampling client is ready to receive: batches, and bytes if it says so."""

from __future__ import annotations

import asyncio


class Credits:
    """The credits of one stream. Not thread-safe; belongs to its event loop."""

    def __init__(self) -> None:
        self._num_batches = 0
        self._num_bytes: int | None = None
        """None: the client doesn't count bytes. Below 0 after a batch that exceeded them."""
        self._granted = asyncio.Event()

    def grant(self, *, num_batches: int = 0, num_bytes: int = 0) -> None:
        """Add what the client grants."""
        self._num_batches += num_batches
        if num_bytes:
            self._num_bytes = (self._num_bytes or 0) + num_bytes
        self._granted.set()

    @property
    def num_spare(self) -> int:
        """Batches that may be sent now, after those whose credits were taken; 0: it isn't known.

        Where bytes count, the next batch may go only once it is known what this one has spent.
        """
        return self._num_batches if self._num_bytes is None else 0

    def spend(self, num_bytes: int) -> None:
        """A batch of this size is sent."""
        if self._num_bytes is not None:
            self._num_bytes -= num_bytes

    async def take(self, stop: asyncio.Event) -> bool:
        """Wait until a batch may be sent and take its credit; False when `stop` is set first."""
        loop = asyncio.get_running_loop()
        while not self._may_send() and not stop.is_set():
            self._granted.clear()
            granted = loop.create_task(self._granted.wait())
            stopping = loop.create_task(stop.wait())
            try:
                await asyncio.wait((granted, stopping), return_when=asyncio.FIRST_COMPLETED)
            finally:
                granted.cancel()
                stopping.cancel()
        if stop.is_set():
            return False
        self._num_batches -= 1
        return True

    def _may_send(self) -> bool:
        return self._num_batches > 0 and (self._num_bytes is None or self._num_bytes > 0)
