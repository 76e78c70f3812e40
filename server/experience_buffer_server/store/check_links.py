"""How the rows of a store fit together: what each table says of the others. No I/O of its own.

The index tables are read in one transaction. Payloads and advantages are read part by part while a
server may be writing: what doesn't fit then is only suspected, and looked at once more at the end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator
from typing import Final, NamedTuple

import xxhash

from experience_buffer_server.store import format as disk
from experience_buffer_server.store import row_codec
from experience_buffer_server.store.base import REPLACED, GroupRow, Record
from experience_buffer_server.store.format import Table
from experience_buffer_server.store.report import BufferCount, Finding, Kind, Report
from experience_buffer_server.store.seal import SEAL_BYTES, is_sound

_Get = Callable[[Table, bytes], memoryview | None]
_RowsFrom = Callable[[Table, bytes], Iterator[tuple[bytes, memoryview]]]
_Take = Callable[[int, bytes, memoryview], None]


class _Known(NamedTuple):
    """What is kept of a record: of millions of them, little."""

    payload_bytes: int
    digest: bytes
    """Empty where it isn't of the present payload."""


class _Buffer:
    """What the index says of one buffer."""

    def __init__(self) -> None:
        self.records: dict[int, _Known | None] = {}
        """By seq; None: a tombstone."""
        self.members: Counter[int] = Counter()
        """By group."""
        self.groups: dict[int, GroupRow] = {}
        self.magnitudes: set[int] = set()
        self.missing: dict[int, int] = {}
        """By hash of the uid's key, seqs of experiences whose payload hasn't been seen yet."""
        self.leases: list[tuple[int, list[int]]] = []
        self.progress: list[int] = []


