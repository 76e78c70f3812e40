"""The process that walks through a store: `python -m experience_buffer_server.store.lmdb.verify.walk_process`.

It says what it is doing in lines of JSON; `check` reads them. Not for use by hand.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

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
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.disk.opening import begin, open_to_read
from experience_buffer_server.store.lmdb.disk.seal import unseal
from experience_buffer_server.store.lmdb.large.reads import LargePayloads, check_readable
from experience_buffer_server.store.lmdb.verify.links import Links
from experience_buffer_server.store.lmdb.verify.report import (
    BufferCount,
    Finding,
    Kind,
    Report,
    TableCount,
)

_TOLD_ROWS: Final = 2_000
"""After so many rows it says where it is; after every one of a large payload."""
_DECODE_ERRORS: Final = (ValueError, TypeError, struct.error, DamagedRecordError)
_INDEX: Final = (
    Table.RECORDS,
    Table.GROUPS,
    Table.LEASES,
    Table.PROGRESS,
    Table.CONSUMERS,
    Table.MAGNITUDES,
)
"""Tables that are compared with one another before the others are read."""
_OTHERS: Final = (
    Table.PAYLOADS,
    Table.EXTENTS,
    Table.ADVANTAGES,
    Table.MEMORY,
    Table.MEMORY_LOG,
)
_Row = TypeVar("_Row")


class Walk:
    """One walk through one state of one store. Not thread-safe.

    While it lasts, nothing that a server removes is written over: the store grows by what is
    written meanwhile, as during a snapshot.

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
        self.report = Report(path=str(path), format_version=disk.FORMAT_VERSION)
        self._transactions: list[lmdb.Transaction[memoryview]] = []
        """By table."""
        self._buffers: dict[int, BufferCount] = {}
        self._strange: set[tuple[Table, int]] = set()
        """Tables with rows of buffers that aren't known."""
        self._links = Links(self._buffers, self._unread, self._add)

    def run(self) -> Report:
        """Look at everything."""
        with self._env, closing(self._large):
            self._transactions = self._of_one_state()
            meta = self._transactions[Table.META]
            if problem := commit_problem(meta, self._tables[Table.META], self._path):
                self._add(Kind.MISSING_COMMIT, Table.META, COMMIT_KEY, problem)
            self._read_buffers()
            for _ in self._sound(Table.FREED):
                pass  # It says nothing of any row.
            for table in _INDEX:
                self._table(table)
            self._links.check_index()
            for table in _OTHERS:
                self._table(table)
            for table, buffer_id in sorted(self._strange):
                self._note_unknown(table, buffer_id)
            self._links.check_rest(self._uid)
        self.report.buffers = sorted(self._buffers.values(), key=lambda buffer: buffer.id)
        return self.report

    def _of_one_state(self) -> list[lmdb.Transaction[memoryview]]:
        """A transaction for each table, all on one commit: a damaged page ends the one that meets it."""
        while True:
            transactions = [begin(self._env)]
            with suppress(lmdb.MapResizedError):
                transactions += [self._env.begin(buffers=True) for _ in range(1, len(Table))]
                if len({one.id() for one in transactions}) == 1:
                    return transactions
            for one in transactions:
                one.abort()

    def _read_buffers(self) -> None:
        """Known is what has a row or, where that is damaged, a copy of it."""
        rows: dict[int, BufferRow] = {}
        for table in (Table.META, Table.BUFFER_COPIES, Table.BUFFERS, Table.COUNTERS):
            for key, value in self._sound(table):
                if table in (Table.BUFFERS, Table.BUFFER_COPIES):
                    row = self._decoded(table, key, value, row_codec.decode_buffer)
                    if row is not None:
                        rows[row.id] = row
        self._buffers |= {row.id: BufferCount(id=row.id, name=row.name) for row in rows.values()}

    def _table(self, table: Table) -> None:
        take = self._take_extent if table is Table.EXTENTS else self._links.takers[table]
        for key, value in self._sound(table):
            buffer_id = int.from_bytes(key[:4], "big")
            if buffer_id not in self._buffers:
                self._strange.add((table, buffer_id))
                continue
            try:
                take(buffer_id, key, value)
            except _DECODE_ERRORS as error:
                self._note_damaged(table, key, error)

    def _take_extent(self, buffer_id: int, key: bytes, value: memoryview) -> None:
        """Read a large payload, and take it as a row of PAYLOADS is taken.

        Raises:
            DamagedRecordError: It can't be read, or isn't as it was written.
            struct.error: The row isn't an extent.
        """
        with self._large.read(key, disk.decode_extent(value)) as payload:
            self._links.take_payload(Table.EXTENTS, buffer_id, key, payload)

    def _uid(self, buffer_id: int, seq: int) -> str:
        """Of a record that was read and is sound."""
        key = disk.numbered_key(buffer_id, seq)
        stored = self._transactions[Table.RECORDS].get(key, db=self._tables[Table.RECORDS])
        assert stored is not None, f"{disk.row_name(Table.RECORDS, key)} was there"
        return row_codec.decode_record(unseal(Table.RECORDS, key, stored)).uid

    def _sound(self, table: Table) -> Iterator[tuple[bytes, memoryview]]:
        """Values of the rows that match their checksum; counted, with the others."""
        name = table.disk_name.decode()
        count = self.report.tables[name] = TableCount()
        try:
            for key, stored in self._rows(table):
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

    def _rows(self, table: Table) -> Iterator[tuple[bytes, memoryview]]:
        if table in self._unread:
            return
        txn, db, number = self._transactions[table], self._tables[table], 0
        entries = txn.stat(db)["entries"]
        step = 1 if table is Table.EXTENTS else _TOLD_ROWS
        self._tell(table, 0, entries)
        with txn.cursor(db) as cursor:
            for key, stored in cursor:
                yield bytes(key), stored
                number += 1
                if number % step == 0:
                    self._tell(table, number, entries)
        if number != entries:
            raise lmdb.CorruptedError(f"{number} rows can be reached of {entries}")

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
