"""The layout on disk: tables, keys, and values that are no rows of fields (those: `row_codec`).

Rows are sealed where they are written and unsealed where they are read; what else is encoded and
decoded here is the value within. A sealed row is its value and 8 bytes more: XXH3-64 of the value,
seeded by a hash of table and key. So a row that the disk has changed is never taken for a sound one,
nor one that has got to another key, or into another table. It guards against accidents of disks,
memory and file systems, not against somebody who changes rows on purpose.

A change here that an older or newer server would misread needs another `FORMAT_VERSION`. Nothing
here opens a store.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from hashlib import blake2b
from typing import Final, NamedTuple

from xxhash import xxh3_64_digest, xxh3_64_hexdigest, xxh3_64_intdigest

from experience_buffer_server.store.interface import DamagedRecordError, departed_name

FORMAT_VERSION: Final = 6
MAGIC: Final = b"experience-buffer store "
FORMAT_KEY: Final = b"format"


def format_value(version: int) -> bytes:
    """The format row of a store: plain text, because servers of all versions must understand it."""
    text = MAGIC + str(version).encode()
    return text + b", sealed " + xxh3_64_hexdigest(text).encode()


FORMAT_VALUE: Final = format_value(FORMAT_VERSION)
MAX_LMDB_KEY_BYTES = 511
"""Longest key that LMDB takes as built by default."""

PAGE_BYTES = 4096
"""Only for estimates; LMDB uses the system's page size."""


class Table(IntEnum):
    """The named databases; the name on disk is the member's name in lower case."""

    META = 0
    BUFFERS = 1
    PAYLOADS = 2
    RECORDS = 3
    GROUPS = 4
    LEASES = 5
    PROGRESS = 6
    ADVANTAGES = 7
    MEMORY = 8
    MEMORY_LOG = 9
    CONSUMERS = 10
    MAGNITUDES = 11
    COUNTERS = 12
    """By buffer, the highest number given to an experience."""
    BUFFER_COPIES = 13
    """The rows of `BUFFERS` again: everything of a buffer depends on its row."""
    EXTENTS = 14
    """By the keys of `PAYLOADS`, where large payloads lie in `payloads.bin`; they have no row there."""
    FREED = 15
    """Runs of blocks of `payloads.bin` that older states of the store still have."""
    DEPARTED = 16
    """By seq, what has left a buffer and isn't archived yet; its payload and what was computed stay."""

    @property
    def disk_name(self) -> bytes:
        """Name of the LMDB database."""
        return self.name.lower().encode()


LAST_BUFFER_KEY = b"last buffer"
"""In `META`: the highest id that a buffer was given, whatever became of the buffer."""
MAX_DBS = 32
MAX_READERS = 1024

_BUFFER = struct.Struct(">I")
_NUMBERED = struct.Struct(">IQ")
_TIME = struct.Struct(">d")
_MAGNITUDE = struct.Struct(">d")
_COUNTER = struct.Struct(">Q")
_EXTENT = struct.Struct(">QQ8s")
_FREED = struct.Struct(">4xQQ")
_MAX_FILE_BYTES = 2**62

buffer_key = _BUFFER.pack
"""(buffer id): the key of a buffer's row and its counter, and the prefix of all its rows, 4 bytes."""

numbered_key = _NUMBERED.pack
"""(buffer id, number): records, progress, advantages, magnitudes and what has left by seq; groups and
leases by id."""


def number_of(key: bytes | memoryview) -> int:
    """The number in a `numbered_key`."""
    return int.from_bytes(key[4:], "big")


def row_label(table: Table, key: bytes) -> str:
    """The uid, name or number that a key stands for; empty for a buffer's own rows."""
    if table is Table.META:
        return key.decode(errors="replace")
    if table in (Table.PAYLOADS, Table.EXTENTS, Table.CONSUMERS, Table.MEMORY):
        return key[4:].decode(errors="replace").replace("\0", " ")
    if table in (Table.MEMORY_LOG, Table.FREED):
        return key[4:].hex()
    return str(number_of(key)) if len(key) == _NUMBERED.size else ""


def row_name(table: Table, key: bytes) -> str:
    """Name a row: table, buffer, and uid, name or number."""
    label = row_label(table, key)
    if table is Table.META:
        return f"{table.disk_name.decode()}: row {label}"
    buffer_id = int.from_bytes(key[:4], "big")
    return f"{table.disk_name.decode()}: buffer {buffer_id}" + (f" row {label}" if label else "")


def named_key(buffer_id: int, name: str) -> bytes:
    """The key of a consumer's row."""
    return _checked(_BUFFER.pack(buffer_id) + name.encode())


payload_key = named_key
"""(buffer id, uid): the key of an experience's payload."""


def departed_payload_key(key: bytes) -> bytes:
    """Where the payload of what has left (its `numbered_key`) is kept once its uid is free."""
    return key[:4] + departed_name(number_of(key)).encode()


