"""Writing the sound rows of a store into a new file: what a damaged tree of pages can't spoil."""

from __future__ import annotations

import os
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import lmdb
import msgpack

from experience_buffer_server.store.interface import StoreFullError
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk import private_files
from experience_buffer_server.store.lmdb.disk.commit_number import COMMIT_KEY
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.disk.private_files import sync
from experience_buffer_server.store.lmdb.disk.seal import SEAL_BYTES, is_sound
from experience_buffer_server.store.lmdb.large.payload_file import NAME
from experience_buffer_server.store.lmdb.large.salvage import Salvage
from experience_buffer_server.store.lmdb.writer_protocol import LENGTH

FILE_FORMAT: Final = "experience-buffer rows set aside, version 1"
_SPARE_BYTES: Final = 64 << 20
_COMMIT_BYTES: Final = 32 << 20
"""Of rows that are copied in one transaction: its pages are in memory."""


class Aside:
    """The file of the rows that are set aside. It appears with `publish`, whole and on the disk.

    It holds msgpack documents, each after its length (4 bytes, big endian): first
    `{"format", "store", "time"}`, then `{"table", "key", "value", "why"}` per row, key and value as
    they were stored (`format`, `seal`).

    Of a row of `EXTENTS` it has the payload, as far as it can be read, as a row of `PAYLOADS`, with the
    payload's own checksum in place of a seal: its blocks are written over soon. The row itself is there only where it says nothing sound, or where
    nothing of the payload can be read.
    """

    def __init__(self, file: Path, store: Path) -> None:
        self._file = file
        self._partial = file.with_name(f".partial-{file.name}")
        self._out = open(self._partial, "wb", opener=private_files.opener)  # noqa: SIM115
        self._salvage = Salvage(store)
        self.num_rows = 0
        self._write({"format": FILE_FORMAT, "store": str(store), "time": time.time()})

    def add(self, table: Table, key: bytes, stored: bytes, why: str) -> None:
        """Keep a row, and what it stands for."""
        self.num_rows += 1
        extent = _extent(key, stored) if table is Table.EXTENTS else None
        if extent is not None:
            content, num_read = self._salvage.read(extent)
            if content:
                table, stored = Table.PAYLOADS, content + extent.checksum
            why += f"; {num_read} of its {extent.num_bytes} bytes were read at {extent.offset} of {NAME}"
        row = {"table": table.disk_name.decode(), "key": key, "value": stored, "why": why}
        self._write(row)

    def publish(self) -> None:
        """Give the file its name.

        Raises:
            FileExistsError: Another has it.
        """
        self._out.flush()
        os.fsync(self._out.fileno())
        os.link(self._partial, self._file)
        sync(self._file.absolute().parent)

    def close(self) -> None:
        """Leave nothing but what was published."""
        self._salvage.close()
        self._out.close()
        self._partial.unlink(missing_ok=True)

    def _write(self, document: dict[str, Any]) -> None:
        body = msgpack.packb(document)
        self._out.write(LENGTH.pack(len(body)) + body)


