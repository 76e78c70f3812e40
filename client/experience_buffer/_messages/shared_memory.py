"""Memory that a client and a server on one machine share, so that payloads needn't go through gRPC.

gRPC copies a message half a dozen times between two processes; here it is copied into the memory by
one side, and out of it by the other. The server makes the memory, for one stream and as long as that
lives. Who can open it is decided by the kernel: a process of the same user, which could read the
server's own memory as well.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from experience_buffer.v1 import types_pb2

PUSH_BYTES: Final = 32 << 20
"""Of a push stream's memory: three images of 8 MB, or eight of the largest requests that a background writer
sends by default."""
NAME_PREFIX: Final = "experience-buffer-"
MIN_BYTES: Final = 64 * 1024
"""What is smaller travels in its message: gRPC takes nothing worth saving for it."""
_NAME: Final = re.compile(NAME_PREFIX + "[0-9a-f]{32}")
_BOOT: Final = "/proc/sys/kernel/random/boot_id"
_NAMESPACE: Final = "/proc/self/ns/pid"


def machine() -> str:
    """Which machine this is and by which numbers it knows its processes; empty: nobody can say.

    Two processes for which it is the same mean the same process by one number.
    """
    if sys.platform != "linux":
        return ""
    try:
        with open(_BOOT, encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat(_NAMESPACE).st_ino}"
    except OSError:
        return ""


def attach(offer: types_pb2.SharedMemory, *, writable: bool) -> memoryview:
    """The memory that a server offers.

    Args:
        offer: Where it is.
        writable: Whether it is to be written.

    Raises:
        OSError: This process may not have it, or it isn't there.
        ValueError: It isn't what the offer says.
    """
    if not _NAME.fullmatch(offer.name):
        raise ValueError(f"the server names its shared memory {offer.name[:100]!r}")
    path = f"/proc/{offer.process_id}/fd/{offer.descriptor}"
    # Looked at before it is opened: to open some files does something.
    _check_name(path, offer.name)
    descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        _check_name(f"/proc/self/fd/{descriptor}", offer.name)
        if os.fstat(descriptor).st_size != offer.num_bytes:
            raise ValueError(f"the server's shared memory has not {offer.num_bytes} bytes")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return memoryview(mmap.mmap(descriptor, offer.num_bytes, mmap.MAP_SHARED, access))
    finally:
        os.close(descriptor)


def part(memory: memoryview, span: types_pb2.MemorySpan) -> memoryview:
    """A part of shared memory, which is to be copied before it is looked at.

    Raises:
        ValueError: There is no such part.
    """
    end = span.offset + span.num_bytes
    if not 0 < span.num_bytes <= end <= len(memory):
        raise ValueError(
            f"{span.num_bytes} bytes at {span.offset} don't lie in shared memory of {len(memory)}"
        )
    return memory[span.offset : end]


def _check_name(path: str, name: str) -> None:
    """See that a descriptor is of the memory with this name.

    Raises:
        OSError: It can't be looked at.
        ValueError: It is of something else.
    """
    found = os.readlink(path)
    if found != f"/memfd:{name} (deleted)":
        raise ValueError(f"{path} is {found}, where the server has its shared memory {name}")