def memory_key(buffer_id: int, kind: str, key: str) -> bytes:
    """The key of a remembered value."""
    return _checked(_BUFFER.pack(buffer_id) + kind.encode() + b"\0" + key.encode())


def memory_log_key(remembered: bytes, time: float) -> bytes:
    """The key under which a remembered value (its `memory_key`) is found by time.

    Non-negative doubles, big endian, sort as their bytes do. The digest keeps apart what is
    remembered at the same instant; a hash because both keys together would be too long for LMDB.
    """
    return remembered[:4] + _TIME.pack(time) + blake2b(remembered, digest_size=16).digest()


def memory_log_time(key: bytes | memoryview) -> float:
    """The time in a `memory_log_key`, seconds since the Unix epoch."""
    return float(_TIME.unpack_from(key, 4)[0])


def encode_memory(time: float, value: bytes) -> bytes:
    """A remembered value with its time."""
    return _TIME.pack(time) + value


def memory_time(encoded: bytes | memoryview) -> float:
    """When a value was remembered, seconds since the Unix epoch."""
    return float(_TIME.unpack_from(encoded)[0])


def memory_value(encoded: bytes | memoryview) -> bytes:
    """The remembered value itself."""
    return bytes(encoded[_TIME.size :])


def _checked(key: bytes) -> bytes:
    if len(key) > MAX_LMDB_KEY_BYTES:
        raise ValueError(f"key of {len(key)} bytes; the store takes {MAX_LMDB_KEY_BYTES}: {key!r}")
    return key


encode_magnitude = _MAGNITUDE.pack
"""What the start needs of computed advantages: a row of 8 bytes instead of one per token."""


def decode_magnitude(value: bytes | memoryview) -> float:
    """Read a magnitude back."""
    return float(_MAGNITUDE.unpack(value)[0])


encode_counter = _COUNTER.pack


def decode_counter(value: bytes | memoryview) -> int:
    """Read a counter back."""
    return int(_COUNTER.unpack(value)[0])


class Extent(NamedTuple):
    """Where a large payload lies in `payloads.bin`."""

    offset: int
    num_bytes: int
    checksum: bytes
    """Of the payload: what its row in `PAYLOADS` would be sealed with."""


def encode_extent(extent: Extent) -> bytes:
    """A row of `EXTENTS`."""
    return _EXTENT.pack(*extent)


def decode_extent(value: bytes | memoryview) -> Extent:
    """Read an extent back.

    Raises:
        struct.error: It isn't one, or is beyond any file.
    """
    extent = Extent(*_EXTENT.unpack(value))
    if extent.offset + extent.num_bytes > _MAX_FILE_BYTES:
        raise struct.error(f"{extent.num_bytes} bytes at {extent.offset} are beyond any file")
    return extent


def freed_key(transaction: int, offset: int) -> bytes:
    """The key of a freed run: by the transaction that has freed it, and where it begins.

    It begins with zeros: it belongs to no buffer.
    """
    return _FREED.pack(transaction, offset)


def decode_freed_key(key: bytes | memoryview) -> tuple[int, int]:
    """Transaction and offset of a freed run."""
    transaction, offset = _FREED.unpack(key)
    return transaction, offset


# --- seals

SEAL_BYTES: Final = 8
DECODE_ERRORS: Final = (ValueError, TypeError, struct.error, DamagedRecordError)
"""What unsealing and decoding raise of a row that isn't as it was written."""


def seal(table: int, key: bytes, value: bytes) -> bytes:
    """The row as it is stored."""
    return value + xxh3_64_digest(value, xxh3_64_intdigest(key, table))


def seal_in_place(table: int, key: bytes, row: memoryview) -> memoryview:
    """The row as it is stored, made of a value that has `SEAL_BYTES` of room at its end."""
    value = row[:-SEAL_BYTES]
    row[-SEAL_BYTES:] = xxh3_64_digest(value, xxh3_64_intdigest(key, table))
    return row


def is_sound(table: int, key: bytes | memoryview, stored: bytes | memoryview) -> bool:
    """Whether a stored row is as it was written."""
    seed = xxh3_64_intdigest(key, table)
    return xxh3_64_digest(stored[:-SEAL_BYTES], seed) == stored[-SEAL_BYTES:]


def unseal(table: int, key: bytes | memoryview, stored: memoryview) -> memoryview:
    """The value of a stored row: a view, valid as long as `stored` is.

    Raises:
        DamagedRecordError: It isn't as it was written.
    """
    value = stored[:-SEAL_BYTES]
    if xxh3_64_digest(value, xxh3_64_intdigest(key, table)) != stored[-SEAL_BYTES:]:
        raise DamagedRecordError(f"its {len(stored)} bytes don't match their checksum")
    return value