class Rebuild:
    """Copies the sound rows of one environment into another, an empty one."""

    def __init__(self, aside: Aside, done: list[str]) -> None:
        self._aside = aside
        self._done = done
        self.lost: defaultdict[Table, list[bytes]] = defaultdict(list)
        """Keys of the rows that were set aside, as they are now."""

    def run(
        self,
        txn: lmdb.Transaction[memoryview],
        tables: list[lmdb._Database],
        to: lmdb.Environment,
        to_tables: list[lmdb._Database],
    ) -> None:
        """Copy all tables; what isn't as it was written goes aside."""
        for table in Table:
            if table is Table.FREED:
                self._leave_freed(_rows(txn, tables[table]))
                continue
            rows = self._sound(table, _rows(txn, tables[table]))
            while self._fill(to, table, to_tables[table], rows):
                pass

    def _leave_freed(self, rows: Iterator[tuple[bytes, bytes]]) -> None:
        """Its transactions are those of the old file, and no reader of them is left: all is free."""
        for key, stored in rows:
            if not is_sound(Table.FREED, key, stored):
                self._take(Table.FREED, key, stored, _damage(stored))

    def _fill(
        self,
        to: lmdb.Environment,
        table: Table,
        db: lmdb._Database,
        rows: Iterator[tuple[bytes, bytes]],
    ) -> bool:
        """Put rows in one transaction; whether there may be more."""
        num_bytes = 0
        with to.begin(write=True) as txn:
            for key, stored in rows:
                # At the end of the table, as long as they come in order.
                if not (
                    txn.put(key, stored, append=True, db=db)
                    or txn.put(key, stored, overwrite=False, db=db)
                ):
                    self._take(table, key, stored, "another row has its key")
                num_bytes += len(stored)
                if num_bytes >= _COMMIT_BYTES:
                    return True
        return False

    def _sound(
        self, table: Table, rows: Iterator[tuple[bytes, bytes]]
    ) -> Iterator[tuple[bytes, bytes]]:
        for key, stored in rows:
            if table is Table.META:
                if key == disk.FORMAT_KEY:
                    yield key, stored
                elif key == COMMIT_KEY and not is_sound(table, key, stored):
                    self._take(table, key, stored, "damaged")
            elif is_sound(table, key, stored):
                yield key, stored
            elif right := _key_before(table, key, stored):
                self._done.append(f"{disk.row_name(table, right)}: its key was damaged, put right")
                yield right, stored
            elif table is Table.EXTENTS and (right := _extent_before(key, stored)):
                self._done.append(f"{disk.row_name(table, key)}: it was damaged, put right")
                yield key, right
            else:
                self.lost[table].append(key)
                self._take(table, key, stored, _damage(stored))

    def _take(self, table: Table, key: bytes, stored: bytes, why: str) -> None:
        self._aside.add(table, key, stored, why)
        self._done.append(f"{disk.row_name(table, key)}: set aside ({why})")


def _rows(txn: lmdb.Transaction[memoryview], db: lmdb._Database) -> Iterator[tuple[bytes, bytes]]:
    with txn.cursor(db) as cursor:
        for key, stored in cursor:
            yield bytes(key), bytes(stored)


def _damage(stored: bytes) -> str:
    return f"damaged: its {len(stored)} bytes don't match their checksum"


def _key_before(table: Table, key: bytes, stored: bytes) -> bytes:
    """The key of a row in which one bit was changed since; empty where that isn't what is wrong.

    The checksum covers the key: it says which of a few thousand is the right one.
    """
    return next((other for other in _near(key) if is_sound(table, other, stored)), b"")


def _extent_before(key: bytes, stored: bytes) -> bytes:
    """A row of `EXTENTS` in which one bit was changed since; empty where that isn't what is wrong.

    Such a row is short enough for it, and a whole large payload depends on it.
    """
    return next((other for other in _near(stored) if is_sound(Table.EXTENTS, key, other)), b"")


def _near(data: bytes) -> Iterator[bytes]:
    """All that differ in one bit."""
    bits = int.from_bytes(data, "big")
    for place in range(8 * len(data)):
        yield (bits ^ (1 << place)).to_bytes(len(data), "big")


def _extent(key: bytes, stored: bytes) -> disk.Extent | None:
    """What a row of `EXTENTS` says, if it is sound."""
    if not is_sound(Table.EXTENTS, key, stored):
        return None
    try:
        return disk.decode_extent(stored[:-SEAL_BYTES])
    except struct.error:
        return None


def check_room(txn: lmdb.Transaction[memoryview], tables: list[lmdb._Database], to: Path) -> None:
    """Refuse before anything is written.

    Raises:
        StoreFullError: The sound rows won't fit beside the store.
    """
    num_bytes = _SPARE_BYTES
    for stat in (txn.stat(db) for db in tables):
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        num_bytes += stat["psize"] * pages
    found = os.statvfs(to)
    if num_bytes > found.f_bavail * found.f_frsize:
        raise StoreFullError(
            f"damage is taken out by writing all sound rows into a new file: that takes about "
            f"{num_bytes} bytes, {found.f_bavail * found.f_frsize} are free in {to}; nothing was "
            "changed; free some, or work on a copy of the store elsewhere"
        )
