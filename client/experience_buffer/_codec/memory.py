"""Memory for what is received and sent: had from the kernel, it costs more than all copies.

A page that a process touches for the first time takes the kernel longer than copying forty. So large
blocks are kept and used again, and what is too large for that comes in huge pages. Pure.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import Final

MOST_KEPT_BYTES: Final = 32 * 1024 * 1024 - 64 * 1024
"""Just below the largest block that glibc learns to keep, on 64-bit machines."""


def keep_large_blocks() -> None:
    """Let this process keep the memory of messages that it has sent, for those that come.

    glibc returns large blocks to the kernel, and gets them back page by page, until it has seen one
    of their size being freed. Free memory of at most twice `MOST_KEPT_BYTES` may stay with the
    process, where it has used as much.
    """
    bytes(MOST_KEPT_BYTES)  # Asked for as zeros, so none of it is touched.


def joined(pieces: Sequence[bytes | memoryview]) -> bytearray | memoryview:
    """Pieces one after the other, in writable memory that nothing else refers to."""
    num_bytes = sum(map(len, pieces))
    if num_bytes <= MOST_KEPT_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return bytearray().join(pieces)
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A kernel that has no huge pages gives others.
        block.madvise(mmap.MADV_HUGEPAGE)
    for piece in pieces:
        block.write(piece)
    return memoryview(block)
