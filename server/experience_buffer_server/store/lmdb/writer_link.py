"""The owner's end of the socket to the writer process: starting it, frames, its end."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from experience_buffer_server.store.lmdb.writer_protocol import LENGTH


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
