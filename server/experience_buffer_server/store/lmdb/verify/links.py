"""How the rows of a store fit together: what each table says of the others. No I/O of its own.

The index tables are read in one transaction. Payloads (`check_payloads`) and advantages are read part
by part while a server may be writing: what doesn't fit then is only suspected, and looked at once
more at the end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container
from typing import Final

from experience_buffer_server.store import row_codec
from experience_buffer_server.store.interface import GroupRow
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.verify.payloads import (
    PAYLOAD_TABLES,
    Again,
    Get,
    Known,
    PayloadLinks,
    known_of,
)
from experience_buffer_server.store.lmdb.verify.report import BufferCount, Kind, Report

_Take = Callable[[int, bytes, memoryview], object]


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
        self._records: defaultdict[int, dict[int, Known | None]] = defaultdict(dict)
        """By buffer and seq; None: a tombstone."""
        self._payloads = PayloadLinks(self._records, self.damaged, self._add)
        self._uncounted: list[bytes] = []
        """Keys of advantages without a magnitude; maybe computed since."""
        self.takers: Final[dict[Table, _Take]] = {
            Table.RECORDS: self._take_record,
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
        self._records[buffer_id][record.seq] = None if record.tombstone else known_of(record)
        if record.tombstone:
            count.num_tombstones += 1
            return
        count.num_experiences += 1
        count.payload_bytes += record.payload_bytes
        self._payloads.expect(buffer_id, record)
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
        self._payloads.take(buffer_id, key, payload)

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
        tables = [table for table in PAYLOAD_TABLES if self._were_read(table)]
        self._payloads.check_again(again, tables)
        if not self._were_read(Table.ADVANTAGES, Table.MAGNITUDES):
            return
        for buffer_id, buffer in self._buffers.items():
            for seq in buffer.magnitudes & self._records[buffer_id].keys():
                self._confirm_uncomputed(again.get, disk.numbered_key(buffer_id, seq))
        for key in self._uncounted:
            self._confirm_uncounted(again.get, key)

    def _confirm_uncomputed(self, get: Get, key: bytes) -> None:
        if key in self.damaged[Table.ADVANTAGES] or get(Table.ADVANTAGES, key) is not None:
            return
        if get(Table.MAGNITUDES, key) is not None:
            message = "computed, says table magnitudes, and there are no advantages"
            self._add(Kind.MISSING_ADVANTAGES, Table.ADVANTAGES, key, message)

    def _confirm_uncounted(self, get: Get, key: bytes) -> None:
        if get(Table.ADVANTAGES, key) is not None and get(Table.MAGNITUDES, key) is None:
            message = "advantages that table magnitudes knows nothing of"
            self._add(Kind.ORPHAN_ADVANTAGES, Table.ADVANTAGES, key, message)

    # --- what is said

    def _leftover(self, table: Table, buffer_id: int, number: int, message: str) -> None:
        if disk.numbered_key(buffer_id, number) not in self.damaged[Table.RECORDS]:
            self._add(Kind.LEFTOVER, table, disk.numbered_key(buffer_id, number), message)
