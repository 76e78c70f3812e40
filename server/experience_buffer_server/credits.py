"""What a sampling client is ready to receive: batches, and bytes if it says so."""

from __future__ import annotations

import asyncio


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
