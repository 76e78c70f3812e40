"""The process that walks through a store: `python -m experience_buffer_server.store.check_walk`.

It says what it is doing in lines of JSON; `check` reads them. Not for use by hand.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb

from experience_buffer_server.store import format as disk
from experience_buffer_server.store import row_codec
from experience_buffer_server.store.base import (
    BufferRow,
    DamagedRecordError,
    StoreFailedError,
    StoreFormatError,
)
from experience_buffer_server.store.check_links import Links
from experience_buffer_server.store.commits import COMMIT_KEY, commit_problem
from experience_buffer_server.store.format import Table
from experience_buffer_server.store.opening import begin, open_to_read
from experience_buffer_server.store.report import BufferCount, Finding, Kind, Report, TableCount
from experience_buffer_server.store.seal import unseal

_CHUNK_ROWS: Final = 2_000
_CHUNK_BYTES: Final = 32 << 20
"""Of rows that are read in one transaction: while it is open no page that was removed is reused."""
_DECODE_ERRORS: Final = (ValueError, TypeError, struct.error, DamagedRecordError)
_INDEX: Final = (
    Table.RECORDS,
    Table.GROUPS,
    Table.LEASES,
    Table.PROGRESS,
    Table.CONSUMERS,
    Table.MAGNITUDES,
)
"""Tables that are read in one transaction, so that they fit together."""
_LARGE: Final = (Table.PAYLOADS, Table.ADVANTAGES, Table.MEMORY, Table.MEMORY_LOG)
"""Tables that are read part by part; what doesn't fit is looked at again at the end."""
_Row = TypeVar("_Row")


