"""What waits for its commit, and who should rather wait before adding to it.

Batches commit in the order in which they were submitted. A lease or an ack, though small, waits for
all appends in front of it: tens of megabytes, a tenth of a second and more on a disk that is busy with
them. So as long as there are such small batches, only a little may be in front of the next one.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Final

_MAX_BYTES_AHEAD: Final = 2 << 20
"""What may wait while small batches come: enough for the writer to go on with when a commit ends."""
_SECONDS: Final = 0.1
"""After a small batch, the next one is expected for so long."""


class Backlog:
    """The bytes of one store that wait. Not thread-safe; belongs to its event loop."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Of the batches that were submitted and have not ended."""
        self._small_time = -math.inf
        """When a batch without appends was last submitted, by `time.monotonic`."""
        self._less = asyncio.Event()

    def add(self, num_bytes: int, *, is_small: bool) -> None:
        """A batch was submitted; a small one appends nothing."""
        self.num_bytes += num_bytes
        if is_small:
            self._small_time = time.monotonic()

    def remove(self, num_bytes: int) -> None:
        """A batch has ended."""
        self.num_bytes -= num_bytes
        self._less.set()

    def clear(self) -> None:
        """No batch waits any more: there is nobody left to commit it."""
        self.num_bytes = 0
        self._less.set()

    async def until_short(self) -> None:
        """Wait until an append, submitted now, keeps no small batch waiting for long."""
        while self.num_bytes > _MAX_BYTES_AHEAD and time.monotonic() - self._small_time < _SECONDS:
            self._less.clear()
            await self._less.wait()