class Links:
    """Collects what rows say of one another, and says what doesn't fit."""

    def __init__(
        self, counts: dict[int, BufferCount], report: Report, unread: Container[Table]
    ) -> None:
        self._counts = counts
        self._report = report
        self._unread = unread
        """A live view: tables that weren't read, or not to their end; nothing is missed there."""
        self._buffers: defaultdict[int, _Buffer] = defaultdict(_Buffer)
        self.damaged: defaultdict[Table, set[bytes]] = defaultdict(set)
        """Keys of damaged rows: what depends on them isn't reported again."""
        self._orphans: defaultdict[int, set[bytes]] = defaultdict(set)
        """By buffer, keys of payloads without a record; maybe pushed since."""
        self._misfits: list[tuple[int, bytes, int]] = []
        """Buffer, key and seq of payloads that aren't what their record says; maybe annotated since."""
        self._uncounted: list[bytes] = []
        """Keys of advantages without a magnitude; maybe computed since."""
        self.takers: Final[dict[Table, _Take]] = {
            Table.RECORDS: self._take_record,
            Table.GROUPS: self._take_group,
            Table.LEASES: self._take_lease,
            Table.PROGRESS: self._take_progress,
            Table.CONSUMERS: _take_consumer,
            Table.MAGNITUDES: self._take_magnitude,
            Table.PAYLOADS: self._take_payload,
            Table.ADVANTAGES: self._take_advantages,
            Table.MEMORY: _take_memory,
            Table.MEMORY_LOG: _take_memory_log,
        }
        """Each decodes a value, and raises as the decoders do."""

    # --- the index, in one transaction

    def _take_record(self, buffer_id: int, key: bytes, value: memoryview) -> None:
        record = row_codec.decode_record(value)
        count, buffer = self._counts[buffer_id], self._buffers[buffer_id]
        if record.group_id:
            buffer.members[record.group_id] += 1
        buffer.records[record.seq] = None if record.tombstone else _known(record)
        if record.tombstone:
            count.num_tombstones += 1
            return
        count.num_experiences += 1
        count.payload_bytes += record.payload_bytes
        buffer.missing[_hash(disk.payload_key(buffer_id, record.uid))] = record.seq
        if record.note:
            count.num_set_aside += 1
            self._add(Kind.SET_ASIDE, Table.RECORDS, key, f"{record.uid}: {record.note}")

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
            known = buffer.records
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

    def _take_payload(self, buffer_id: int, key: bytes, value: memoryview) -> None:
        buffer = self._buffers[buffer_id]
        seq = buffer.missing.pop(_hash(key), 0)
        known = buffer.records.get(seq)
        if known is None:
            self._orphans[buffer_id].add(key)
        elif _misfit(known, value):
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

    def check_again(self, get: _Get, rows_from: _RowsFrom) -> None:
        """Look once more at what didn't fit.

        Args:
            get: Reads a row, in one transaction for all.
            rows_from: The rows of a table from a key on, in the same transaction.
        """
        if not self._were_read(Table.RECORDS):
            return
        for buffer_id, buffer in self._buffers.items():
            if self._were_read(Table.PAYLOADS):
                for seq in buffer.missing.values():
                    self._confirm_missing(get, buffer_id, seq)
                self._confirm_orphans(get, rows_from, buffer_id, buffer)
            if self._were_read(Table.ADVANTAGES, Table.MAGNITUDES):
                for seq in buffer.magnitudes & buffer.records.keys():
                    self._confirm_uncomputed(get, disk.numbered_key(buffer_id, seq))
        for buffer_id, key, seq in self._misfits if self._were_read(Table.PAYLOADS) else ():
            self._confirm_misfit(get, buffer_id, key, seq)
        is_read = self._were_read(Table.ADVANTAGES, Table.MAGNITUDES)
        for key in self._uncounted if is_read else ():
            self._confirm_uncounted(get, key)

    def _confirm_missing(self, get: _Get, buffer_id: int, seq: int) -> None:
        record = self._record(get, buffer_id, seq)
        if record is None:
            return  # It has left meanwhile.
        key = disk.payload_key(buffer_id, record.uid)
        if key not in self.damaged[Table.PAYLOADS] and get(Table.PAYLOADS, key) is None:
            message = f"experience {seq} has no payload"
            self._add(Kind.MISSING_PAYLOAD, Table.PAYLOADS, key, message)

    def _confirm_orphans(
        self, get: _Get, rows_from: _RowsFrom, buffer_id: int, buffer: _Buffer
    ) -> None:
        orphans = {key for key in self._orphans[buffer_id] if get(Table.PAYLOADS, key) is not None}
        if not orphans:
            return
        # What was pushed since the index was read has seqs above all that were known.
        first = disk.numbered_key(buffer_id, max(buffer.records, default=0) + 1)
        for key, stored in rows_from(Table.RECORDS, first):
            if not key.startswith(first[:4]):
                break
            if is_sound(Table.RECORDS, key, stored):
                uid = row_codec.decode_record(stored[:-SEAL_BYTES]).uid
                orphans.discard(disk.payload_key(buffer_id, uid))
        for key in sorted(orphans):
            self._add(Kind.ORPHAN_PAYLOAD, Table.PAYLOADS, key, "the payload of no experience")

    def _confirm_misfit(self, get: _Get, buffer_id: int, key: bytes, seq: int) -> None:
        record, stored = self._record(get, buffer_id, seq), get(Table.PAYLOADS, key)
        if record is None or stored is None or disk.payload_key(buffer_id, record.uid) != key:
            return
        payload = stored[:-SEAL_BYTES]
        kind = misfit(record, payload)
        if kind is Kind.WRONG_SIZE:
            message = f"{len(payload)} bytes, its record says {record.payload_bytes}"
            self._add(kind, Table.PAYLOADS, key, message)
        elif kind is not None:
            self._add(kind, Table.PAYLOADS, key, "it isn't the payload that was pushed")

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

    def _record(self, get: _Get, buffer_id: int, seq: int) -> Record | None:
        key = disk.numbered_key(buffer_id, seq)
        stored = get(Table.RECORDS, key)
        if stored is None or not is_sound(Table.RECORDS, key, stored):
            return None
        return row_codec.decode_record(stored[:-SEAL_BYTES])

    # --- what is said

    def _leftover(self, table: Table, buffer_id: int, number: int, message: str) -> None:
        if disk.numbered_key(buffer_id, number) not in self.damaged[Table.RECORDS]:
            self._add(Kind.LEFTOVER, table, disk.numbered_key(buffer_id, number), message)

    def _add(self, kind: Kind, table: Table, key: bytes, message: str) -> None:
        self._report.add(
            Finding(
                kind=kind,
                table=table.disk_name.decode(),
                buffer=int.from_bytes(key[:4], "big"),
                row=disk.row_label(table, key),
                message=message,
            )
        )


def _take_consumer(buffer_id: int, key: bytes, value: memoryview) -> None:
    row_codec.decode_consumer(value)


def _take_memory(buffer_id: int, key: bytes, value: memoryview) -> None:
    disk.memory_time(value)


def _take_memory_log(buffer_id: int, key: bytes, value: memoryview) -> None:
    disk.memory_log_time(key)


def _known(record: Record) -> _Known:
    return _Known(record.payload_bytes, b"" if record.fields & REPLACED else record.digest)


def misfit(record: Record, payload: bytes | memoryview) -> Kind | None:
    """How a payload isn't the one that its record says; None where it is."""
    return _misfit(_known(record), payload)


def _misfit(known: _Known, payload: bytes | memoryview) -> Kind | None:
    if len(payload) != known.payload_bytes:
        return Kind.WRONG_SIZE
    if known.digest and xxhash.xxh3_128_digest(payload) != known.digest:
        return Kind.WRONG_DIGEST
    return None


def _hash(key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key)
