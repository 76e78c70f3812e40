"""The process that walks through a store: `python -m experience_buffer_server.store.lmdb.verify.walk_process`.

It says what it is doing in lines of JSON; `check` reads them. Not for use by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import lmdb

from experience_buffer_server.store import row_codec
from experience_buffer_server.store.interface import (
    BufferRow,
    DamagedRecordError,
    StoreFailedError,
    StoreFormatError,
)
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.commit_number import COMMIT_KEY, commit_problem
from experience_buffer_server.store.lmdb.disk.format import DECODE_ERRORS, Table, unseal
from experience_buffer_server.store.lmdb.disk.opening import begin, open_to_read
from experience_buffer_server.store.lmdb.large.reads import LargePayloads, check_readable
from experience_buffer_server.store.lmdb.verify.links import Again, Links
from experience_buffer_server.store.lmdb.verify.report import (
    BufferCount,
    Kind,
    Report,
    TableCount,
)

_CHUNK_ROWS: Final = 2_000
_CHUNK_BYTES: Final = 32 << 20
"""Of rows and large payloads that are read in one transaction: while it is open, no page and no
payload that was removed is written over."""
_INDEX: Final = (
    Table.RECORDS,
    Table.DEPARTED,
    Table.GROUPS,
    Table.LEASES,
    Table.PROGRESS,
    Table.CONSUMERS,
    Table.MAGNITUDES,
)
"""Tables that are read in one transaction, so that they fit together."""
_LARGE: Final = (
    Table.PAYLOADS,
    Table.EXTENTS,
    Table.ADVANTAGES,
    Table.MEMORY,
    Table.MEMORY_LOG,
)
"""Tables that are read part by part; what doesn't fit is looked at again at the end."""


