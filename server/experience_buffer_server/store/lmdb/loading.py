"""Reading all that a server needs of a store at its start, whatever is damaged.

The key of a damaged row may be what is damaged: nothing is believed of it that its sound neighbours
contradict. All tables are read before the first buffer is served, because nothing may be changed in
a store with a damaged page.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Generic, TypeVar

import lmdb

from experience_buffer_server.store import row_codec
from experience_buffer_server.store.interface import (
    AdvantageRow,
    BufferRow,
    DamagedRecordError,
    DamagedRows,
    Found,
    Record,
    StoredBuffer,
    StoreFailedError,
)
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import DECODE_ERRORS, Table, unseal
from experience_buffer_server.store.lmdb.disk.opening import CURE
from experience_buffer_server.store.record import Interner, Numbers

_log = logging.getLogger(__name__)
_Row = TypeVar("_Row")
_Decode = Callable[[memoryview], _Row]


class _TableRows(Generic[_Row]):
    """The rows of one table."""

    def __init__(self) -> None:
        self.of: defaultdict[bytes, list[_Row]] = defaultdict(list)
        """By the buffer's key, in order."""
        self.lost: defaultdict[bytes, list[int]] = defaultdict(list)
        """By the buffer's key, numbers of rows that can't be read back."""
        self.keys_lost: list[bytes] = []
        """Their keys, as they are now."""


class Loading:
    """Reads a store once. Not thread-safe."""

    def __init__(
        self,
        path: Path,
        tables: list[lmdb._Database],
        transaction: Callable[[], AbstractContextManager[lmdb.Transaction[memoryview]]],
        advantages: Callable[[Sequence[bytes]], list[Found[AdvantageRow]]],
    ) -> None:
        self._path = path
        self._tables = tables
        self._transaction = transaction
        self._advantages = advantages
        self._prefix = b""
        """Of the keys that are read; empty: all are."""
        self.damaged: list[str] = []
        """The rows that could not be read and were left out."""
        self.last_buffer_id = 0
        """Highest id that a buffer was given, also one that is gone or can't be read."""

    def run(self, buffer_id: int | None = None) -> Iterator[StoredBuffer]:
        """Read all tables, or what one buffer has in them; the buffers' states, by id.

        Of one alone, its rows whose buffer is the damaged part of their key are missed: a server reads
        all of them at its start.

        Raises:
            StoreFailedError: A page is damaged.
        """
        buffers = self._buffers()
        if buffer_id is not None:
            self._prefix = disk.buffer_key(buffer_id)
            buffers = {id_: row for id_, row in buffers.items() if id_ == buffer_id}
        known = frozenset(map(disk.buffer_key, buffers))
        records = self._rows(Table.RECORDS, _record_decoder(), known)
        groups = self._rows(Table.GROUPS, row_codec.decode_group, known)
        leases = self._rows(Table.LEASES, row_codec.decode_lease, known)
        progress = self._rows(Table.PROGRESS, row_codec.decode_progress, known)
        consumers = self._rows(Table.CONSUMERS, row_codec.decode_consumer, known)
        counters = self._rows(Table.COUNTERS, disk.decode_counter, known)
        computed = self._computed()
        for id_ in sorted(buffers):
            key = disk.buffer_key(id_)
            row, rows = buffers[id_], records.of.pop(key, [])
            last_seq = max([*counters.of.get(key, []), rows[-1].seq if rows else 0])
            damaged = DamagedRows(
                records=plausible(records.lost.get(key, []), last_seq),
                groups=plausible(groups.lost.get(key, []), *(g.id for g in groups.of[key][-1:])),
                leases=plausible(
                    leases.lost.get(key, []), row.lease_floor, *(x.id for x in leases.of[key][-1:])
                ),
                any_records=bool(records.lost),
            )
            yield StoredBuffer(
                row=row,
                records=rows,
                groups=groups.of.pop(key),
                leases=leases.of.pop(key),
                progress=progress.of.pop(key, []),
                consumers=consumers.of.pop(key, []),
                computed=computed.pop(key, Magnitudes()),
                last_seq=max(last_seq, *damaged.records, 0),
                damaged=damaged,
            )

    def _buffers(self) -> dict[int, BufferRow]:
        """The buffers' rows, by id; where one is damaged, its copy."""
        copies = self._rows(Table.BUFFER_COPIES, row_codec.decode_buffer, frozenset())
        rows = self._rows(Table.BUFFERS, row_codec.decode_buffer, frozenset())
        found = {row.id: row for table in (copies, rows) for (row,) in table.of.values()}
        lost = [key for table in (copies, rows) for key in table.keys_lost]
        ids = plausible((int.from_bytes(key, "big") for key in lost), *found, margin=ID_MARGIN)
        self.last_buffer_id = max([*found, *ids, self._last_given_id()])
        num_missing = max(len(table.of) + len(table.keys_lost) for table in (copies, rows))
        if num_missing := num_missing - len(found):
            _log.critical(
                "%d buffers of %s aren't served: the row of each and the copy of it are damaged "
                "(buffer ids %s); restore the store from a snapshot",
                num_missing, self._path, sorted({int.from_bytes(key, "big") for key in lost}),
            )  # fmt: skip
        return found

    def _last_given_id(self) -> int:
        """The highest id that a buffer was given; 0 where nothing says so."""
        key = disk.LAST_BUFFER_KEY
        with self._transaction() as txn:
            stored = txn.get(key, db=self._tables[Table.META])
            try:
                return 0 if stored is None else disk.decode_counter(unseal(Table.META, key, stored))
            except DECODE_ERRORS as error:
                self._note_damage(Table.META, key, error)
                return 0

    def _rows(
        self, table: Table, decode: _Decode[_Row], known: Container[bytes]
    ) -> _TableRows[_Row]:
        """All rows of a table, by buffer; `known` are the buffers' keys."""
        found: _TableRows[_Row] = _TableRows()
        prefix, first, rows = b"", b"", list[_Row]()
        lost: list[tuple[bytes, bytes]] = []
        for key, row in self._decoded(table, decode):
            if row is None:
                lost.append((key, prefix))
                continue
            if not prefix or not key.startswith(prefix):
                prefix = key[:4]
                first, rows = first or prefix, found.of[prefix]
            rows.append(row)
        for key, before in lost:
            # Of an unknown buffer: its key is damaged, and its place says whose it was.
            owner = key[:4] if key[:4] in known else before or first
            found.lost[owner].append(disk.number_of(key))
            found.keys_lost.append(key)
        return found

    def _computed(self) -> dict[bytes, Magnitudes]:
        """What was computed, by the buffer's key."""
        computed: defaultdict[bytes, Magnitudes] = defaultdict(Magnitudes)
        prefix, lost, into = b"", list[bytes](), Magnitudes()
        for key, magnitude in self._decoded(Table.MAGNITUDES, disk.decode_magnitude):
            if magnitude is None:
                lost.append(key)
                continue
            if not prefix or not key.startswith(prefix):
                prefix = key[:4]
                into = computed[prefix]
            into.append(disk.number_of(key), magnitude)
        for key, row in zip(lost, self._advantages(lost), strict=True):
            # What it was computed from says it, too.
            if isinstance(row, AdvantageRow) and "mean_magnitude" in row.details:
                values = {**computed[key[:4]], row.seq: row.details["mean_magnitude"]}
                computed[key[:4]] = into = Magnitudes()
                for seq in sorted(values):
                    into.append(seq, values[seq])
        return computed

    def _decoded(self, table: Table, decode: _Decode[_Row]) -> Iterator[tuple[bytes, _Row | None]]:
        """All rows of a table; None in place of those that can't be read back."""
        for key, stored in self._walk(table):
            row = None
            try:
                row = decode(unseal(table, key, stored))
            except DECODE_ERRORS as error:
                self._note_damage(table, key, error)
            yield key, row

    def _walk(self, table: Table) -> Iterator[tuple[bytes, memoryview]]:
        """All rows of a table, one after the other and not by looking for any.

        Raises:
            StoreFailedError: A page is damaged.
        """
        last, number = b"", 0
        try:
            with self._transaction() as txn, txn.cursor(self._tables[table]) as cursor:
                entries = txn.stat(self._tables[table])["entries"]
                if self._prefix:
                    cursor.set_range(self._prefix)
                for found, stored in cursor:
                    number += 1
                    key = bytes(found)
                    if not key.startswith(self._prefix):
                        return
                    if key <= last:
                        what = f"{disk.row_name(table, key)} comes after {last.hex()}"
                        raise DamagedRecordError(f"rows are out of order: {what}")
                    last = key
                    yield key, stored
            if number != entries and not self._prefix:
                raise DamagedRecordError(f"{number} rows can be reached of {entries}")
        except DamagedRecordError as error:
            raise StoreFailedError(
                f"{self._path}: a page of table {table.disk_name.decode()} is damaged: {error}. "
                f"Serving it could lose sound rows, so nothing was changed; {CURE}"
            ) from error

    def _note_damage(self, table: Table, key: bytes, error: Exception) -> None:
        name = disk.row_name(table, key)
        self.damaged.append(name)
        _log.error("damaged row left out: %s in %s: %s", name, self._path, error)