class Walk:
    """One walk through one store. Not thread-safe."""

    def __init__(self, path: Path, skipped: frozenset[Table], say: Callable[[Any], None]) -> None:
        self._path = path
        self._unread = set(skipped)
        """Tables that aren't read, or not to their end."""
        self._say = say
        # Without a lock file nobody else has it open, and none must be left in a snapshot.
        lock = (path / "lock.mdb").exists()
        self._env, self._tables = open_to_read(path, lock=lock, readahead=False)
        self.report = Report(path=str(path), format_version=disk.FORMAT_VERSION)
        self._buffers: dict[int, BufferCount] = {}
        self._strange: set[tuple[Table, int]] = set()
        """Tables with rows of buffers that aren't known; they may have been created since."""
        self._links = Links(self._buffers, self.report, self._unread)

    def run(self) -> Report:
        """Look at everything."""
        with self._env:
            with begin(self._env) as txn:
                if problem := commit_problem(txn, self._tables[Table.META], self._path):
                    self._add(Kind.MISSING_COMMIT, Table.META, COMMIT_KEY, problem)
                self._read_buffers(txn)
                for table in _INDEX:
                    self._table(table, self._whole(txn, table))
            self._links.check_index()
            for table in _LARGE:
                self._table(table, self._parts(table))
            with begin(self._env) as last:
                for table, buffer_id in sorted(self._strange):
                    if last.get(disk.buffer_key(buffer_id), db=self._tables[Table.BUFFERS]) is None:
                        self._note_unknown(table, buffer_id)
                self._links.check_again(
                    lambda table, key: last.get(key, db=self._tables[table]),
                    lambda table, key: self._rows_from(last, table, key),
                )
        self.report.buffers = sorted(self._buffers.values(), key=lambda buffer: buffer.id)
        return self.report

    def _read_buffers(self, txn: lmdb.Transaction[memoryview]) -> None:
        """Known is what has a row or, where that is damaged, a copy of it."""
        rows: dict[int, BufferRow] = {}
        for table in (Table.META, Table.BUFFER_COPIES, Table.BUFFERS, Table.COUNTERS):
            for key, value in self._sound(table, self._whole(txn, table)):
                if table in (Table.BUFFERS, Table.BUFFER_COPIES):
                    row = self._decoded(table, key, value, row_codec.decode_buffer)
                    if row is not None:
                        rows[row.id] = row
        self._buffers |= {row.id: BufferCount(id=row.id, name=row.name) for row in rows.values()}

    def _table(self, table: Table, items: Iterator[tuple[bytes, memoryview]]) -> None:
        take = self._links.takers[table]
        for key, value in self._sound(table, items):
            buffer_id = int.from_bytes(key[:4], "big")
            if buffer_id not in self._buffers:
                self._strange.add((table, buffer_id))
                continue
            try:
                take(buffer_id, key, value)
            except _DECODE_ERRORS as error:
                self._note_damaged(table, key, error)

    def _sound(
        self, table: Table, items: Iterator[tuple[bytes, memoryview]]
    ) -> Iterator[tuple[bytes, memoryview]]:
        """Values of the rows that match their checksum; counted, with the others."""
        name = table.disk_name.decode()
        count = self.report.tables[name] = TableCount()
        try:
            for key, stored in items:
                count.rows += 1
                if table is Table.META and key == disk.FORMAT_KEY:
                    continue  # It was compared as a whole.
                try:
                    value = unseal(table, key, stored)
                except DamagedRecordError as error:
                    self._note_damaged(table, key, error)
                else:
                    yield key, value
        except lmdb.Error as error:
            self._unread.add(table)
            message = f"after {count.rows} rows: {error}"
            self._add(Kind.DAMAGED_PAGE, table, b"", message)

    def _decoded(
        self, table: Table, key: bytes, value: memoryview, decode: Callable[[memoryview], _Row]
    ) -> _Row | None:
        try:
            return decode(value)
        except _DECODE_ERRORS as error:
            self._note_damaged(table, key, error)
            return None

    # --- rows

    def _whole(
        self, txn: lmdb.Transaction[memoryview], table: Table
    ) -> Iterator[tuple[bytes, memoryview]]:
        if table in self._unread:
            return
        db = self._tables[table]
        self._tell(table, 0, txn.stat(db)["entries"])
        entries, number = txn.stat(db)["entries"], 0
        with txn.cursor(db) as cursor:
            for key, stored in cursor:
                if number % _CHUNK_ROWS == 0:
                    self._tell(table, number, entries)
                number += 1
                yield bytes(key), stored
        if number != entries:
            raise lmdb.CorruptedError(f"{number} rows can be reached of {entries}")

    def _parts(self, table: Table) -> Iterator[tuple[bytes, memoryview]]:
        if table in self._unread:
            return
        db, last, number = self._tables[table], b"", 0
        while True:
            num_rows = num_bytes = 0
            with begin(self._env) as txn, txn.cursor(db) as cursor:
                self._tell(table, number, txn.stat(db)["entries"])
                found = cursor.set_range(last)
                if found and bytes(cursor.key()) == last:
                    found = cursor.next()
                while found and num_rows < _CHUNK_ROWS and num_bytes < _CHUNK_BYTES:
                    last, stored = bytes(cursor.key()), cursor.value()
                    num_rows += 1
                    num_bytes += len(stored)
                    yield last, stored
                    found = cursor.next()
            number += num_rows
            if not found:
                return

    def _rows_from(
        self, txn: lmdb.Transaction[memoryview], table: Table, first: bytes
    ) -> Iterator[tuple[bytes, memoryview]]:
        with txn.cursor(self._tables[table]) as cursor:
            if cursor.set_range(first):
                for key, stored in cursor.iternext():
                    yield bytes(key), stored

    # --- what is said

    def _tell(self, table: Table, rows: int, total: int) -> None:
        self._say({"at": table.name, "rows": rows, "of": total})

    def _note_damaged(self, table: Table, key: bytes, error: Exception) -> None:
        self.report.tables[table.disk_name.decode()].damaged += 1
        self._links.damaged[table].add(key)
        self._add(Kind.DAMAGED_ROW, table, key, str(error))

    def _note_unknown(self, table: Table, buffer_id: int) -> None:
        key = disk.buffer_key(buffer_id)
        self._add(Kind.UNKNOWN_BUFFER, table, key, "rows of a buffer that has no row itself")

    def _add(self, kind: Kind, table: Table, key: bytes, message: str) -> None:
        self.report.add(
            Finding(
                kind=kind,
                table=table.disk_name.decode(),
                buffer=int.from_bytes(key[:4], "big") if table is not Table.META else 0,
                row=disk.row_label(table, key),
                message=message,
            )
        )


def main() -> None:
    """Walk, and say what was found."""
    path, *skipped = sys.argv[1:]

    def say(what: Any) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    try:
        walk = Walk(Path(path), frozenset(Table[name] for name in skipped), say)
        say({"report": walk.run().to_json()})
    except StoreFormatError as error:
        say({"refused": str(error)})
    except (StoreFailedError, lmdb.Error) as error:
        say({"failed": str(error)})


if __name__ == "__main__":
    main()
