"""How the rows of a store fit together: what each table says of the others. No I/O of its own.

The index tables are read in one transaction. Payloads and advantages are read part by part while a
server may be writing: what doesn't fit then is only suspected, and looked at once more at the end
(`Again`). A payload is a row of table PAYLOADS or, if it is large, one of EXTENTS, and an annotation may
move it from one to the other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Final, NamedTuple

import xxhash

from experience_buffer_server.store import row_codec
from experience_buffer_server.store.interface import OTHER_DIGEST, GroupRow, Record
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import SEAL_BYTES, Table, is_sound
from experience_buffer_server.store.lmdb.row_reading import departed_place
from experience_buffer_server.store.lmdb.verify.report import BufferCount, Kind, Report

_PAYLOAD_TABLES: Final = (Table.PAYLOADS, Table.EXTENTS)
_Take = Callable[[int, bytes, memoryview], object]
_Get = Callable[[Table, bytes], memoryview | None]


class Again(NamedTuple):
    """Looks at a store once more, all in one transaction."""

    get: _Get
    """A row as it is stored."""
    rows_from: Callable[[Table, bytes], Iterator[tuple[bytes, memoryview]]]
    """The rows of a table from a key on."""
    payload: Callable[[Table, bytes], bytes | memoryview | None]
    """A payload that has a row in this table; None where it has none, or is damaged."""


class _Known(NamedTuple):
    """What is kept of a record: of millions of them, little."""

    payload_bytes: int
    digest: bytes
    """Empty where it isn't of the present payload."""


def _known_of(record: Record) -> _Known:
    """What is kept of a record."""
    return _Known(record.payload_bytes, b"" if record.fields & OTHER_DIGEST else record.digest)


def _misfit(known: _Known, payload: bytes | memoryview) -> Kind | None:
    """How a payload isn't the one that its record says; None where it is."""
    if len(payload) != known.payload_bytes:
        return Kind.WRONG_SIZE
    if known.digest and xxhash.xxh3_128_digest(payload) != known.digest:
        return Kind.WRONG_DIGEST
    return None


def _record_at(get: _Get, buffer_id: int, seq: int) -> Record | None:
    """A record that is there and sound."""
    key = disk.numbered_key(buffer_id, seq)
    stored = get(Table.RECORDS, key)
    if stored is None or not is_sound(Table.RECORDS, key, stored):
        return None
    return row_codec.decode_record(stored[:-SEAL_BYTES])


class _Buffer:
    """What the index says of one buffer."""

    def __init__(self) -> None:
        self.members: Counter[int] = Counter()
        """By group."""
        self.groups: dict[int, GroupRow] = {}
        self.magnitudes: set[int] = set()
        self.leases: list[tuple[int, list[int]]] = []
        self.progress: list[int] = []


