"""The experiences of one buffer in a store that nobody need be serving, part by part, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import lmdb

from experience_buffer.v1 import service_pb2
from experience_buffer_server.store import row_codec
from experience_buffer_server.store.deliveries import deliveries
from experience_buffer_server.store.interface import (
    AdvantageRow,
    BufferRow,
    DamagedRecordError,
    GroupRow,
    ProgressRow,
    Record,
    StoreFailedError,
)
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import DECODE_ERRORS, Table, unseal
from experience_buffer_server.store.lmdb.disk.opening import open_to_read
from experience_buffer_server.store.lmdb.reader import LmdbReader
from experience_buffer_server.store.lmdb.rest.rest_messages import message_of

CHUNK_ROWS: Final = 128
_CHUNK_BYTES: Final = 1 << 20
_MOST_KEPT_GROUPS: Final = 4096
_READ_ERRORS: Final = (*DECODE_ERRORS, lmdb.Error, StoreFailedError)


class Problem(NamedTuple):
    """What can't be read."""

    what: str
    """A uid, or what of the store."""
    reason: str


class Part(NamedTuple):
    """Some experiences in the order of their arrival."""

    experiences: Sequence[service_pb2.ScannedExperience]
    problems: Sequence[Problem]
    last_seq: int
    """What is before it has been looked at, and itself."""


class RestReader(LmdbReader):
    """Reads a store also where no server is: without a lock file, none is left behind."""

    def _begin_reading(self) -> None:
        lock = (self._path / "lock.mdb").exists()
        self._env, self._tables = open_to_read(self._path, lock=lock)

    def buffers(self) -> tuple[dict[str, BufferRow], list[Problem]]:
        """The buffers by name, each of its row or of the copy of it; and what can't be read."""
        found: dict[int, BufferRow] = {}
        problems: dict[bytes, Problem] = {}
        for table in (Table.BUFFER_COPIES, Table.BUFFERS):
            try:
                with self._transaction() as txn, txn.cursor(self._tables[table]) as cursor:
                    for key, stored in cursor:
                        try:
                            row = row_codec.decode_buffer(unseal(table, bytes(key), stored))
                            found[row.id] = row
                        except DECODE_ERRORS as error:
                            name = disk.row_name(table, bytes(key))
                            problems[bytes(key)] = Problem(name, str(error))
            except _READ_ERRORS as error:
                problems[b""] = Problem(f"table {table.disk_name.decode()}", str(error))
        lost = [
            each for key, each in problems.items() if int.from_bytes(key[:4], "big") not in found
        ]
        return {row.name: row for row in found.values() if not row.is_deleted}, lost

    def last_seq(self, buffer_id: int) -> int:
        """The highest number of an experience, as far as it can be told."""
        key = disk.buffer_key(buffer_id + 1)
        try:
            with self._transaction() as txn, txn.cursor(self._tables[Table.RECORDS]) as cursor:
                is_there = cursor.set_range(key)
                is_there = cursor.prev() if is_there else cursor.last()
                last = bytes(cursor.key()) if is_there else b""
        except _READ_ERRORS:
            last = b""
        found = disk.number_of(last) if last[:4] == disk.buffer_key(buffer_id) else 0
        return max(found, self._counted(buffer_id))

    def _counted(self, buffer_id: int) -> int:
        rows = self._get_one(Table.COUNTERS, disk.buffer_key(buffer_id), disk.decode_counter)
        return rows if isinstance(rows, int) else 0

    def _get_one(self, table: Table, key: bytes, decode: Any) -> Any:
        try:
            return self._get(table, [key], decode)[0]
        except StoreFailedError as error:
            return DamagedRecordError(str(error))

    def records(
        self, buffer_id: int, after: int, limit: int
    ) -> tuple[list[tuple[int, Record | str]], int]:
        """Up to so many records after a number, or why they can't be read; and how far it looked.

        Raises:
            lmdb.Error: A page is damaged.
            DamagedRecordError: The same.
        """
        found: list[tuple[int, Record | str]] = []
        prefix, table, num_bytes = disk.buffer_key(buffer_id), Table.RECORDS, 0
        with self._transaction() as txn, txn.cursor(self._tables[table]) as cursor:
            is_there = cursor.set_range(disk.numbered_key(buffer_id, after + 1))
            while is_there and len(found) < limit and num_bytes < _CHUNK_BYTES:
                key = bytes(cursor.key())
                if not key.startswith(prefix):
                    break
                seq = disk.number_of(key)
                try:
                    record = row_codec.decode_record(unseal(table, key, cursor.value()))
                    found.append((seq, record))
                    num_bytes += record.payload_bytes
                except DECODE_ERRORS as error:
                    found.append((seq, str(error)))
                is_there = cursor.next()
        return found, found[-1][0] if found else -1

    def progress(self, buffer_id: int, seqs: Sequence[int]) -> list[ProgressRow | None]:
        """How far consumers are with experiences; None where nothing has happened, or can't be read."""
        keys = [disk.numbered_key(buffer_id, seq) for seq in seqs]
        rows = self._get(Table.PROGRESS, keys, row_codec.decode_progress)
        return [row if isinstance(row, ProgressRow) else None for row in rows]

    def acked(self, buffer_id: int, consumer: str, step: int) -> dict[int, int]:
        """By seq, how often a consumer has acknowledged experiences with a training step.

        Raises:
            StoreError: A page is damaged.
        """
        found: dict[int, int] = {}
        prefix, table = disk.buffer_key(buffer_id), Table.PROGRESS
        with self._transaction() as txn, txn.cursor(self._tables[table]) as cursor:
            is_there = cursor.set_range(prefix)
            while is_there and (key := bytes(cursor.key())).startswith(prefix):
                with suppress(*disk.DECODE_ERRORS):
                    row = row_codec.decode_progress(disk.unseal(table, key, cursor.value()))
                    if count := row.steps.get(consumer, []).count(step):
                        found[row.seq] = count
                is_there = cursor.next()
        return found

    def some_records(self, buffer_id: int, seqs: Sequence[int]) -> dict[int, Record]:
        """Those of the records that can be read, by seq."""
        keys = [disk.numbered_key(buffer_id, seq) for seq in seqs]
        rows = self._get(Table.RECORDS, keys, row_codec.decode_record)
        return {row.seq: row for row in rows if isinstance(row, Record)}

    def group(self, buffer_id: int, group_id: int) -> GroupRow | None:
        """A group; None where it can't be read."""
        key = disk.numbered_key(buffer_id, group_id)
        row = self._get_one(Table.GROUPS, key, row_codec.decode_group)
        return row if isinstance(row, GroupRow) else None


