"""How payloads fit to records: what is missing, of nobody, there twice, or not what was pushed.

A payload is a row of table PAYLOADS or, if it is large, one of EXTENTS. Both are read part by part
while a server may be writing, and an annotation may move a payload from one to the other: what
doesn't fit then is only suspected, and looked at once more at the end. No I/O of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import xxhash

from experience_buffer_server.store import row_codec
from experience_buffer_server.store.interface import OTHER_DIGEST, Record
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.disk.seal import SEAL_BYTES, is_sound
from experience_buffer_server.store.lmdb.verify.report import Kind

PAYLOAD_TABLES: Final = (Table.PAYLOADS, Table.EXTENTS)
Get = Callable[[Table, bytes], memoryview | None]
RowsFrom = Callable[[Table, bytes], Iterator[tuple[bytes, memoryview]]]
Add = Callable[[Kind, Table, bytes, str], None]


class Again(NamedTuple):
    """Looks at a store once more, all in one transaction."""

    get: Get
    """A row as it is stored."""
    rows_from: RowsFrom
    """The rows of a table from a key on."""
    payload: Callable[[Table, bytes], bytes | memoryview | None]
    """A payload that has a row in this table; None where it has none, or is damaged."""


class Known(NamedTuple):
    """What is kept of a record: of millions of them, little."""

    payload_bytes: int
    digest: bytes
    """Empty where it isn't of the present payload."""


def known_of(record: Record) -> Known:
    """What is kept of a record."""
    return Known(record.payload_bytes, b"" if record.fields & OTHER_DIGEST else record.digest)


def misfit(known: Known, payload: bytes | memoryview) -> Kind | None:
    """How a payload isn't the one that its record says; None where it is."""
    if len(payload) != known.payload_bytes:
        return Kind.WRONG_SIZE
    if known.digest and xxhash.xxh3_128_digest(payload) != known.digest:
        return Kind.WRONG_DIGEST
    return None


def record_at(get: Get, buffer_id: int, seq: int) -> Record | None:
    """A record that is there and sound."""
    key = disk.numbered_key(buffer_id, seq)
    stored = get(Table.RECORDS, key)
    if stored is None or not is_sound(Table.RECORDS, key, stored):
        return None
    return row_codec.decode_record(stored[:-SEAL_BYTES])


class PayloadLinks:
    """Collects payloads, and says which don't fit to the records.

    Args:
        records: By buffer and seq, a live view; None: a tombstone.
        damaged: By table, keys of damaged rows, a live view: what depends on them isn't said again.
        add: Told of what is wrong.
    """

    def __init__(
        self,
        records: Mapping[int, Mapping[int, Known | None]],
        damaged: Mapping[Table, set[bytes]],
        add: Add,
    ) -> None:
        self._records = records
        self._damaged = damaged
        self._add = add
        self._missing: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """By buffer and hash of the uid's key, seqs whose payload hasn't been seen yet."""
        self._strays: defaultdict[int, set[bytes]] = defaultdict(set)
        """By buffer, keys of payloads that no record waits for: maybe pushed or moved since."""
        self._misfits: list[tuple[int, bytes, int]] = []
        """Buffer, key and seq of payloads that aren't what their record says; maybe annotated since."""

    def expect(self, buffer_id: int, record: Record) -> None:
        """There is to be a payload for a record."""
        self._missing[buffer_id][_hash(disk.payload_key(buffer_id, record.uid))] = record.seq

    def take(self, buffer_id: int, key: bytes, payload: memoryview) -> None:
        """There is a payload."""
        seq = self._missing[buffer_id].pop(_hash(key), 0)
        known = self._records[buffer_id].get(seq)
        if known is None:
            self._strays[buffer_id].add(key)
        elif misfit(known, payload):
            self._misfits.append((buffer_id, key, seq))

    def check_again(self, again: Again, tables: Sequence[Table]) -> None:
        """Look once more at what didn't fit.

        Args:
            again: How to.
            tables: Those of `PAYLOAD_TABLES` that were read to their end: what may be in another
                isn't missed.
        """
        if len(tables) == len(PAYLOAD_TABLES):
            for buffer_id, missing in self._missing.items():
                for seq in missing.values():
                    self._confirm_missing(again.get, buffer_id, seq)
        for buffer_id, strays in self._strays.items():
            self._confirm_strays(again, tables, buffer_id, strays)
        for buffer_id, key, seq in self._misfits:
            for table in tables:
                self._confirm_misfit(again, table, buffer_id, key, seq)

    def _confirm_missing(self, get: Get, buffer_id: int, seq: int) -> None:
        record = record_at(get, buffer_id, seq)
        if record is None:
            return  # It has left meanwhile.
        key = disk.payload_key(buffer_id, record.uid)
        if any(key in self._damaged[table] for table in PAYLOAD_TABLES):
            return
        if all(get(table, key) is None for table in PAYLOAD_TABLES):
            message = f"experience {seq} has no payload"
            self._add(Kind.MISSING_PAYLOAD, Table.PAYLOADS, key, message)

    def _confirm_strays(
        self, again: Again, tables: Sequence[Table], buffer_id: int, strays: set[bytes]
    ) -> None:
        places = {
            key: found
            for key in sorted(strays)
            if (found := [table for table in tables if again.get(table, key) is not None])
        }
        orphans = set(places)
        # What was pushed since the index was read has seqs above all that were known. If that isn't
        # all, look at the others, too: a payload that was moved meanwhile was seen twice.
        first = max(self._records[buffer_id], default=0) + 1
        for seq in (first, 0):
            if orphans:
                self._discard_owned(again, disk.numbered_key(buffer_id, seq), orphans)
        for key, found in places.items():
            if key in orphans:
                for table in found:
                    self._add(Kind.ORPHAN_PAYLOAD, table, key, "the payload of no experience")
            elif len(found) > 1:
                message = "a second payload of its experience: table payloads has one, too"
                self._add(Kind.ORPHAN_PAYLOAD, Table.EXTENTS, key, message)

    def _discard_owned(self, again: Again, first: bytes, orphans: set[bytes]) -> None:
        buffer_id = int.from_bytes(first[:4], "big")
        for key, stored in again.rows_from(Table.RECORDS, first):
            if not orphans or not key.startswith(first[:4]):
                return
            if is_sound(Table.RECORDS, key, stored):
                record = row_codec.decode_record(stored[:-SEAL_BYTES])
                if not record.tombstone:
                    orphans.discard(disk.payload_key(buffer_id, record.uid))

    def _confirm_misfit(
        self, again: Again, table: Table, buffer_id: int, key: bytes, seq: int
    ) -> None:
        record, payload = record_at(again.get, buffer_id, seq), again.payload(table, key)
        if record is None or payload is None or disk.payload_key(buffer_id, record.uid) != key:
            return
        kind = misfit(known_of(record), payload)
        if kind is Kind.WRONG_SIZE:
            message = f"{len(payload)} bytes, its record says {record.payload_bytes}"
            self._add(kind, table, key, message)
        elif kind is not None:
            self._add(kind, table, key, "it isn't the payload that was pushed")


def _hash(key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key)
