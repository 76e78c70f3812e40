"""Reading a store's committed rows, from any process. Nothing here writes."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import lmdb

from experience_buffer_server.store import format as disk
from experience_buffer_server.store.base import (
    AdvantageRow,
    BufferRow,
    BufferState,
    DamagedRecordError,
    Record,
    StoreFailedError,
    StoreFormatError,
)
from experience_buffer_server.store.format import Table
from experience_buffer_server.store.interning import Interner
from experience_buffer_server.store.magnitudes import Magnitudes

_log = logging.getLogger(__name__)
_Row = TypeVar("_Row")
_DECODE_ERRORS = (ValueError, TypeError, struct.error)


class LmdbReader:
    """Read-only access to the committed rows of a store that a writer keeps.

    It can be shared between threads. A process must not open the same store twice (LMDB's locks
    are per process): where there is an `LmdbStore`, use its `reader`. It must not be carried over
    a fork.

    Each call sees one consistent state: the newest commit when it starts. Reads go through the
    page cache and block for the disk where a page isn't there.
    """

    def __init__(self, path: Path) -> None:
        """Open a store that a writer has already made.

        Raises:
            StoreFormatError: There is no store at `path`, or one of another version.
            StoreFailedError: It can't be opened.
        """
        self._path = path
        self.damaged: list[str] = []
        """The rows that `load` could not read and left out: table, buffer and number of each."""
        # Taking over a grown map replaces the mapping under every open transaction, so that has to
        # wait until none is open.
        self._idle = threading.Condition()
        self._num_open = 0
        try:
            self._env = lmdb.open(
                str(path),
                readonly=True,
                create=False,
                map_size=0,  # what the writer uses
                max_dbs=disk.MAX_DBS,
                max_readers=disk.MAX_READERS,
            )
        except (lmdb.InvalidError, lmdb.VersionMismatchError) as error:
            raise StoreFormatError(f"{path} holds no LMDB database: {error}") from error
        except lmdb.Error as error:
            raise StoreFailedError(f"can't open the store at {path}: {error}") from error
        try:
            self._tables = self._open_tables()
        except BaseException:
            self._env.close()
            raise

    def _open_tables(self) -> list[lmdb._Database]:
        # Not in a transaction of ours: the handles would end with it.
        try:
            meta = self._env.open_db(Table.META.disk_name, create=False)
        except (lmdb.NotFoundError, lmdb.IncompatibleError):
            disk.check_format(None, self._path)
            raise
        with self._transaction() as txn:
            disk.check_format(txn.get(disk.FORMAT_KEY, db=meta), self._path)
        return [self._env.open_db(table.disk_name, create=False) for table in Table]

    @contextmanager
    def _transaction(self) -> Iterator[lmdb.Transaction[bytes]]:
        with self._idle:
            try:
                txn = self._begin()
            except lmdb.Error as error:
                raise StoreFailedError(f"can't read the store at {self._path}: {error}") from error
            self._num_open += 1
        try:
            yield txn
        except (lmdb.CorruptedError, lmdb.PageNotFoundError) as error:
            raise DamagedRecordError(f"{self._path} has a damaged page: {error}") from error
        finally:
            txn.abort()
            with self._idle:
                self._num_open -= 1
                if self._num_open == 0:
                    self._idle.notify_all()

    def _begin(self) -> lmdb.Transaction[bytes]:
        while True:
            try:
                return self._env.begin()
            except lmdb.MapResizedError:
                self._idle.wait_for(lambda: self._num_open == 0)
                self._env.set_mapsize(0)

    def payloads(self, buffer_id: int, uids: Iterable[str]) -> list[bytes | None]:
        """The stored payloads in the order asked; None where there is none.

        Raises:
            ValueError: A uid is longer than any that can be stored.
        """
        return self._get(Table.PAYLOADS, (disk.payload_key(buffer_id, uid) for uid in uids))

    def advantages(self, buffer_id: int, seqs: Iterable[int]) -> list[AdvantageRow | None]:
        """What was computed, in the order asked; None where nothing was.

        Raises:
            DamagedRecordError: A row can't be read back.
        """
        keys = [disk.numbered_key(buffer_id, seq) for seq in seqs]
        values = self._get(Table.ADVANTAGES, keys)
        return [
            None if value is None else _decode(disk.decode_advantages, Table.ADVANTAGES, key, value)
            for key, value in zip(keys, values, strict=True)
        ]

    def recall(self, buffer_id: int, kind: str, keys: Iterable[str]) -> list[bytes | None]:
        """The remembered values in the order asked; None where nothing is remembered."""
        values = self._get(Table.MEMORY, (disk.memory_key(buffer_id, kind, key) for key in keys))
        return [None if value is None else disk.memory_value(value) for value in values]

    def _get(self, table: Table, keys: Iterable[bytes]) -> list[bytes | None]:
        db = self._tables[table]
        with self._transaction() as txn:
            return [txn.get(key, db=db) for key in keys]

    def load(self) -> Iterator[BufferState]:
        """Read the state of every buffer, by id.

        A row that can't be read back is left out, logged and named in `damaged`, so that one bad
        row doesn't keep all the others from being served.
        """
        self.damaged.clear()
        for row in self._rows(Table.BUFFERS, b"", disk.decode_buffer):
            yield self._state(row)

    def _state(self, row: BufferRow) -> BufferState:
        prefix = disk.buffer_key(row.id)
        return BufferState(
            row=row,
            records=self._rows(Table.RECORDS, prefix, _record_decoder()),
            groups=self._rows(Table.GROUPS, prefix, disk.decode_group),
            leases=self._rows(Table.LEASES, prefix, disk.decode_lease),
            progress=self._rows(Table.PROGRESS, prefix, disk.decode_progress),
            consumers=self._rows(Table.CONSUMERS, prefix, disk.decode_consumer),
            computed=self._computed(prefix),
        )

    def _rows(self, table: Table, prefix: bytes, decode: Callable[[bytes], _Row]) -> list[_Row]:
        rows: list[_Row] = []
        for key, value in self._items(table, prefix):
            try:
                rows.append(decode(value))
            except _DECODE_ERRORS as error:
                self._note_damage(table, key, error)
        return rows

    def _computed(self, prefix: bytes) -> Magnitudes:
        computed = Magnitudes()
        for key, value in self._items(Table.MAGNITUDES, prefix):
            try:
                computed.append(disk.number_of(key), disk.decode_magnitude(value))
            except _DECODE_ERRORS as error:
                self._note_damage(Table.MAGNITUDES, key, error)
        return computed

    def _items(self, table: Table, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        with self._transaction() as txn, txn.cursor(self._tables[table]) as cursor:
            if not cursor.set_range(prefix):
                return
            for key, value in cursor.iternext():
                if not key.startswith(prefix):
                    return
                yield key, value

    def _note_damage(self, table: Table, key: bytes, error: Exception) -> None:
        name = _row_name(table, key)
        self.damaged.append(name)
        _log.error("damaged row left out: %s in %s: %s", name, self._path, error)

    def close(self) -> None:
        """Release the store. Idempotent."""
        with self._idle:
            self._idle.wait_for(lambda: self._num_open == 0)
            self._env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _decode(
    decode: Callable[[bytes], _Row],
    table: Table,
    key: bytes,
    value: bytes,
) -> _Row:
    try:
        return decode(value)
    except _DECODE_ERRORS as error:
        raise DamagedRecordError(f"{_row_name(table, key)} can't be read back: {error}") from error


def _record_decoder() -> Callable[[bytes], Record]:
    """Decode records that share equal values; they are read in the order in which they came."""
    interner = Interner()

    def decode(value: bytes) -> Record:
        record = disk.decode_record(value)
        interner.intern(record)
        return record

    return decode


def _row_name(table: Table, key: bytes) -> str:
    buffer_id = int.from_bytes(key[:4], "big")
    rest = ""
    if table is Table.CONSUMERS:
        rest = f" row {key[4:].decode(errors='replace')!r}"
    elif len(key) == 12:
        rest = f" row {disk.number_of(key)}"
    return f"{table.disk_name.decode()}: buffer {buffer_id}{rest}"