class RestRows:
    """Goes through the experiences of one buffer. Not thread-safe.

    Args:
        reader: Of the store.
        row: The buffer's.
        where: Which.
        with_payloads: Whether payloads are read.
    """

    def __init__(
        self,
        reader: RestReader,
        row: BufferRow,
        where: service_pb2.Filter,
        *,
        with_payloads: bool = True,
    ) -> None:
        self._reader = reader
        self._row = row
        self._where = where
        self._with_payloads = with_payloads
        self._groups: dict[int, GroupRow | None] = {}
        self.num_lost = 0
        """Records that can't be read."""

    def part(self, after: int, last_seq: int, *, limit: int = CHUNK_ROWS) -> Part | None:
        """The experiences that come after a number; None: there are no more."""
        problems: list[Problem] = []
        try:
            found, looked = self._reader.records(self._row.id, after, limit)
        except _READ_ERRORS as error:
            return self._over_the_gap(after, last_seq, error)
        if not found:
            return None
        records = []
        for seq, record in found:
            if isinstance(record, str):
                self.num_lost += 1
                problems.append(Problem(f"record {seq}", record))
            else:
                records.append(record)
        messages, more = self._messages(records)
        return Part(messages, [*problems, *more], looked)

    def _over_the_gap(self, after: int, last_seq: int, error: Exception) -> Part | None:
        """Go on behind a page of the index that can't be read: with the first record that can be."""
        low, step = after + 1, 1
        while low <= last_seq:
            try:
                found, _ = self._reader.records(self._row.id, low, 1)
            except _READ_ERRORS:
                low, step = low + step, min(step * 2, 64)
                continue
            # Those before it, back to the gap, are looked for one by one.
            while low > after + 1:
                try:
                    found, _ = self._reader.records(self._row.id, low - 1, 1)
                except _READ_ERRORS:
                    break
                low -= 1
            if not found:
                break
            self.num_lost += 1
            what = f"records {after + 1} to {found[0][0] - 1}"
            return Part((), [Problem(what, f"a page of the index is damaged: {error}")], low)
        if low > last_seq or after < last_seq:
            self.num_lost += 1
            what = f"records from {after + 1} on"
            return Part((), [Problem(what, f"a page of the index is damaged: {error}")], last_seq)
        return None

    def _messages(
        self, records: Sequence[Record]
    ) -> tuple[list[service_pb2.ScannedExperience], list[Problem]]:
        reader, buffer_id = self._reader, self._row.id
        progress = reader.progress(buffer_id, [record.seq for record in records])
        rows = reader.advantages(buffer_id, [record.seq for record in records])
        chosen = []
        for record, known, row in zip(records, progress, rows, strict=True):
            computed = row if isinstance(row, AdvantageRow) else None
            group = self._group(record.group_id)
            message = message_of(
                self._row, record, known, computed, group, self._where,
                with_payloads=self._with_payloads,
            )  # fmt: skip
            if message is not None:
                chosen.append((record, message, row))
        read = [record for record, _, _ in chosen if not record.tombstone]
        uids = [record.uid for record in read] if self._with_payloads else []
        payloads = dict(zip(uids, reader.payloads(buffer_id, uids), strict=True))
        problems = []
        for record, message, row in chosen:
            payload = payloads.get(record.uid)
            reason = ""
            if isinstance(payload, DamagedRecordError):
                reason = str(payload)
            elif self._with_payloads and payload is None and not record.tombstone:
                reason = "its payload is gone"
            elif isinstance(row, DamagedRecordError):
                # What was pushed is sound: it can be computed again.
                problems.append(Problem(record.uid, f"its advantages: {row}"))
            if reason:
                message.damage = reason
            elif isinstance(payload, bytes):
                message.payload = payload
        return [message for _, message, _ in chosen], problems

    def delivered(self, consumer: str, step: int) -> Iterator[Part]:
        """What a training step has consumed, in the order in which it was delivered.

        Raises:
            StoreError: A page is damaged.
        """
        reader, buffer_id = self._reader, self._row.id
        acked = reader.acked(buffer_id, consumer, step)
        order = deliveries(reader.leases(buffer_id), consumer, step, acked)
        for start in range(0, len(order), CHUNK_ROWS):
            marks = order[start : start + CHUNK_ROWS]
            records = reader.some_records(buffer_id, [mark.seq for mark in marks])
            lost = [
                Problem(f"record {mark.seq}", "it can't be read back")
                for mark in marks
                if mark.seq not in records
            ]
            kept = [mark for mark in marks if mark.seq in records]
            messages, problems = self._messages([records[mark.seq] for mark in kept])
            for message, mark in zip(messages, kept, strict=True):
                message.lease_id, message.unit, message.rank = mark.lease_id, mark.unit, mark.rank
                message.cursor = ""
            yield Part(messages, [*lost, *problems], 0)

    def _group(self, group_id: int) -> GroupRow | None:
        if not group_id:
            return None
        if group_id not in self._groups:
            if len(self._groups) >= _MOST_KEPT_GROUPS:
                self._groups.clear()
            self._groups[group_id] = self._reader.group(self._row.id, group_id)
        return self._groups[group_id]

    def orphans(self) -> Iterator[Part]:
        """Payloads of which no record can be read: what was pushed is whole, all else is lost."""
        known: set[str] = set()
        after, last = 0, self._reader.last_seq(self._row.id)
        while after < last:
            try:
                found, looked = self._reader.records(self._row.id, after, CHUNK_ROWS)
            except _READ_ERRORS:
                found, looked = [], after + 1
            else:
                if not found:
                    break
            known.update(record.uid for _, record in found if isinstance(record, Record))
            after = looked
        uids: list[str] = []
        for uid in self._payload_uids():
            if uid not in known:
                uids.append(uid)
            if len(uids) >= CHUNK_ROWS:
                yield self._orphans(uids)
                uids = []
        if uids:
            yield self._orphans(uids)

    def _payload_uids(self) -> Iterator[str]:
        try:
            yield from self._reader.payload_uids(self._row.id)
        except _READ_ERRORS:
            return

    def _orphans(self, uids: Sequence[str]) -> Part:
        messages, problems = [], []
        for uid, payload in zip(uids, self._reader.payloads(self._row.id, uids), strict=True):
            if isinstance(payload, bytes):
                message = service_pb2.ScannedExperience(payload=payload)
                message.summary.uid = uid
                message.summary.message = "its record is damaged: only what was pushed is left"
                messages.append(message)
            elif payload is not None:
                problems.append(Problem(uid, str(payload)))
        return Part(messages, problems, 0)
