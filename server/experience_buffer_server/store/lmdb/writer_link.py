"""The owner's end of the way to the writer process: starting it, the socket, and memory beside that.

The owner joins a large payload in memory that they share, at the beginning of a block, and the writer
process has the disk take it from there: a socket would copy it twice, and a third copy would align it.
What there is no room for takes the socket. Where the system has no such memory, everything does.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from experience_buffer_server.runtime.memory_arena import Arena, Buffer, Place
from experience_buffer_server.store.interface import LARGE_PAYLOAD_BYTES
from experience_buffer_server.store.lmdb.writer_protocol import LENGTH

_log = logging.getLogger(__name__)

OUTBOX_BYTES: Final = 32 << 20
"""Two turns of the writer: one that it writes, and one that waits."""


class Outbox:
    """The memory as the owner has it. Belongs to one thread.

    Args:
        num_bytes: Its size, whole blocks.
    """

    def __init__(self, num_bytes: int = OUTBOX_BYTES) -> None:
        self._arena: Arena | None = None
        try:
            self._arena = Arena("outbox", num_bytes)
        except OSError as error:
            _log.warning("large payloads go to the writer process over its socket: %s", error)

    @property
    def descriptor(self) -> int:
        """Of the memory, for the writer process; negative: there is none."""
        return -1 if self._arena is None else self._arena.descriptor

    @property
    def free_bytes(self) -> int:
        """What could be put there, if it were in one piece."""
        return 0 if self._arena is None else self._arena.free_bytes

    def put_all(self, values: Sequence[Sequence[Buffer]]) -> list[Place | None]:
        """Do what `put` does for the large payloads among values; None in the place of others."""
        places: list[Place | None] = []
        try:
            for value in values:
                is_large = sum(map(len, value)) >= LARGE_PAYLOAD_BYTES
                places.append(self.put(value) if is_large else None)
        except BaseException:
            self.take_out(places)
            raise
        return places

    def put(self, pieces: Sequence[Buffer]) -> Place | None:
        """Do what `Arena.put` does; there is no room where there is no memory."""
        return None if self._arena is None else self._arena.put(pieces)

    def take_out(self, places: Iterable[Place | None]) -> None:
        """The writer has done with payloads."""
        if self._arena is not None:
            self._arena.take_out(places)

    def close(self) -> None:
        """Release the memory; the writer process keeps it as long as it needs it. Idempotent."""
        if self._arena is not None:
            self._arena.close()


class WriterLink(asyncio.Protocol):
    """Cuts what the writer sends into frames. Belongs to the event loop's thread."""

    def __init__(self, on_frame: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._received = bytearray()

    async def connect(self, connection: socket.socket) -> asyncio.WriteTransport:
        """Receive from `connection` from now on; it belongs to the transport then."""
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_unix_connection(lambda: self, sock=connection)
        except BaseException:
            connection.close()
            raise
        return transport

    def data_received(self, data: bytes) -> None:
        """Pass on every complete frame."""
        self._received += data
        start = 0
        while len(self._received) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received, start)
            end = start + LENGTH.size + length
            if len(self._received) < end:
                break
            self._on_frame(bytes(self._received[start + LENGTH.size : end]))
            start = end
        del self._received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """The writer has ended, or the owner has closed the transport."""
        self._on_lost()


def start_writer(
    path: Path, *, outbox: int, **options: float
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the writer process of a store.

    Args:
        path: The store's directory.
        outbox: Descriptor of `Outbox`; negative: there is none.
        options: The process's others, by their names.

    Returns:
        The process, and the socket to it; closing the socket ends the process.
    """
    ours, theirs = socket.socketpair()
    given = {"fd": theirs.fileno(), "path": path, "outbox": outbox, **options}
    command = [sys.executable, "-P", "-m", "experience_buffer_server.store.lmdb.writer_process"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    try:
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[fd for fd in (theirs.fileno(), outbox) if fd >= 0],
                # Ctrl-C in a terminal reaches every process of the session's foreground group.
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    ours.setblocking(False)
    return process, ours
