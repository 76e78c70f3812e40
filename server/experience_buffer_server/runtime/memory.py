"""How memory is kept and looked through: large messages and small objects come and go all the time."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 32 * 1024 * 1024
"""The most that glibc takes on 64-bit machines."""
_TRIM_THRESHOLD_BYTES = 256 * 1024 * 1024
_OLDEST_THRESHOLD = 10_000
"""Collections of the middle generation before the oldest is looked through, too."""
_ENTRIES_PER_LEFTOVER = 5_000
"""So many entries are looked through for the sake of one deleted buffer: some milliseconds."""


def keep_large_blocks() -> None:
    """Let glibc reuse large blocks instead of returning each to the kernel.

    By default every message above 128 KiB costs fresh pages, which the kernel clears one by one: a
    third of the CPU time of large pushes. At most `_TRIM_THRESHOLD_BYTES` of free memory are kept.
    Without effect where the C library isn't glibc.

    protobuf (7.36, upb) returns all free memory whenever its messages have freed 10,000 blocks, and
    nothing can be set against it. So what comes with each experience is written without a message of
    its own.
    """
    _of_glibc("mallopt", _M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    _of_glibc("mallopt", _M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


def _of_glibc(name: str, *arguments: int) -> None:
    """Call a function of the C library, if it has it."""
    if sys.platform.startswith("linux"):
        function = getattr(ctypes.CDLL(None), name, None)
        if function is not None:
            function(*arguments)


@contextmanager
def loading() -> Iterator[None]:
    """Make very many objects that stay, without the garbage collector going through them.

    While they come it would look through all of them again and again, which takes longer than
    making them. Afterwards they are left out for good, and so is the little garbage among them; what
    was needed only to make them goes back to the kernel.
    """
    gc.collect()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
        # The free memory that glibc keeps is 60 bytes per loaded experience.
        _of_glibc("malloc_trim", 0)


def sweep(*, num_leftovers: int, num_entries: int) -> bool:
    """Collect what deleted buffers have left, unless looking through what is stored costs more.

    The rooms of a buffer hold each other, and those of an old one are where the calm collector doesn't
    look. A million entries take a second to look through: that is worth it for many buffers only.

    Args:
        num_leftovers: Buffers that were deleted since it was last done.
        num_entries: Experiences stored in others.

    Returns:
        Whether it was done.
    """
    if num_leftovers * _ENTRIES_PER_LEFTOVER < num_entries:
        return False
    gc.collect()
    return True


def calm_collector() -> None:
    """Keep the garbage collector from going through all that is stored, again and again.

    Entries and groups form no cycles that outlive them: reference counts free them. Looking through
    a million of them takes a second in which nobody is answered. What is there now is left out for
    good, and what comes later is looked through a thousand times less often than by default; the
    young objects of calls and errors are collected as ever.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _OLDEST_THRESHOLD)
