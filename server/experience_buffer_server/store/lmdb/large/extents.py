"""Where in the file of large payloads there is room: free runs of blocks, and who takes them. Pure.

What a transaction takes and frees is its own until it commits; `rollback` undoes it. What was freed
may be overwritten only once nobody can read it any more: no reader, and no state of the store that
a crash may bring back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from experience_buffer._transport.free_runs import Runs
from experience_buffer_server.runtime.memory_arena import whole_blocks

_MOST_RECLAIMED: Final = 1000
"""Runs in a transaction."""


class Freed(NamedTuple):
    """A run that was freed and may still be read."""

    transaction: int
    """The one that freed it: older states of the store still have it."""
    offset: int
    num_bytes: int
    """Whole blocks."""


class Extents:
    """The room of one file. Belongs to one thread.

    Args:
        used: Offset and bytes of every run in use, in any order; where they overlap, damage has made
            them, and the blocks count as used.
        freed: What was freed and not yet reclaimed.
    """

    def __init__(self, used: Iterable[tuple[int, int]], freed: Iterable[Freed] = ()) -> None:
        self._pending: deque[Freed] = deque(sorted(freed))
        self._pending_bytes = sum(run.num_bytes for run in self._pending)
        taken = [*used, *((run.offset, run.num_bytes) for run in self._pending)]
        self._free = Runs()
        self.end = 0
        """Where the file ends."""
        for offset, num_bytes in sorted(taken):
            if offset > self.end:
                self._free.add(self.end, offset)
            self.end = max(self.end, offset + whole_blocks(num_bytes))
        self._next = 0
        """Where the last one was placed ends: what comes together lies together."""
        self._old_end = self.end
        self._placed: list[tuple[int, int]] = []
        self._freed: list[Freed] = []
        self._reclaimed: list[Freed] = []

    @property
    def used_bytes(self) -> int:
        """Blocks that hold payloads, or may still be read."""
        return self.end - self._free.num_bytes

    @property
    def pending_bytes(self) -> int:
        """Of `used_bytes`, what waits for its readers to end."""
        return self._pending_bytes

    @property
    def oldest_pending(self) -> int | None:
        """The first transaction that freed what waits for its readers to end; None if nothing does."""
        return self._pending[0].transaction if self._pending else None

    def reclaim(self, newest: int) -> list[Freed]:
        """Take back what transactions up to `newest` have freed; it can be placed at once.

        Of very much the rest is left for the next time: somebody waits for this transaction.
        """
        found: list[Freed] = []
        while (
            self._pending
            and self._pending[0].transaction <= newest
            and len(found) < _MOST_RECLAIMED
        ):
            run = self._pending.popleft()
            self._pending_bytes -= run.num_bytes
            found.append(run)
            self._free.add(run.offset, run.offset + run.num_bytes)
        self._reclaimed += found
        return found

    def place(self, num_bytes: int) -> int:
        """Take room for so many bytes; its offset."""
        size = whole_blocks(num_bytes)
        offset = self._free.take(size, near=self._next)
        if offset is None:
            offset = self._free.take_last(self.end)
            self.end = offset + size
        self._placed.append((offset, size))
        self._next = offset + size
        return offset

    def free(self, transaction: int, offset: int, num_bytes: int) -> Freed:
        """Note that a transaction has freed a run."""
        run = Freed(transaction, offset, whole_blocks(num_bytes))
        self._freed.append(run)
        return run

    def commit(self) -> None:
        """The transaction is stored."""
        self._pending.extend(self._freed)
        self._pending_bytes += sum(run.num_bytes for run in self._freed)
        self._old_end = self.end
        self._placed, self._freed, self._reclaimed = [], [], []

    def rollback(self) -> None:
        """The transaction isn't stored: everything is as it was before."""
        for offset, size in self._placed:
            self._free.add(offset, offset + size)
        self._free.cut(self._old_end)
        self.end = self._old_end
        for run in self._reclaimed:
            self._free.remove(run.offset, run.offset + run.num_bytes)
        self._pending.extendleft(reversed(self._reclaimed))
        self._pending_bytes += sum(run.num_bytes for run in self._reclaimed)
        self._placed, self._freed, self._reclaimed = [], [], []
