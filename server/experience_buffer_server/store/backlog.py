"""What waits for its commit, and who should rather wait before adding to it.

Batches commit in the order in which they were submitted. A lease or an ack, though small, waits for
all appends in front of it: tens of megabytes, a tenth of a second and more on a disk that is busy with
them. So as long as there are such small batches, only a little may be in front of the next one. Without
them, too, more than the writer can take in its next turn would only wait, with no room left in the
outbox, in front of whoever pushes little: outside, connections take turns.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Final, NamedTuple

from experience_buffer_server.store.outbox import OUTBOX_BYTES

_MAX_BYTES: Final = OUTBOX_BYTES * 3 // 4
"""What may wait: a push more has room in the outbox."""
_MAX_WORK: Final = 12 << 20
"""The same of `Load.work`: one turn of the writer's, and one behind it. Whoever pushes little beside
those who push much waits for both."""
_MAX_WORK_AHEAD: Final = 2 << 20
"""The same while small batches come: enough for the writer to go on with when a commit ends."""
_SECONDS: Final = 0.1
"""After a small batch, the next one is expected for so long."""
_WORK_OF_DIRECT: Final = 0.3
"""A byte that goes past the page cache takes less than a third of the time (docs/performance.md)."""


class Load(NamedTuple):
    """What a batch brings."""

    num_bytes: int
    num_direct_bytes: int = 0
    """Of these, those of payloads that go past the page cache."""

    @property
    def work(self) -> float:
        """How long it takes, in bytes that go through the page cache."""
        return self.num_bytes - self.num_direct_bytes * (1 - _WORK_OF_DIRECT)


class Backlog:
    """The bytes of one store that wait. Not thread-safe; belongs to its event loop."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Of the batches that were submitted and have not ended."""
        self._work = 0.0
        """Theirs."""
        self._small_time = -math.inf
        """When a batch without appends was last submitted, by `time.monotonic`."""
        self._less = asyncio.Event()

    def add(self, load: Load, *, is_small: bool) -> None:
        """A batch was submitted; a small one appends nothing."""
        self.num_bytes += load.num_bytes
        self._work += load.work
        if is_small:
            self._small_time = time.monotonic()

    def remove(self, load: Load) -> None:
        """A batch has ended."""
        self.num_bytes -= load.num_bytes
        # What was rounded doesn't add up over the days.
        self._work = self._work - load.work if self.num_bytes else 0.0
        self._less.set()

    def clear(self) -> None:
        """No batch waits any more: there is nobody left to commit it."""
        self.num_bytes = 0
        self._work = 0.0
        self._less.set()

    async def until_short(self) -> None:
        """Wait until an append, submitted now, finds room and keeps no small batch waiting for long."""
        while not self._is_short():
            self._less.clear()
            await self._less.wait()

    def _is_short(self) -> bool:
        small_batches_come = time.monotonic() - self._small_time < _SECONDS
        most = _MAX_WORK_AHEAD if small_batches_come else _MAX_WORK
        return self._work <= most and self.num_bytes <= _MAX_BYTES
