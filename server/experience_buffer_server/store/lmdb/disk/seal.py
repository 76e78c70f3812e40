"""A checksum with every row, so that a row that the disk has changed is never taken for a sound one.

A sealed row is its value and 8 bytes more: XXH3-64 of the value, seeded by a hash of table and key.
So a row that has got to another key, or into another table, is noticed, too. It guards against
accidents of disks, memory and file systems, not against somebody who changes rows on purpose.
"""

from __future__ import annotations

import struct
from typing import Final

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from experience_buffer_server.store.interface import DamagedRecordError

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