class Links:
    """Collects what rows say of one another, and says what doesn't fit."""

    def __init__(
        self, counts: dict[int, BufferCount], report: Report, unread: Container[Table]
    ) -> None:
        self._counts = counts
        self._add = report.add
        self._unread = unread
        """A live view: tables that weren't read, or not to their end; nothing is missed there."""
        self._buffers: defaultdict[int, _Buffer] = defaultdict(_Buffer)
        self.damaged: defaultdict[Table, set[bytes]] = defaultdict(set)
        """Keys of damaged rows: what depends on them isn't reported again."""
        self._records: defaultdict[int, dict[int, _Known | None]] = defaultdict(dict)
        """By buffer and seq; None: a tombstone."""
        self._missing: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """By buffer and hash of the uid's key, seqs whose payload hasn't been seen yet."""
        self._strays: defaultdict[int, set[bytes]] = defaultdict(set)
        """By buffer, keys of payloads that no record waits for: maybe pushed or moved since."""
        self._misfits: list[tuple[int, bytes, int]] = []
        """Buffer, key and seq of payloads that aren't what their record says; maybe annotated since."""
        self._uncounted: list[bytes] = []
        """Keys of advantages without a magnitude; maybe computed since."""
        self.takers: Final[dict[Table, _Take]] = {
            Table.RECORDS: self._take_record,
            Table.DEPARTED: self._take_departed,
            Table.GROUPS: self._take_group,
            Table.LEASES: self._take_lease,
            Table.PROGRESS: self._take_progress,
            Table.CONSUMERS: lambda _, key, value: row_codec.decode_consumer(value),
            Table.MAGNITUDES: self._take_magnitude,
            Table.PAYLOADS: self.take_payload,
            Table.ADVANTAGES: self._take_advantages,
            Table.MEMORY: lambda _, key, value: disk.memory_time(value),
            Table.MEMORY_LOG: lambda _, key, value: disk.memory_log_time(key),
        }
        """Each decodes a value, and raises as the decoders do. Of `EXTENTS`, see `take_payload`."""

    # --- the index, in one transaction

    def _take_record(self, buffer_id: int, key: bytes, value: memoryview) -> None:
        record = row_codec.decode_record(value)
        count, buffer = self._counts[buffer_id], self._buffers[buffer_id]
        if record.group_id:
            buffer.members[record.group_id] += 1
        self._records[buffer_id][record.seq] = None if record.tombstone else _known_of(record)
        if record.tombstone:
            count.num_tombstones += 1
            return
        count.num_experiences += 1
        count.payload_bytes += record.payload_bytes
        self._missing[buffer_id][_hash(disk.payload_key(buffer_id, record.uid))] = record.seq
        if record.note:
            count.num_set_aside += 1
            self._add(Kind.SET_ASIDE, Table.RECORDS, key, f"{record.uid}: {record.note}")

    def _take_departed(self, buffer_id: int, key: bytes, value: memoryview) -> None:
        row = row_codec.decode_departed(value)
        self._counts[buffer_id].num_departed += 1
        self._records[buffer_id][row.record.seq] = _known_of(row.record)
        self._missing[buffer_id][_hash(departed_place(key, row))] = row.record.seq

    def _take_group(self, buffer_id: int, key: bytes, value: memoryview) -> None:
        group = row_codec.decode_group(value)
        self._counts[buffer_id].num_groups += 1
        self._buffers[buffer_id].groups[group.id] = group
        if group.quarantined:
            self._add(Kind.SET_ASIDE, Table.GROUPS, key, f"{group.key}: {group.note}")

    def _take_lease(self, buffer_id: int, key: bytes, value: memoryview) -> None:
        lease = row_codec.decode_lease(value)
        if lease.state == "open":
            self._counts[buffer_id].num_open_leases += 1
            seqs = [seq for unit in lease.units for seq in unit]
            self._buffers[buffer_id].leases.append((lease.id, seqs))

    def _take_progress(self, buffer_id: int, key: bytes, value: memoryview) -> None:
        self._buffers[buffer_id].progress.append(row_codec.decode_progress(value).seq)

    def _take_magnitude(self, buffer_id: int, key: bytes, value: memoryview) -> None:
        disk.decode_magnitude(value)
        self._counts[buffer_id].num_computed += 1
        self._buffers[buffer_id].magnitudes.add(disk.number_of(key))

    def check_index(self) -> None:
        """Compare the tables of the index, once all are read."""
        if not self._were_read(Table.RECORDS):
            return
        for buffer_id, buffer in self._buffers.items():
            if self._were_read(Table.GROUPS):
                self._check_groups(buffer_id, buffer)
            known = self._records[buffer_id]
            for lease_id, seqs in buffer.leases:
                if gone := [seq for seq in seqs if seq not in known]:
                    self._leftover(Table.LEASES, buffer_id, lease_id, f"of unknown seqs {gone[:9]}")
            for seq in buffer.progress:
                if seq not in known:
                    self._leftover(Table.PROGRESS, buffer_id, seq, "of an unknown experience")
            for seq in buffer.magnitudes.difference(known):
                key = disk.numbered_key(buffer_id, seq)
                if key not in self.damaged[Table.RECORDS]:
                    self._add(
                        Kind.ORPHAN_ADVANTAGES, Table.MAGNITUDES, key, "of an unknown experience"
                    )

    def _check_groups(self, buffer_id: int, buffer: _Buffer) -> None:
        for group_id, count in buffer.members.items():
            key = disk.numbered_key(buffer_id, group_id)
            group = buffer.groups.get(group_id)
            if group is None and key not in self.damaged[Table.GROUPS]:
                message = f"{count} members of a group that has no row"
                self._add(Kind.MISSING_GROUP, Table.GROUPS, key, message)
            if group is not None and group.closed == "whole" and count > group.size:
                message = f"{group.key}: {count} members, {group.size} make it whole"
                self._add(Kind.OVERFULL_GROUP, Table.GROUPS, key, message)

    # --- payloads and advantages, part by part

    def take_payload(self, buffer_id: int, key: bytes, payload: memoryview) -> None:
        """Take a payload, from wherever it lay."""
        seq = self._missing[buffer_id].pop(_hash(key), 0)
        known = self._records[buffer_id].get(seq)
        if known is None:
            self._strays[buffer_id].add(key)
        elif _misfit(known, payload):
            self._misfits.append((buffer_id, key, seq))

    def _take_advantages(self, buffer_id: int, key: bytes, value: memoryview) -> None:
        row_codec.decode_advantages(value)
        magnitudes = self._buffers[buffer_id].magnitudes
        if disk.number_of(key) in magnitudes:
            magnitudes.remove(disk.number_of(key))
        elif key not in self.damaged[Table.MAGNITUDES]:
            self._uncounted.append(key)

    def _were_read(self, *tables: Table) -> bool:
        return not any(table in self._unread for table in tables)

    def check_again(self, again: Again) -> None:
        """Look once more at what didn't fit."""
        if not self._were_read(Table.RECORDS):
            return
        self._check_payloads_again(again)
        if not self._were_read(Table.ADVANTAGES, Table.MAGNITUDES):
            return
        for buffer_id, buffer in self._buffers.items():
            for seq in buffer.magnitudes & self._records[buffer_id].keys():
                self._confirm_uncomputed(again.get, disk.numbered_key(buffer_id, seq))
        for key in self._uncounted:
            self._confirm_uncounted(again.get, key)

    def _check_payloads_again(self, again: Again) -> None:
        # What may be in a table that wasn't read isn't missed.
        tables = [table for table in _PAYLOAD_TABLES if self._were_read(table)]
        if len(tables) == len(_PAYLOAD_TABLES):
            for buffer_id, missing in self._missing.items():
                for seq in missing.values():
                    self._confirm_missing(again.get, buffer_id, seq)
        for buffer_id, strays in self._strays.items():
            self._confirm_strays(again, tables, buffer_id, strays)
        for buffer_id, key, seq in self._misfits:
            for table in tables:
                self._confirm_misfit(again, table, buffer_id, key, seq)

    def _confirm_missing(self, get: _Get, buffer_id: int, seq: int) -> None:
        record = _record_at(get, buffer_id, seq)
        if record is None:
            return  # It has left meanwhile.
        key = disk.payload_key(buffer_id, record.uid)
        if any(key in self.damaged[table] for table in _PAYLOAD_TABLES):
            return
        if all(get(table, key) is None for table in _PAYLOAD_TABLES):
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
                break
            if is_sound(Table.RECORDS, key, stored):
                record = row_codec.decode_record(stored[:-SEAL_BYTES])
                if not record.tombstone:
                    orphans.discard(disk.payload_key(buffer_id, record.uid))
        for key, stored in again.rows_from(Table.DEPARTED, first):
            if not orphans or not key.startswith(first[:4]):
                return
            if is_sound(Table.DEPARTED, key, stored):
                row = row_codec.decode_departed(stored[:-SEAL_BYTES])
                orphans.discard(departed_place(key, row))

    def _confirm_misfit(
        self, again: Again, table: Table, buffer_id: int, key: bytes, seq: int
    ) -> None:
        record, payload = _record_at(again.get, buffer_id, seq), again.payload(table, key)
        if record is None or payload is None or disk.payload_key(buffer_id, record.uid) != key:
            return
        kind = _misfit(_known_of(record), payload)
        if kind is Kind.WRONG_SIZE:
            message = f"{len(payload)} bytes, its record says {record.payload_bytes}"
            self._add(kind, table, key, message)
        elif kind is not None:
            self._add(kind, table, key, "it isn't the payload that was pushed")

    def _confirm_uncomputed(self, get: _Get, key: bytes) -> None:
        if key in self.damaged[Table.ADVANTAGES] or get(Table.ADVANTAGES, key) is not None:
            return
        if get(Table.MAGNITUDES, key) is not None:
            message = "computed, says table magnitudes, and there are no advantages"
            self._add(Kind.MISSING_ADVANTAGES, Table.ADVANTAGES, key, message)

    def _confirm_uncounted(self, get: _Get, key: bytes) -> None:
        if get(Table.ADVANTAGES, key) is not None and get(Table.MAGNITUDES, key) is None:
            message = "advantages that table magnitudes knows nothing of"
            self._add(Kind.ORPHAN_ADVANTAGES, Table.ADVANTAGES, key, message)

    # --- what is said

    def _leftover(self, table: Table, buffer_id: int, number: int, message: str) -> None:
        if disk.numbered_key(buffer_id, number) not in self.damaged[Table.RECORDS]:
            self._add(Kind.LEFTOVER, table, disk.numbered_key(buffer_id, number), message)


def _hash(key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key)
