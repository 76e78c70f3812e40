"""Clients that mean harm or are broken: raw sockets, HTTP/2 by hand, and what a server takes up."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.integration.server import Server

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SERVICE: Final = "/experience_buffer.v1.ExperienceBuffer"
_SETTINGS: Final = b"\0\0\0\4\0\0\0\0\0"
_HEADERS, _DATA = 1, 0
_END_HEADERS: Final = 4


def resident_bytes(server: Server) -> int:
    """Memory of the server and its children."""
    pids = (server.pid, *server.children())
    return sum(_status(pid, "VmRSS") * 1024 for pid in pids)


def num_files(server: Server) -> int:
    """File descriptors that the server itself has open."""
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def num_threads(server: Server) -> int:
    """Threads of the server itself."""
    return _status(server.pid, "Threads")


def _status(pid: int, key: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def connect(server: Server, *pieces: bytes) -> socket.socket:
    """A connection on which so much was said, and nothing more."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            connection.sendall(piece)
    return connection


@contextlib.contextmanager
def connections(made: Sequence[socket.socket]) -> Iterator[Sequence[socket.socket]]:
    """Closes them in the end."""
    try:
        yield made
    finally:
        for connection in made:
            connection.close()


def call_begun(method: str, message: bytes, *, stated_bytes: int) -> bytes:
    """HTTP/2 of a call whose message is said to be longer than what is sent of it."""
    data = b"\0" + struct.pack(">I", stated_bytes) + message
    return PREFACE + _SETTINGS + call_headers(f"{SERVICE}/{method}") + _frame(_DATA, 0, data)


def call_headers(path: str, *, stream: int = 1, token: str = "") -> bytes:
    """HTTP/2 of a call's beginning on a connection that is open, without any message."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    if token:
        fields["authorization"] = f"Bearer {token}"
    block = b"".join(_literal(name) + _literal(value, mark=b"") for name, value in fields.items())
    return _frame(_HEADERS, _END_HEADERS, block, stream=stream)


def call_message(message: bytes, *, stream: int = 1, is_last: bool = False) -> bytes:
    """HTTP/2 of one message of a call."""
    data = b"\0" + struct.pack(">I", len(message)) + message
    return _frame(_DATA, int(is_last), data, stream=stream)


def opening(*, is_reading: bool = True) -> bytes:
    """HTTP/2 of a connection's beginning; one that isn't reading lets no answer through."""
    settings = b"" if is_reading else struct.pack(">HI", 4, 0)
    return PREFACE + _frame(4, 0, settings, stream=0)


def _literal(text: str, *, mark: bytes = b"\0") -> bytes:
    return mark + bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int, body: bytes, *, stream: int = 1) -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def garbage(rng: random.Random) -> bytes:
    """What no client says: other protocols, frames of any kind and size, noise."""
    noise = rng.randbytes(rng.choice((1, 9, 100, 5000)))
    frame = struct.pack(">I", rng.choice((0, 5, 16_384, 2**24 - 1)))[1:]
    frame += struct.pack(">BBI", rng.randrange(12), rng.randrange(256), rng.choice((0, 1, 2**31)))
    return rng.choice(
        (
            noise,
            PREFACE + noise,
            PREFACE + _SETTINGS + frame + noise,
            PREFACE + _SETTINGS + 50 * (frame[:3] + bytes([3]) + frame[4:]),
            PREFACE[: rng.randrange(len(PREFACE))] + noise,
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01" + noise,
            call_begun("Push", noise, stated_bytes=rng.choice((0, 1, 2**32 - 1))),
        )
    )
