"""Whether the pages that are read lately were in memory, as the system counts it."""

from __future__ import annotations

import resource
from typing import Final

_CALM_READS: Final = 16
"""After so many that didn't wait for the disk, the next one isn't expected to, either."""


def major_faults() -> int:
    """How often this thread has waited for a page from a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


class PageCache:
    """What is expected of one store. Not thread-safe; belongs to its event loop.

    Small rows are read from the map on the event loop: in the cache that takes 4 us, while a thread
    takes ten times as long for it. A page that isn't there would keep everybody waiting for the disk, so
    as long as there may be some, a thread touches what will be read.
    """

    def __init__(self) -> None:
        self._num_calm = 0

    @property
    def is_cold(self) -> bool:
        """Whether a read may wait for the disk; so it is at first, and after one that did."""
        return self._num_calm < _CALM_READS

    def note(self, num_faults: int) -> None:
        """A read ended that has waited so often."""
        self._num_calm = 0 if num_faults else self._num_calm + 1