def _record_decoder() -> _Decode[Record]:
    """Decode records that share equal values; they are read in the order in which they came."""
    interner = Interner()

    def decode(value: memoryview) -> Record:
        record = row_codec.decode_record(value)
        interner.intern(record)
        return record

    return decode


class Magnitudes(Mapping[int, float]):
    """Magnitudes by seq, ascending, 16 bytes each: a `dict` of a million takes over 100.

    A magnitude is the mean of |advantage| over an experience's response tokens.
    """

    def __init__(self) -> None:
        self._seqs = array("Q")
        self._values = array("d")
        self._numbers = Numbers()

    def append(self, seq: int, magnitude: float) -> None:
        """Add an experience; its seq is above all before."""
        assert not self._seqs or seq > self._seqs[-1], f"seq {seq} comes after {self._seqs[-1]}"
        self._seqs.append(seq)
        self._values.append(magnitude)

    def __getitem__(self, seq: int) -> float:
        index = bisect_left(self._seqs, seq)
        if index < len(self._seqs) and self._seqs[index] == seq:
            # Groups of equal rewards have equal ones, and whoever asks keeps them.
            return self._numbers.intern(self._values[index])
        raise KeyError(seq)

    def __iter__(self) -> Iterator[int]:
        return iter(self._seqs)

    def __len__(self) -> int:
        return len(self._seqs)


NUMBER_MARGIN: Final = 1 << 32
"""Of seqs and ids within a buffer."""
ID_MARGIN: Final = 1 << 16
"""Of buffers: their ids have 4 bytes."""


def plausible(numbers: Iterable[int], *sound: int, margin: int = NUMBER_MARGIN) -> list[int]:
    """Numbers as damaged rows say them, held down to what may follow the highest sound one.

    A number too high costs as many numbers; far too high, it would leave none.
    """
    most = max(sound, default=0) + margin
    return [min(number, most) for number in numbers]
