"""How much may still be stored: the limit of the store and the space on the disk.

Removing needs room too, because LMDB never overwrites a page in use. So appends are refused while
a reserve is still free, in the map and on the disk.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

FULL_CODES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Full, over quota, or a file size limit: all mean that there is no room."""
_MEBI = 1 << 20
_STEP_BYTES = 16 * _MEBI
_MIN_RESERVE_BYTES = _MEBI
_MAX_DISK_RESERVE_BYTES = 2 * _MEBI
_AHEAD_BYTES = _MEBI // 2
"""Written with zeros at once: takes half a millisecond, which small appends leave between them."""
_MIN_APPENDS_AHEAD = 16
"""Appends that fit in there; larger ones aren't worth their pages being written twice."""


def reserve_bytes(max_map_bytes: int) -> int:
    """What of the limit isn't for appends."""
    return max(_MIN_RESERVE_BYTES, max_map_bytes // 50)


class Room:
    """Decides whether appends fit and allocates disk space ahead of them.

    Space is allocated before LMDB writes to it, because a write that a full disk cuts short looks
    like an I/O error to LMDB's caller.

    The file of large payloads counts towards the limit. Its space isn't allocated ahead: a write that
    finds none says so.

    Args:
        data: The file of the map.
        max_map_bytes: Limit of the map, and of both files together.
        measure: Says how many bytes of pages hold rows; takes a while.
    """

    def __init__(self, data: Path, *, max_map_bytes: int, measure: Callable[[], int]) -> None:
        reserve = reserve_bytes(max_map_bytes)
        self._limit_bytes = max_map_bytes - reserve
        self._disk_reserve_bytes = min(reserve, _MAX_DISK_RESERVE_BYTES)
        self._file = os.open(data, os.O_RDWR | os.O_CLOEXEC)
        self._measure = measure
        self._allocated_bytes = 0
        self._is_measured = False
        self.zeroed_bytes = 0
        """Up to here the file was written, with zeros if nothing else."""
        self._live_bytes = 0
        self._file_bytes = 0
        self._large_bytes = 0
        self._large_pending_bytes = 0
        self._large_file_bytes = 0

    @property
    def live_bytes(self) -> int:
        """Pages that held rows when this was last measured, and what holds large payloads."""
        return self._live_bytes + self._large_bytes - self._large_pending_bytes

    @property
    def file_bytes(self) -> int:
        """Pages that were ever in use, and the file of large payloads."""
        return self._file_bytes + self._large_file_bytes

    def update(
        self,
        *,
        file_bytes: int,
        large_bytes: int = 0,
        large_pending_bytes: int = 0,
        large_file_bytes: int = 0,
    ) -> None:
        """Note how far the files are in use after a commit.

        Args:
            file_bytes: Pages that were ever in use.
            large_bytes: What holds large payloads, or did for somebody who may still read them.
            large_pending_bytes: The latter.
            large_file_bytes: The size of their file.
        """
        self._is_measured = False
        self._file_bytes = file_bytes
        self._allocated_bytes = max(self._allocated_bytes, file_bytes)
        self._large_bytes, self._large_file_bytes = large_bytes, large_file_bytes
        self._large_pending_bytes = large_pending_bytes

    def measure(self) -> int:
        """What nothing else can be stored in now, in bytes."""
        if not self._is_measured:
            self._live_bytes = self._measure()
            self._is_measured = True
        return self._live_bytes + self._large_bytes

    def refusal(self, append_bytes: int, large_bytes: int = 0) -> str:
        """Why appends don't fit now, or the empty string.

        Args:
            append_bytes: What they take in both files.
            large_bytes: What they take of that in the one of large payloads.
        """
        # No more pages hold rows than are in use, so mostly they needn't be counted.
        if (
            self.file_bytes + append_bytes > self._limit_bytes
            and self.measure() + append_bytes > self._limit_bytes
        ):
            return (
                f"{self.live_bytes} bytes are stored and {append_bytes} more would pass the limit "
                f"of {self._limit_bytes} (max_map_bytes less a reserve); "
                "consume or delete experiences, or raise max_map_bytes"
            )
        map_bytes = append_bytes - large_bytes
        if self.allocate(map_bytes):
            return ""
        self.measure()
        if self._live_bytes + map_bytes + self._disk_reserve_bytes <= self._allocated_bytes:
            return ""
        return (
            f"the disk is full: no room for {append_bytes} more bytes; free space on it, or "
            "consume or delete experiences"
        )

    def allocate(self, append_bytes: int) -> bool:
        """Have the disk set aside what an append of this size can take; false if it can't."""
        wanted = min(self._file_bytes + append_bytes, self._limit_bytes) + self._disk_reserve_bytes
        if wanted <= self._allocated_bytes:
            return True
        for end in (-(-wanted // _STEP_BYTES) * _STEP_BYTES, wanted):
            try:
                os.posix_fallocate(self._file, self._allocated_bytes, end - self._allocated_bytes)
            except OSError as error:
                if error.errno not in FULL_CODES:
                    # A read-only disk, or one that fails: what is written next says so.
                    return True
                continue
            self._allocated_bytes = end
            return True
        return False

    def write_ahead(self, append_bytes: int) -> None:
        """Write zeros where the next appends of this size will be, if they are small.

        Space that was only set aside makes the file system note, in its journal, that it holds data
        now: the sync of a commit then waits for that, too. Only for when nobody waits.

        Raises:
            OSError: The disk fails.
        """
        start = max(self._file_bytes, self.zeroed_bytes)
        end = min(self._file_bytes + _AHEAD_BYTES, self._allocated_bytes)
        if (
            append_bytes * _MIN_APPENDS_AHEAD > _AHEAD_BYTES
            or start - self._file_bytes >= 2 * append_bytes
            or start >= end
        ):
            return
        # Nobody reads or writes there: LMDB takes pages after the last one of its last commit only
        # in a transaction, and none is open.
        self.zeroed_bytes = end
        try:
            os.pwrite(self._file, bytes(end - start), start)
        except OSError as error:
            if error.errno not in FULL_CODES:
                raise
            # Some file systems need new space to overwrite what is set aside. Nothing is lost by it:
            # an append that finds no room is refused by itself.
            return
        os.fdatasync(self._file)

    def close(self) -> None:
        """Release the file."""
        os.close(self._file)
