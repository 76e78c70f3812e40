"""What waits for its commit, and who should rather wait before adding to it.

Batches commit in the order in which they were submitted. A lease or an ack, though small, waits for
all appends in front of it: tens of megabytes, a tenth of a second and more on a disk that is busy with
them. So as long as there are such small batches, only a little may be in front of the next one. Without
them, too, more than the writer can take in its next turn would only wait, with no room left in the
outbox, in front of whoever pushes little: outside, connections take turns.

A commit of its own, however small, is one that some append has to wait for: so what can wait rides
with the next append.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from experience_buffer_server.store.batch import WriteBatch
from experience_buffer_server.store.lmdb.writer_link import OUTBOX_BYTES

_MAX_BYTES: Final = OUTBOX_BYTES * 3 // 4
"""What may wait: a push more has room in the outbox."""
_MAX_WORK: Final = 12 << 20
"""The same of `Load.work`: one turn of the writer's, and one behind it. Whoever pushes little beside
those who push much waits for both."""
_LEAST_AHEAD: Final = 256 << 10
_MOST_AHEAD: Final = 2 << 20
_AHEAD_PER_SECOND: Final = 128 << 20
"""While small batches come, the same of what goes through the page cache, in bytes: so many for each
second that a commit waits for the disk, within these bounds. A lease waits for the commit before its own
and for all that shares its own; a slow disk takes its time for each, and has to be given more at once."""
_MAX_DIRECT_AHEAD: Final = 12 << 20
"""The same of what goes past the page cache. With less, those who push it get too small a share."""
_NEWS: Final = 0.1
"""What the last commit weighs in how long one waits for the disk."""
_SECONDS: Final = 0.1
"""After a small batch, the next one is expected for so long."""
_WORK_OF_DIRECT: Final = 0.3
"""A byte that goes past the page cache takes less than a third of the time (docs/performance.md)."""

_RIDE_SECONDS: Final = 0.02
"""For how long a batch waits for an append that it can commit with."""


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
        self._num_direct_bytes = 0
        self._work = 0.0
        """Theirs."""
        self._ahead: float = _LEAST_AHEAD
        """What may go through the page cache in front of a small batch."""
        self._small_time = -math.inf
        """When a batch without appends was last submitted, by `time.monotonic`."""
        self._less = asyncio.Event()

    def add(self, load: Load, *, is_small: bool) -> None:
        """A batch was submitted; a small one appends nothing."""
        self.num_bytes += load.num_bytes
        self._num_direct_bytes += load.num_direct_bytes
        self._work += load.work
        if is_small:
            self._small_time = time.monotonic()

    def remove(self, load: Load) -> None:
        """A batch has ended."""
        self.num_bytes -= load.num_bytes
        self._num_direct_bytes -= load.num_direct_bytes
        # What was rounded doesn't add up over the days.
        self._work = self._work - load.work if self.num_bytes else 0.0
        self._less.set()

    def clear(self) -> None:
        """No batch waits any more: there is nobody left to commit it."""
        self.num_bytes = self._num_direct_bytes = 0
        self._work = 0.0
        self._less.set()

    def committed(self, seconds: float) -> None:
        """A commit ended that has waited for the disk for so long."""
        ahead = min(max(_AHEAD_PER_SECOND * seconds, _LEAST_AHEAD), _MOST_AHEAD)
        self._ahead += _NEWS * (ahead - self._ahead)

    async def until_short(self) -> None:
        """Wait until an append, submitted now, finds room and keeps no small batch waiting for long."""
        while not self._is_short():
            self._less.clear()
            await self._less.wait()

    def _is_short(self) -> bool:
        if time.monotonic() - self._small_time < _SECONDS:
            num_cached_bytes = self.num_bytes - self._num_direct_bytes
            return num_cached_bytes <= self._ahead and self._num_direct_bytes <= _MAX_DIRECT_AHEAD
        return self._work <= _MAX_WORK and self.num_bytes <= _MAX_BYTES


@dataclass(slots=True, eq=False)
class Rider:
    """A batch that waits for an append to commit with."""

    batch: WriteBatch
    done: asyncio.Future[None]

    def arrive(self, submitted: asyncio.Future[Any]) -> None:
        """The commit that it is part of has ended."""
        if self.done.done():
            return
        if submitted.cancelled():
            self.done.cancel()
        elif (error := submitted.exception()) is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


class Riders:
    """Those of one store, in order. Not thread-safe; belongs to its event loop.

    Args:
        submit: Submits a batch now.
    """

    def __init__(self, submit: Callable[[WriteBatch], asyncio.Future[Any]]) -> None:
        self._submit = submit
        self._append_time = -math.inf
        """When an experience was last appended, by `time.monotonic`."""
        self._waiting: list[Rider] = []

    @property
    def are_picked_up(self) -> bool:
        """Whether experiences are being appended now: who waits won't wait in vain."""
        return time.monotonic() - self._append_time <= _RIDE_SECONDS

    def wait(self, batch: WriteBatch) -> asyncio.Future[None]:
        """Wait for an append, but not for long; the future ends with the commit."""
        loop = asyncio.get_running_loop()
        rider = Rider(batch, loop.create_future())
        self._waiting.append(rider)
        loop.call_later(_RIDE_SECONDS, self._wait_no_longer, rider)
        return rider.done

    def board(self, batch: WriteBatch) -> list[Rider]:
        """Let an append take along all who wait, before its own operations; who they are."""
        self._append_time = time.monotonic()
        riders, self._waiting = self._waiting, []
        batch.operations[:0] = [op for rider in riders for op in rider.batch.operations]
        # They were numbered before: of one buffer the last number counts.
        for rider in reversed(riders):
            batch.numbers = rider.batch.numbers | batch.numbers
        return riders

    def dismount(self) -> None:
        """Submit what waits for an append on its own, before anything else is submitted."""
        riders, self._waiting = self._waiting, []
        for rider in riders:
            self._submit(rider.batch).add_done_callback(rider.arrive)

    def _wait_no_longer(self, rider: Rider) -> None:
        if rider in self._waiting:
            self.dismount()
