"""Single rows and keys, as a transaction of a reader has them. Nothing here opens one."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from typing import TypeVar

import lmdb

from experience_buffer_server.store.interface import DamagedRecordError, DepartedRow, Found
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import DECODE_ERRORS, Table, unseal

_Row = TypeVar("_Row")
Decode = Callable[[memoryview], _Row]
"""From the value of a row to what it says; raises as `disk.format.DECODE_ERRORS`."""


def keys_from(
    txn: lmdb.Transaction[memoryview], db: lmdb._Database, prefix: bytes
) -> Iterator[bytes]:
    """The keys that begin so, in order."""
    with txn.cursor(db) as cursor:
        if not cursor.set_range(prefix):
            return
        for found in cursor.iternext(values=False):
            key = bytes(found)
            if not key.startswith(prefix):
                return
            yield key


def major_faults() -> int:
    """How often this thread has waited for a page from a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def as_it_lies(value: memoryview) -> memoryview:
    """In place of a decoder, where the bytes themselves are wanted."""
    return value


def read_row(
    table: Table, key: bytes, stored: memoryview | None, decode: Decode[_Row]
) -> Found[_Row]:
    """A row as it was read; None where there is none."""
    if stored is None:
        return None
    try:
        return decode(unseal(table, key, stored))
    except DECODE_ERRORS as error:
        return DamagedRecordError(f"{disk.row_name(table, key)} can't be read back: {error}")


def departed_place(key: bytes, row: DepartedRow) -> bytes:
    """The key of the payload of what has left."""
    if row.uid_freed:
        return disk.departed_payload_key(key)
    return disk.payload_key(int.from_bytes(key[:4], "big"), row.record.uid)