class Walk:
    """One walk through one store. Not thread-safe.

    Args:
        path: The store's directory.
        skipped: Tables that aren't read.
        say: Told of what it is doing.
        payloads: The folder of its large payloads; None: its own.
    """

    def __init__(
        self,
        path: Path,
        skipped: frozenset[Table],
        say: Callable[[Any], None],
        payloads: Path | None = None,
    ) -> None:
        self._path = path
        self._unread = set(skipped)
        """Tables that aren't read, or not to their end."""
        self._say = say
        # Without a lock file nobody else has it open, and none must be left in a snapshot.
        lock = (path / "lock.mdb").exists()
        self._env, self._tables = open_to_read(path, lock=lock, readahead=False)
        check_readable(payloads or path)
        self._large = LargePayloads(payloads or path)
        self._large_bytes = 0
        """Read of large payloads so far."""
        self.report = Report(path=str(path), format_version=disk.FORMAT_VERSION)
        self._buffers: dict[int, BufferCount] = {}
        self._strange: set[tuple[Table, int]] = set()
        """Tables with rows of buffers that aren't known; they may have been created since."""
        self._links = Links(self._buffers, self.report, self._unread)

    def run(self) -> Report:
        """Look at everything."""
        with self._env, closing(self._large):
            with begin(self._env) as txn:
                if problem := commit_problem(txn, self._tables[Table.META], self._path):
                    self.report.add(Kind.MISSING_COMMIT, Table.META, COMMIT_KEY, problem)
                self._read_buffers(txn)
                for _ in self._sound(Table.FREED, self._whole(txn, Table.FREED)):
                    pass  # It says nothing of any row.
                for table in _INDEX:
                    self._table(table, self._whole(txn, table))
            self._links.check_index()
            for table in _LARGE:
                self._table(table, self._parts(table))
            with begin(self._env) as last:
                for table, buffer_id in sorted(self._strange):
                    if last.get(disk.buffer_key(buffer_id), db=self._tables[Table.BUFFERS]) is None:
                        message = "rows of a buffer that has no row itself"
                        key = disk.buffer_key(buffer_id)
                        self.report.add(Kind.UNKNOWN_BUFFER, table, key, message)
                self._links.check_again(
                    Again(
                        lambda table, key: last.get(key, db=self._tables[table]),
                        lambda table, key: self._rows_from(last, table, key),
                        lambda table, key: self._payload(last, table, key),
                    )
                )
        self.report.buffers = sorted(self._buffers.values(), key=lambda buffer: buffer.id)
        return self.report

    def _read_buffers(self, txn: lmdb.Transaction[memoryview]) -> None:
        """Known is what has a row or, where that is damaged, a copy of it."""
        rows: dict[int, BufferRow] = {}
        for table in (Table.META, Table.BUFFER_COPIES, Table.BUFFERS, Table.COUNTERS):
            for key, value in self._sound(table, self._whole(txn, table)):
                if table not in (Table.BUFFERS, Table.BUFFER_COPIES):
                    continue
                try:
                    row = row_codec.decode_buffer(value)
                except DECODE_ERRORS as error:
                    self._note_damaged(table, key, error)
                else:
                    rows[row.id] = row
        self._buffers |= {row.id: BufferCount(id=row.id, name=row.name) for row in rows.values()}

    def _table(self, table: Table, items: Iterator[tuple[bytes, memoryview]]) -> None:
        take = self._take_extent if table is Table.EXTENTS else self._links.takers[table]
        for key, value in self._sound(table, items):
            buffer_id = int.from_bytes(key[:4], "big")
            if buffer_id not in self._buffers:
                self._strange.add((table, buffer_id))
                continue
            try:
                take(buffer_id, key, value)
            except DECODE_ERRORS as error:
                self._note_damaged(table, key, error)

    def _take_extent(self, buffer_id: int, key: bytes, value: memoryview) -> None:
        """Read a large payload, and take it as a row of PAYLOADS is taken.

        Raises:
            DamagedRecordError: It can't be read, or isn't as it was written.
            struct.error: The row isn't an extent.
        """
        extent = disk.decode_extent(value)
        self._large_bytes += extent.num_bytes
        with self._large.read(key, extent) as payload:
            self._links.take_payload(buffer_id, key, payload)

    def _payload(
        self, txn: lmdb.Transaction[memoryview], table: Table, key: bytes
    ) -> bytes | memoryview | None:
        stored = txn.get(key, db=self._tables[table])
        if stored is None:
            return None
        try:
            value = unseal(table, key, stored)
            if table is Table.PAYLOADS:
                return value
            with self._large.read(key, disk.decode_extent(value)) as payload:
                return bytes(payload)
        except DECODE_ERRORS as error:
            self._note_damaged(table, key, error)
            return None

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
            self.report.add(Kind.DAMAGED_PAGE, table, b"", message)

    # --- rows

    def _whole(
        self, txn: lmdb.Transaction[memoryview], table: Table
    ) -> Iterator[tuple[bytes, memoryview]]:
        if table in self._unread:
            return
        db, number = self._tables[table], 0
        entries = txn.stat(db)["entries"]
        self._tell(table, 0, entries)
        with txn.cursor(db) as cursor:
            for key, stored in cursor:
                number += 1
                yield bytes(key), stored
                if number % _CHUNK_ROWS == 0:
                    self._tell(table, number, entries)
        if number != entries:
            raise lmdb.CorruptedError(f"{number} rows can be reached of {entries}")

    def _parts(self, table: Table) -> Iterator[tuple[bytes, memoryview]]:
        if table in self._unread:
            return
        db, last, number = self._tables[table], b"", 0
        while True:
            num_rows = num_bytes = 0
            large_bytes = self._large_bytes
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
                    num_bytes += self._large_bytes - large_bytes
                    large_bytes = self._large_bytes
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
        self.report.add(Kind.DAMAGED_ROW, table, key, str(error))


def main() -> None:
    """Walk, and say what was found."""
    path, payloads, *skipped = sys.argv[1:]

    def say(what: Any) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    try:
        tables = frozenset(Table[name] for name in skipped)
        walk = Walk(Path(path), tables, say, Path(payloads))
        say({"report": walk.run().to_json()})
    except StoreFormatError as error:
        say({"refused": str(error)})
    except (StoreFailedError, lmdb.Error) as error:
        say({"failed": str(error)})


if __name__ == "__main__":
    main()
