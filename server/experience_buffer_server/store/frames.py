"""What the owner of a store and its writer process say to each other, over a local socket.

Each frame is its length (4 bytes, big endian) and a msgpack document. Owner to writer: a `Request`
per batch. Writer to owner: first a `Ready`, then a `Reply` per transaction. Both ends are the same
program on the same machine: frames are not validated.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack

LENGTH = struct.Struct("!I")

DELETE_BUFFER = -1
"""In place of a table: the key is a buffer's prefix; all its rows go."""
PRUNE = -2
"""In place of a table: the key is a buffer's prefix, the value `PRUNE_LIMITS`."""
INSERT_RECORD = -3
"""In place of a table: a row of table records, whose key must not be taken."""

PRUNE_LIMITS = struct.Struct("!dQ")
"""Instant in seconds since the epoch, and the most values to forget."""

Operation = tuple[int, bytes, bytes | None]
"""Table (or a code above), key, value; None deletes the key."""


class Status(IntEnum):
    """How a batch, or the opening, ended."""

    OK = 0
    FULL = 1
    """No room; nothing of the batch is stored."""
    REFUSED = 2
    """The store can't hold what the batch says; nothing of it is stored."""
    FAILED = 3
    """The writer can't go on and ends."""
    FORMAT = 4
    """The directory holds another store."""
    BUSY = 5
    """Another writer has the directory."""


class Request(NamedTuple):
    """A batch to write."""

    number: int
    append_bytes: int
    """Estimate of what its appends take on disk; 0: none, the batch may use the last room."""
    operations: list[Operation]


class Result(NamedTuple):
    """How one batch ended."""

    number: int
    status: int
    message: str = ""
    num_forgotten: int = 0
    """Values that its prunes forgot."""


class Work(NamedTuple):
    """What the writer did since its last reply, and how full the store is."""

    num_transactions: int = 0
    num_batches: int = 0
    num_operations: int = 0
    apply_seconds: float = 0.0
    """Time in puts and deletes."""
    commit_seconds: float = 0.0
    """Time in commits: writing and, if durability is "commit", fsync."""
    live_bytes: int = 0
    """Pages that hold rows."""
    file_bytes: int = 0
    """Pages that were ever in use; the difference can be reused."""
    map_bytes: int = 0
    """Current size of the map."""


class Ready(NamedTuple):
    """The writer's first word."""

    status: int
    message: str = ""


class Reply(NamedTuple):
    """After each turn of the writer: results in the order of submission."""

    results: list[Result]
    work: Work


def encode(document: Ready | Reply) -> bytes:
    """A frame with its length."""
    body: bytes = msgpack.packb(document)
    return LENGTH.pack(len(body)) + body


def decode_ready(body: bytes) -> Ready:
    """Read the writer's first frame."""
    return Ready(*msgpack.unpackb(body))


def decode_reply(body: bytes) -> Reply:
    """Read one of the writer's later frames."""
    results, work = msgpack.unpackb(body)
    return Reply([Result(*result) for result in results], Work(*work))


def decode_request(body: bytearray) -> Request:
    """Read one of the owner's frames."""
    unpacked: list[Any] = msgpack.unpackb(body)
    return Request(*unpacked)
