"""Reading a store's committed rows: by its owner, and by other processes. Nothing here writes.

Small rows come from the map, large payloads from their file. In the page cache a small row takes 4 us,
in a thread ten times as long; but a page that isn't there keeps the owner's event loop waiting for the
disk. So as long as pages may be missing, a thread touches first what will be read (`at_hand`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, Self, TypeVar

import lmdb

from experience_buffer_server.store import row_codec
from experience_buffer_server.store.interface import (
    AdvantageRow,
    DamagedRecordError,
    Departed,
    DepartedRow,
    Found,
    LeaseRow,
    StoredBuffer,
    StoreError,
    StoreFailedError,
)
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import Extent, Table
from experience_buffer_server.store.lmdb.disk.opening import open_to_read
from experience_buffer_server.store.lmdb.fences import Ownership, read_ownership
from experience_buffer_server.store.lmdb.large.fetching import Expected, Fetching
from experience_buffer_server.store.lmdb.large.reads import LargePayloads, Place, is_as_written
from experience_buffer_server.store.lmdb.loading import Loading
from experience_buffer_server.store.lmdb.row_reading import (
    Decode,
    as_it_lies,
    departed_place,
    keys_from,
    major_faults,
    read_row,
)

_log = logging.getLogger(__name__)
_Row = TypeVar("_Row")
_PAGE_ERRORS = (lmdb.CorruptedError, lmdb.PageNotFoundError)
_CALM_READS: Final = 16
"""After so many that didn't wait for the disk, the next one isn't expected to, either."""


class CommittedRows:
    """The committed rows of a store that a writer keeps, once `_begin_reading` has opened it.

    It can be shared between threads, but for what is asynchronous. A process must not open the same
    store twice (LMDB's locks are per process), nor carry it over a fork.

    Each call sees one consistent state: the newest commit when it starts. Reads go through the
    page cache and block for the disk where a page isn't there; large payloads come from the disk.
    Every row and every payload is compared with its checksum.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.damaged: list[str] = []
        """The rows that `load` could not read and left out: table, buffer and number of each."""
        self.last_buffer_id = 0
        """Highest id that a buffer was given, also one that is gone; known after `load`."""
        # Taking over a grown map replaces the mapping under every open transaction, so that has to
        # wait until none is open.
        self._idle = threading.Condition()
        self._num_open = 0
        self._env: lmdb.Environment | None = None
        self._tables: list[lmdb._Database] = []
        self._large = LargePayloads(path)
        self._fetching = Fetching(self.places, self._large.fetch)
        self._num_calm = 0
        """Reads since one last waited for the disk."""

    def _begin_reading(self) -> None:
        self._env, self._tables = open_to_read(self._path)

    def _end_reading(self) -> None:
        """Release the store. Idempotent."""
        self._fetching.close()
        with self._idle:
            self._idle.wait_for(lambda: self._num_open == 0)
            if self._env is not None:
                self._env.close()
                self._env = None
            self._large.close()

    @contextmanager
    def _transaction(self) -> Iterator[lmdb.Transaction[memoryview]]:
        before = major_faults()
        with self._idle:
            try:
                txn = self._begin()
            except lmdb.Error as error:
                raise StoreFailedError(f"can't read the store at {self._path}: {error}") from error
            self._num_open += 1
        try:
            yield txn
        except _PAGE_ERRORS as error:
            raise DamagedRecordError(f"{self._path} has a damaged page: {error}") from error
        finally:
            txn.abort()
            self._num_calm = 0 if major_faults() > before else self._num_calm + 1
            with self._idle:
                self._num_open -= 1
                if self._num_open == 0:
                    self._idle.notify_all()

    def _begin(self) -> lmdb.Transaction[memoryview]:
        while self._env is not None:
            try:
                # Views: what is read is copied once, after its checksum was compared.
                return self._env.begin(buffers=True)
            except lmdb.MapResizedError:
                self._idle.wait_for(lambda: self._num_open == 0)
                self._env.set_mapsize(0)
        raise StoreFailedError(f"the store at {self._path} is closed")

    def payloads(self, buffer_id: int, uids: Iterable[str]) -> list[Found[bytes]]:
        """The stored payloads in the order asked; see `interface.Found`.

        Raises:
            ValueError: A uid is longer than any that can be stored.
        """
        return self._copies([disk.payload_key(buffer_id, uid) for uid in uids])

    def _copies(self, keys: Sequence[bytes]) -> list[Found[bytes]]:
        def read(txn: lmdb.Transaction[memoryview], keys: Sequence[bytes]) -> list[Found[bytes]]:
            with self._payloads(txn, keys) as found:
                return [bytes(each) if isinstance(each, memoryview) else each for each in found]

        return self._each(Table.PAYLOADS, keys, read)

    @contextmanager
    def _payloads(
        self, txn: lmdb.Transaction[memoryview], keys: Sequence[bytes]
    ) -> Iterator[list[Found[memoryview]]]:
        """Payloads as they lie in the map or, large ones, as they were read; views end with the block."""
        found = self._rows(txn, Table.PAYLOADS, keys, as_it_lies)
        extents: dict[int, Extent] = {}
        if txn.stat(self._tables[Table.EXTENTS])["entries"]:
            places = [place for place, row in enumerate(found) if row is None]
            rows = self._rows(txn, Table.EXTENTS, [keys[p] for p in places], disk.decode_extent)
            for place, row in zip(places, rows, strict=True):
                if isinstance(row, Extent):
                    found[place] = self._in_memory((keys[place], row))
                    if found[place] is None:
                        extents[place] = row
                else:
                    found[place] = row
        with ExitStack() as stack:
            for place, extent in extents.items():
                try:
                    found[place] = stack.enter_context(self._large.read(keys[place], extent))
                except DamagedRecordError as error:
                    found[place] = error
            yield found

    def _in_memory(self, place: Place) -> Found[memoryview]:
        """A payload that was fetched; None, too, if it isn't what was written: it is read again."""
        payload = self._fetching.find(place)
        if isinstance(payload, memoryview) and not is_as_written(place, payload):
            return None
        return payload

    def places(self, buffer_id: int, uids: Iterable[str]) -> list[Place | None]:
        """Where large payloads lie, in the order asked; None for what isn't large, or can't be found.

        Raises:
            ValueError: A uid is longer than any that can be stored.
            StoreFailedError: The store can't be read.
        """
        keys = [disk.payload_key(buffer_id, uid) for uid in uids]
        rows = self._get(Table.EXTENTS, keys, disk.decode_extent)
        return [
            (key, row) if isinstance(row, Extent) else None
            for key, row in zip(keys, rows, strict=True)
        ]

    def fetched(self, buffer_id: int, uids: Iterable[str]) -> AbstractAsyncContextManager[None]:
        """Have large payloads in memory within the block; see `interface.Store.fetched`."""
        return self._fetching.fetched(buffer_id, uids)

    def expect(self, buffer_id: int, payloads: Iterable[tuple[str, int]]) -> Expected:
        """Read large payloads ahead; see `interface.Store.expect`."""
        return Expected(self._fetching, buffer_id, payloads)

    def advantages(self, buffer_id: int, seqs: Iterable[int]) -> list[Found[AdvantageRow]]:
        """What was computed, in the order asked; see `interface.Found`."""
        keys = [disk.numbered_key(buffer_id, seq) for seq in seqs]
        return self._get(Table.ADVANTAGES, keys, row_codec.decode_advantages)

    @contextmanager
    def stored(
        self, buffer_id: int, uids: Iterable[str], seqs: Iterable[int]
    ) -> Iterator[tuple[list[Found[memoryview]], list[Found[AdvantageRow]]]]:
        """What `payloads` and `advantages` return, but payloads as they were read, uncopied.

        A view must not be touched after the block; nor may anything else be read within it, since
        a read that finds a grown map waits for all others to end.

        Raises:
            ValueError: A uid is longer than any that can be stored.
        """
        places = [disk.payload_key(buffer_id, uid) for uid in uids]
        keys = [disk.numbered_key(buffer_id, seq) for seq in seqs]
        with self._transaction() as txn, ExitStack() as stack:
            try:
                payloads = stack.enter_context(self._payloads(txn, places))
                computed = self._rows(txn, Table.ADVANTAGES, keys, row_codec.decode_advantages)
            except _PAGE_ERRORS:
                pass  # It ends the transaction: what is on other pages is read again below.
            else:
                yield payloads, computed
                return
        copies = self._copies(places)
        yield (
            [memoryview(copy) if isinstance(copy, bytes) else copy for copy in copies],
            self._get(Table.ADVANTAGES, keys, row_codec.decode_advantages),
        )

    def leases(self, buffer_id: int) -> list[LeaseRow]:
        """All leases that are remembered, by id; those that can't be read back are left out."""
        found, table, prefix = [], Table.LEASES, disk.buffer_key(buffer_id)
        with self._transaction() as txn, txn.cursor(self._tables[table]) as cursor:
            is_there = cursor.set_range(prefix)
            while is_there and (key := bytes(cursor.key())).startswith(prefix):
                with suppress(*disk.DECODE_ERRORS):
                    found.append(row_codec.decode_lease(disk.unseal(table, key, cursor.value())))
                is_there = cursor.next()
        return found

    async def remembered_leases(self, buffer_id: int) -> list[LeaseRow]:
        """The same, in a thread."""
        return await self._fetching.run(partial(self.leases, buffer_id))

    def recall(self, buffer_id: int, kind: str, keys: Iterable[str]) -> list[bytes | None]:
        """The remembered values in the order asked; None where nothing is, or can be read back."""
        places = [disk.memory_key(buffer_id, kind, key) for key in keys]
        values = self._get(Table.MEMORY, places, disk.memory_value)
        for value in values:
            if isinstance(value, DamagedRecordError):
                _log.error("forgotten early: %s in %s", value, self._path)
        return [value if isinstance(value, bytes) else None for value in values]

    @property
    def reads_wait(self) -> bool:
        """Whether a read may wait for the disk: so it is at first, and after one that did."""
        return self._num_calm < _CALM_READS

    async def at_hand(
        self,
        buffer_id: int,
        *,
        uids: Iterable[str] = (),
        seqs: Iterable[int] = (),
        remembered: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Touch rows in a thread, if they may not be in memory; see `interface.Store.at_hand`."""
        if self.reads_wait and self._env is not None:
            touch = partial(self._touch, buffer_id, [*uids], [*seqs], [*remembered])
            with suppress(RuntimeError):  # No thread is left: who reads waits for the disk.
                await self._fetching.run(touch)

    def _touch(
        self, buffer_id: int, uids: list[str], seqs: list[int], remembered: list[tuple[str, str]]
    ) -> None:
        """What can't be read is told of where it is read, and so are keys that are too long."""
        with suppress(StoreError, ValueError), self._transaction() as txn:
            # Without the interpreter's lock, also while the values' own pages come from the disk.
            for kind, key in remembered:
                txn.get(disk.memory_key(buffer_id, kind, key), db=self._tables[Table.MEMORY])
            for uid in uids:
                txn.get(disk.payload_key(buffer_id, uid), db=self._tables[Table.PAYLOADS])
            for seq in seqs:
                txn.get(disk.numbered_key(buffer_id, seq), db=self._tables[Table.ADVANTAGES])

    def departed(self, buffer_id: int, seqs: Iterable[int]) -> list[Departed]:
        """Of these, those that have left and aren't archived yet; see `interface.Store.departed`."""
        keys = [disk.numbered_key(buffer_id, seq) for seq in seqs]

        def read(txn: lmdb.Transaction[memoryview], keys: Sequence[bytes]) -> list[Found[Departed]]:
            rows = self._rows(txn, Table.DEPARTED, keys, row_codec.decode_departed)
            pairs = zip(keys, rows, strict=True)
            found = [(key, row) for key, row in pairs if isinstance(row, DepartedRow)]
            places = [departed_place(key, row) for key, row in found]
            computed = self._rows(
                txn, Table.ADVANTAGES, [key for key, _ in found], row_codec.decode_advantages
            )
            with self._payloads(txn, places) as payloads:
                copies = [bytes(p) if isinstance(p, memoryview) else p for p in payloads]
            return [
                Departed(row, payload, advantages)
                for (_, row), payload, advantages in zip(found, copies, computed, strict=True)
            ]

        return [one for one in self._each(Table.DEPARTED, keys, read) if isinstance(one, Departed)]

    def departed_rows(self, buffer_id: int) -> Iterator[tuple[int, Found[DepartedRow]]]:
        """All that has left and isn't archived yet; see `interface.Store.departed_rows`."""
        with self._transaction() as txn:
            keys = list(keys_from(txn, self._tables[Table.DEPARTED], disk.buffer_key(buffer_id)))
        rows = self._get(Table.DEPARTED, keys, row_codec.decode_departed)
        for key, row in zip(keys, rows, strict=True):
            yield disk.number_of(key), row

    def ownership(self, buffer_id: int) -> Ownership:
        """Who owns a buffer, and which of its commits was the last."""
        with self._transaction() as txn:
            return read_ownership(txn, self._tables[Table.META], buffer_id)

    def payload_uids(self, buffer_id: int) -> Iterator[str]:
        """The uids of all stored payloads; the payloads themselves aren't read."""
        prefix = disk.buffer_key(buffer_id)
        with self._transaction() as txn:
            for table in (Table.PAYLOADS, Table.EXTENTS):
                for key in keys_from(txn, self._tables[table], prefix):
                    yield key[4:].decode(errors="replace")

    def _get(self, table: Table, keys: Sequence[bytes], decode: Decode[_Row]) -> list[Found[_Row]]:
        return self._each(table, keys, lambda txn, keys: self._rows(txn, table, keys, decode))

    def _each(
        self,
        table: Table,
        keys: Sequence[bytes],
        read: Callable[[lmdb.Transaction[memoryview], Sequence[bytes]], list[Found[_Row]]],
    ) -> list[Found[_Row]]:
        """Read all in one transaction, or each in one of its own: a damaged page ends it.

        So it shows which of the rows are on such a page.
        """
        try:
            with self._transaction() as txn:
                return read(txn, keys)
        except DamagedRecordError as error:
            if len(keys) == 1:
                return [DamagedRecordError(f"{disk.row_name(table, keys[0])}: {error}")]
        return [row for key in keys for row in self._each(table, [key], read)]

    def _rows(
        self,
        txn: lmdb.Transaction[memoryview],
        table: Table,
        keys: Sequence[bytes],
        decode: Decode[_Row],
    ) -> list[Found[_Row]]:
        db = self._tables[table]
        if not txn.stat(db)["entries"]:
            return [None] * len(keys)
        return [read_row(table, key, txn.get(key, None, db), decode) for key in keys]

    def load(self, buffer_id: int | None = None) -> Iterator[StoredBuffer]:
        """Read the state of every buffer, by id, or of one; see `loading.Loading`.

        A row that can't be read back is left out, logged and named in `damaged`, so that one bad
        row doesn't keep all the others from being served.

        Raises:
            StoreFailedError: A page is damaged: rows are out of order, or can't all be reached.
                LMDB would miss sound rows then, and write beside them.
        """
        loading = Loading(self._path, self._tables, self._transaction, self._get_advantages)
        self.damaged = loading.damaged
        yield from loading.run(buffer_id)
        self.last_buffer_id = loading.last_buffer_id

    def _get_advantages(self, keys: Sequence[bytes]) -> list[Found[AdvantageRow]]:
        return self._get(Table.ADVANTAGES, keys, row_codec.decode_advantages)


class LmdbReader(CommittedRows):
    """Read access in another process than the one that has an `LmdbStore`.

    Raises:
        StoreFormatError: There is no store at `path`, or one of another version.
        StoreFailedError: It can't be opened.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._begin_reading()

    def close(self) -> None:
        """Release the store. Idempotent."""
        self._end_reading()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
