"""How much may still be stored: the limit of the map and the space on the disk.

Removing needs room too, because LMDB never overwrites a page in use. So appends are refused while
a reserve is still free, in the map and on the disk.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

FULL_CODES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Full, over quota, or a file size limit: all mean that there is no room."""
_MEBI = 1 << 20
_STEP_BYTES = 16 * _MEBI
_MIN_RESERVE_BYTES = _MEBI
_MAX_DISK_RESERVE_BYTES = 2 * _MEBI


class Room:
    """Decides whether appends fit and allocates disk space ahead of them.

    Space is allocated before LMDB writes to it, because a write that a full disk cuts short looks
    like an I/O error to LMDB's caller.
    """

    def __init__(self, data: Path, *, max_map_bytes: int) -> None:
        reserve = max(_MIN_RESERVE_BYTES, max_map_bytes // 50)
        self._limit_bytes = max_map_bytes - reserve
        self._disk_reserve_bytes = min(reserve, _MAX_DISK_RESERVE_BYTES)
        self._file = os.open(data, os.O_RDWR | os.O_CLOEXEC)
        self._allocated_bytes = 0
        self.live_bytes = 0
        """Pages that hold rows."""
        self.file_bytes = 0
        """Pages that were ever in use."""

    def update(self, *, live_bytes: int, file_bytes: int) -> None:
        """Note what the store takes after a commit."""
        self.live_bytes = live_bytes
        self.file_bytes = file_bytes
        self._allocated_bytes = max(self._allocated_bytes, file_bytes)

    def refusal(self, append_bytes: int) -> str:
        """Why appends of this size don't fit now, or the empty string."""
        wanted = self.live_bytes + append_bytes
        if wanted > self._limit_bytes:
            return (
                f"{self.live_bytes} bytes are stored and {append_bytes} more would pass the limit "
                f"of {self._limit_bytes} (max_map_bytes less a reserve); "
                "consume or delete experiences, or raise max_map_bytes"
            )
        if (
            self.allocate(append_bytes)
            or wanted + self._disk_reserve_bytes <= self._allocated_bytes
        ):
            return ""
        return (
            f"the disk is full: no room for {append_bytes} more bytes; free space on it, or "
            "consume or delete experiences"
        )

    def allocate(self, append_bytes: int) -> bool:
        """Have the disk set aside what an append of this size can take; false if it can't."""
        wanted = min(self.file_bytes + append_bytes, self._limit_bytes) + self._disk_reserve_bytes
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

    def close(self) -> None:
        """Release the file."""
        os.close(self._file)
