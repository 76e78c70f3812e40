"""How the C library keeps memory: large messages come and go all the time."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 32 * 1024 * 1024
"""The most that glibc takes on 64-bit machines."""
_TRIM_THRESHOLD_BYTES = 256 * 1024 * 1024


def keep_large_blocks() -> None:
    """Let glibc reuse large blocks instead of returning each to the kernel.

    By default every message above 128 KiB costs fresh pages, which the kernel clears one by one: a
    third of the CPU time of large pushes. At most `_TRIM_THRESHOLD_BYTES` of free memory are kept.
    Without effect where the C library isn't glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
