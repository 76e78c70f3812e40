"""Making the sound rows of a store fit together, once the damaged ones are gone."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import lmdb
import msgpack

from experience_buffer_server.store.interface import (
    BufferRow,
    DamagedRecordError,
    GroupRow,
    LeaseRow,
    Record,
)
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk import row_codec
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.disk.seal import seal, unseal
from experience_buffer_server.store.lmdb.large.reads import LargePayloads
from experience_buffer_server.store.lmdb.loading import plausible
from experience_buffer_server.store.lmdb.verify.payloads import PAYLOAD_TABLES, known_of, misfit
from experience_buffer_server.store.lmdb.verify.rebuilding import Aside

_DECODE_ERRORS: Final = (ValueError, TypeError, struct.error, DamagedRecordError)
_Row = TypeVar("_Row")


class Mender:
    """Makes sound rows fit together, in one write transaction on a store that holds no others."""

    def __init__(
        self,
        txn: lmdb.Transaction[bytes],
        tables: list[lmdb._Database],
        aside: Aside,
        done: list[str],
        lost: dict[Table, list[bytes]],
        large: LargePayloads,
    ) -> None:
        self._txn = txn
        self._tables = tables
        self._pack = msgpack.Packer().pack
        self._aside = aside
        self._done = done
        self._lost = lost
        """Keys of rows that were damaged."""
        self._large = large
        self._lost_of: defaultdict[bytes, int] = defaultdict(int)
        """By key of the group, members that were taken out."""
        self._lease_floors: dict[bytes, int] = {}
        """By key of the buffer, what the ids of its leases are above."""

    def run(self) -> None:
        """Do all of it."""
        self._buffers()
        self._reserve_numbers()
        self._advantages()
        self._experiences()
        self._groups()

    # --- tables

    def _buffers(self) -> None:
        known: set[bytes] = set()
        keys = {key for table in _BUFFER_TABLES for key, _ in self._rows(table)}
        for key in sorted(keys):
            found: list[BufferRow] = []
            for table in _BUFFER_TABLES:
                stored = self._get(table, key)
                if stored is None:
                    continue
                row = self._sound(table, key, stored, row_codec.decode_buffer)
                found += [row] if row is not None else []
            if not found:
                continue
            known.add(key)
            self._lease_floors[key] = found[0].lease_floor
            value = row_codec.encode_buffer(found[0], self._pack)
            for table in _BUFFER_TABLES:
                if self._get(table, key) is None:
                    self._put(table, key, value)
                    self._say(f"buffer {found[0].name!r}: its row was written again from its copy")
        for table in Table:
            for key, stored in self._rows(table) if table is not Table.META else ():
                if key[:4] not in known:
                    self._take(table, key, stored, "its buffer has no row")

    def _reserve_numbers(self) -> None:
        """Nobody else gets the number of a damaged record, or the id of a damaged lease."""
        for key in self._lost[Table.RECORDS]:
            if self._get(Table.BUFFERS, key[:4]) is not None:
                last = [disk.number_of(found) for found in self._last_key(Table.RECORDS, key[:4])]
                self._count(key[:4], *plausible([disk.number_of(key)], *last))
        for key in self._lost[Table.LEASES]:
            if self._get(Table.BUFFERS, key[:4]) is None:
                continue
            last = [disk.number_of(found) for found in self._last_key(Table.LEASES, key[:4])]
            floor = self._lease_floors.get(key[:4], 0)
            (number,) = plausible([disk.number_of(key)], floor, *last)
            place = disk.numbered_key(int.from_bytes(key[:4], "big"), number)
            if self._get(Table.LEASES, place) is None:
                ended = LeaseRow(id=number, consumer="", units=[], deadline=0.0, state="expired")
                self._put(Table.LEASES, place, row_codec.encode_lease(ended, self._pack))
            self._say(f"{disk.row_name(Table.LEASES, key)}: ended, what it held is offered again")

    def _last_key(self, table: Table, prefix: bytes) -> list[bytes]:
        """The last key of a buffer, if it has one."""
        with self._txn.cursor(self._tables[table]) as cursor:
            found = cursor.set_range(prefix + b"\xff" * 9)
            found = cursor.prev() if found else cursor.last()
            return [cursor.key()] if found and cursor.key().startswith(prefix) else []

    def _advantages(self) -> None:
        for table, other in ((Table.ADVANTAGES, Table.MAGNITUDES), _SWAPPED):
            for key, stored in self._rows(table):
                if self._get(other, key) is None:
                    self._take(table, key, stored, "its other half is gone")
                    self._say(f"{disk.row_name(table, key)}: its advantages are computed again")

    def _experiences(self) -> None:
        """Records and payloads; an experience stays if both are sound and fit."""
        payloads: set[bytes] = set()
        for key, stored in self._rows(Table.RECORDS):
            record = self._sound(Table.RECORDS, key, stored, row_codec.decode_record)
            if record is None:
                self._forget(key)
            elif not record.tombstone:
                self._experience(key, record, payloads)
        for table in PAYLOAD_TABLES:
            for key, stored in self._rows(table):
                if key not in payloads:
                    self._take(table, key, stored, "its record is gone")
        for table in (Table.ADVANTAGES, Table.MAGNITUDES, Table.PROGRESS):
            for key, stored in self._rows(table):
                if self._get(Table.RECORDS, key) is None:
                    self._take(table, key, stored, "its experience is gone")

    def _experience(self, key: bytes, record: Record, payloads: set[bytes]) -> None:
        place = disk.payload_key(int.from_bytes(key[:4], "big"), record.uid)
        if not self._has_payload(place, record):
            self._take(Table.RECORDS, key, self._get(Table.RECORDS, key) or b"", "no payload")
            self._forget(key)
            if record.group_id:
                self._lost_of[_group_of(key, record)] += 1
            self._say(f"experience {record.uid!r}: taken out; it can be pushed again")
            return
        payloads.add(place)
        if record.note:
            record.note = ""
            self._put(Table.RECORDS, key, row_codec.encode_record(record, self._pack))
            self._say(f"experience {record.uid!r}: what is left of it can be read; offered again")

    def _has_payload(self, place: bytes, record: Record) -> bool:
        """Whether an experience has a payload that is sound and its own; others are taken out."""
        is_large = record.payload_bytes >= disk.LARGE_PAYLOAD_BYTES
        found = False
        for table in reversed(PAYLOAD_TABLES) if is_large else PAYLOAD_TABLES:
            stored = self._get(table, place)
            if stored is None:
                continue
            try:
                why = "it isn't what its record says" if self._misfit(table, place, record) else ""
            except _DECODE_ERRORS as error:
                why = f"damaged: {error}"
            if not why and found:
                why = "its experience has it in another table"
            if why:
                self._take(table, place, stored, why)
            found = found or not why
        return found

    def _misfit(self, table: Table, place: bytes, record: Record) -> bool:
        """Whether a payload isn't its record's.

        Raises:
            DamagedRecordError: It can't be read, or isn't as it was written.
            struct.error: Its row isn't an extent.
        """
        value = unseal(table, place, memoryview(self._get(table, place) or b""))
        if table is Table.PAYLOADS:
            return misfit(known_of(record), value) is not None
        with self._large.read(place, disk.decode_extent(value)) as payload:
            return misfit(known_of(record), payload) is not None

    def _groups(self) -> None:
        """Groups that have lost members or their rows go on with what is left."""
        rows: dict[bytes, GroupRow] = {}
        sound: set[bytes] = set()
        for key, stored in self._rows(Table.GROUPS):
            row = self._sound(Table.GROUPS, key, stored, row_codec.decode_group)
            if row is not None and (row.quarantined or key in self._lost_of):
                rows[key] = row
            elif row is not None:
                sound.add(key)
        members: defaultdict[bytes, list[Record]] = defaultdict(list)
        for key, stored in self._rows(Table.RECORDS):
            record = row_codec.decode_record(unseal(Table.RECORDS, key, memoryview(stored)))
            group = _group_of(key, record)
            if record.group_id and group not in sound:
                members[group].append(record)
        for key, row in rows.items():
            self._reduce(key, row, members.pop(key, []))
        for key, left in members.items():
            self._regroup(key, left)

    def _reduce(self, key: bytes, row: GroupRow, left: list[Record]) -> None:
        if all(record.tombstone for record in left):
            self._close_empty(key, row, left)
            return
        if row.quarantined:
            row.size = len(left) + row.num_consumed
        elif row.closed:
            row.size -= self._lost_of[key]
        row.quarantined, row.note = False, ""
        self._put(Table.GROUPS, key, row_codec.encode_group(row, self._pack))
        self._say(f"group {row.key!r}: goes on with the {len(left)} members that it has")

    def _close_empty(self, key: bytes, row: GroupRow, left: list[Record]) -> None:
        self._take(Table.GROUPS, key, self._get(Table.GROUPS, key) or b"", "it has no members left")
        for record in left:
            place = key[:4] + disk.numbered_key(0, record.seq)[4:]
            self._take(Table.RECORDS, place, self._get(Table.RECORDS, place) or b"", "alone")
        self._say(f"group {row.key!r}: taken out, none of its members is left")

    def _regroup(self, key: bytes, left: list[Record]) -> None:
        """Members of a group whose row is gone stay together as what they are."""
        buffer = self._get(Table.BUFFERS, key[:4])
        assert buffer is not None
        config = row_codec.decode_buffer(unseal(Table.BUFFERS, key[:4], memoryview(buffer))).config
        by = json.loads(config).get("group_by", "task")
        first = left[0]
        row = GroupRow(
            id=disk.number_of(key),
            key={"run": first.rid, "step": first.sid}.get(by, first.tid),
            size=len(left),
            open_time=min(record.push_time for record in left),
            closed="sealed",
        )
        self._put(Table.GROUPS, key, row_codec.encode_group(row, self._pack))
        self._say(f"group {row.key!r}: sealed with the {len(left)} members that are left")

    # --- rows

    def _forget(self, key: bytes) -> None:
        """What depends on a record that is taken out; its number isn't given again."""
        for table in (Table.PROGRESS, Table.ADVANTAGES, Table.MAGNITUDES):
            stored = self._get(table, key)
            if stored is not None:
                self._take(table, key, stored, "its experience is gone")
        self._count(key[:4], disk.number_of(key))

    def _count(self, buffer: bytes, number: int) -> None:
        """Note that a number was given."""
        counter = self._get(Table.COUNTERS, buffer)
        if counter is not None:
            value = unseal(Table.COUNTERS, buffer, memoryview(counter))
            number = max(number, disk.decode_counter(value))
        self._put(Table.COUNTERS, buffer, disk.encode_counter(number))

    def _sound(
        self, table: Table, key: bytes, stored: bytes, decode: Callable[[memoryview], _Row]
    ) -> _Row | None:
        """The row; None, and it is taken out, where it is damaged."""
        try:
            return decode(unseal(table, key, memoryview(stored)))
        except _DECODE_ERRORS as error:
            self._take(table, key, stored, f"damaged: {error}")
            return None

    def _rows(self, table: Table) -> Iterator[tuple[bytes, bytes]]:
        """The rows of a table; they may be changed meanwhile."""
        with self._txn.cursor(self._tables[table]) as cursor:
            found, last = cursor.first(), b""
            while found:
                last, stored = cursor.item()
                yield last, stored
                found = cursor.set_range(last) and (cursor.key() != last or cursor.next())

    def _get(self, table: Table, key: bytes) -> bytes | None:
        return self._txn.get(key, db=self._tables[table])

    def _put(self, table: Table, key: bytes, value: bytes) -> None:
        self._txn.put(key, seal(table, key, value), db=self._tables[table])

    def _take(self, table: Table, key: bytes, stored: bytes, why: str) -> None:
        if self._txn.delete(key, db=self._tables[table]):
            self._aside.add(table, key, stored, why)
            self._say(f"{disk.row_name(table, key)}: set aside ({why})")

    def _say(self, text: str) -> None:
        self._done.append(text)


_BUFFER_TABLES: Final = (Table.BUFFERS, Table.BUFFER_COPIES)
_SWAPPED: Final = (Table.MAGNITUDES, Table.ADVANTAGES)


def _group_of(key: bytes, record: Record) -> bytes:
    """The key of the group of a record with this key."""
    return disk.numbered_key(int.from_bytes(key[:4], "big"), record.group_id)
