"""The batch of changes of the LMDB store: rows become bytes here, in the owner's process."""

from __future__ import annotations

from collections.abc import Sequence

from experience_buffer_server.runtime.memory_arena import Buffer
from experience_buffer_server.store.interface import (
    AdvantageRow,
    BufferRow,
    ConsumerRow,
    GroupRow,
    LeaseRow,
    Payload,
    ProgressRow,
    Record,
    Scattered,
)
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk import row_codec
from experience_buffer_server.store.lmdb.disk.format import Pack, Table
from experience_buffer_server.store.lmdb.writer_protocol import (
    DELETE_BUFFER,
    INSERT_RECORD,
    LARGE_BYTES,
    REMEMBER,
    REMOVE,
    SentOperation,
)

_RECORDS = int(Table.RECORDS)
_PAYLOADS = int(Table.PAYLOADS)
_RECORD_ROOM_BYTES = 512
"""Room to allow for an index row and its share of half-full pages."""


class LmdbWriteBatch:
    """Changes that commit together; see `experience_buffer_server.store.interface.WriteBatch`.

    Must not be used any more once it has been committed. Not thread-safe.

    A verb raises ValueError, and notes nothing, for a key too long for the store.
    """

    __slots__ = ("_pack", "append_bytes", "checksums", "direct_bytes", "large", "operations")

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self.operations: list[SentOperation] = []
        self.large: list[Sequence[Buffer]] = []
        """Values that the operations have only the lengths of, in their order; each as its pieces."""
        self.checksums: list[bytes] = []
        """Of these, as `seal.checksum` makes them; empty where one isn't known."""
        self.append_bytes = 0
        """Estimate of what the appends take on disk."""
        self.direct_bytes = 0
        """Of payloads that go past the page cache."""

    def put_buffer(self, row: BufferRow) -> None:
        """Insert or replace a buffer's row."""
        value = row_codec.encode_buffer(row, self._pack)
        self._put(Table.BUFFERS, disk.buffer_key(row.id), value)
        self._put(Table.BUFFER_COPIES, disk.buffer_key(row.id), value)

    def put_last_seq(self, buffer_id: int, last_seq: int) -> None:
        """Note that seqs and priorities' numbers up to this one were given."""
        self._put(Table.COUNTERS, disk.buffer_key(buffer_id), disk.encode_counter(last_seq))

    def delete_buffer(self, buffer_id: int) -> None:
        """Remove a buffer's row and every row of it in every table."""
        self.operations.append((DELETE_BUFFER, disk.buffer_key(buffer_id), None))

    def append(self, buffer_id: int, record: Record, payload: Payload) -> None:
        """Insert a new experience or tombstone; nothing is stored where its seq is taken."""
        self._place(INSERT_RECORD, buffer_id, record, payload)

    def replace(self, buffer_id: int, record: Record, payload: Payload) -> None:
        """Replace an experience's record and payload."""
        self._place(_RECORDS, buffer_id, record, payload)

    def _place(self, code: int, buffer_id: int, record: Record, payload: Payload) -> None:
        key = disk.numbered_key(buffer_id, record.seq)
        value = row_codec.encode_record(record, self._pack)
        room = _RECORD_ROOM_BYTES
        if not record.tombstone:
            # Half a page and more starts pages of its own; counting one more for all is close.
            room += (len(payload) // disk.PAGE_BYTES + 1) * disk.PAGE_BYTES
            place = disk.payload_key(buffer_id, record.uid)
            if len(payload) < LARGE_BYTES:
                self.operations.append((_PAYLOADS, place, bytes(payload)))
            else:
                self.operations.append((_PAYLOADS, place, len(payload)))
                if not isinstance(payload, Scattered):
                    payload = Scattered([payload])
                self.large.append(payload.parts)
                self.checksums.append(payload.checksum)
                if len(payload) >= disk.LARGE_PAYLOAD_BYTES:
                    self.direct_bytes += len(payload)
        self.operations.append((code, key, value))
        self.append_bytes += room

    def put_record(self, buffer_id: int, record: Record) -> None:
        """Replace an experience's record."""
        value = row_codec.encode_record(record, self._pack)
        self._put(Table.RECORDS, disk.numbered_key(buffer_id, record.seq), value)

    def put_group(self, buffer_id: int, row: GroupRow) -> None:
        """Insert or replace a group's row."""
        value = row_codec.encode_group(row, self._pack)
        self._put(Table.GROUPS, disk.numbered_key(buffer_id, row.id), value)

    def delete_group(self, buffer_id: int, group_id: int) -> None:
        """Remove a group's row."""
        self._put(Table.GROUPS, disk.numbered_key(buffer_id, group_id), None)

    def put_advantages(self, buffer_id: int, row: AdvantageRow, *, magnitude: float = 0.0) -> None:
        """Insert or replace what was computed for one experience."""
        key = disk.numbered_key(buffer_id, row.seq)
        self._put(Table.ADVANTAGES, key, row_codec.encode_advantages(row, self._pack))
        self._put(Table.MAGNITUDES, key, disk.encode_magnitude(magnitude))

    def delete_advantages(self, buffer_id: int, seq: int) -> None:
        """Remove what was computed for one experience."""
        key = disk.numbered_key(buffer_id, seq)
        self._put(Table.ADVANTAGES, key, None)
        self._put(Table.MAGNITUDES, key, None)

    def put_lease(self, buffer_id: int, row: LeaseRow) -> None:
        """Insert or replace a lease."""
        value = row_codec.encode_lease(row, self._pack)
        self._put(Table.LEASES, disk.numbered_key(buffer_id, row.id), value)

    def delete_lease(self, buffer_id: int, lease_id: int) -> None:
        """Forget an ended lease."""
        self._put(Table.LEASES, disk.numbered_key(buffer_id, lease_id), None)

    def put_progress(self, buffer_id: int, row: ProgressRow) -> None:
        """Insert or replace the consumers' progress with one experience."""
        value = row_codec.encode_progress(row, self._pack)
        self._put(Table.PROGRESS, disk.numbered_key(buffer_id, row.seq), value)

    def delete_progress(self, buffer_id: int, seq: int) -> None:
        """Remove the consumers' progress with one experience."""
        self._put(Table.PROGRESS, disk.numbered_key(buffer_id, seq), None)

    def put_consumer(self, buffer_id: int, row: ConsumerRow) -> None:
        """Insert or replace what is to be known of a consumer."""
        value = row_codec.encode_consumer(row, self._pack)
        self._put(Table.CONSUMERS, disk.named_key(buffer_id, row.name), value)

    def delete_consumer(self, buffer_id: int, name: str) -> None:
        """Forget a consumer that was removed."""
        self._put(Table.CONSUMERS, disk.named_key(buffer_id, name), None)

    def remove(self, buffer_id: int, record: Record) -> None:
        """Remove an experience: payload, record, advantages, progress."""
        place = b"" if record.tombstone else disk.payload_key(buffer_id, record.uid)
        self.operations.append((REMOVE, disk.numbered_key(buffer_id, record.seq), place))

    def remember(self, buffer_id: int, kind: str, key: str, value: bytes, time: float) -> None:
        """Keep a value until it is pruned.

        Raises:
            ValueError: `kind` holds a NUL, kind and key together exceed 506 bytes, or `time`
                is negative or not a number.
        """
        place = disk.memory_key(buffer_id, kind, key)
        disk.check_time(time)
        self.operations.append((REMEMBER, place, disk.encode_memory(time, value)))

    def _put(self, table: Table, key: bytes, value: bytes | None) -> None:
        self.operations.append((int(table), key, value))
