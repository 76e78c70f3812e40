"""Large payloads as the writer process has them: their rows in LMDB, and the room in their file.

Within a transaction rows are put and removed first; then `write` brings the payloads to the disk, so
that no commit ever names bytes that aren't there.
"""

from __future__ import annotations

import errno
import logging
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import lmdb

from experience_buffer_server.runtime.memory_arena import whole_blocks
from experience_buffer_server.store.interface import DamagedRecordError, StoreFormatError
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import (
    SEAL_BYTES,
    Extent,
    Table,
    is_sound,
    seal,
    unseal,
)
from experience_buffer_server.store.lmdb.disk.opening import CURE
from experience_buffer_server.store.lmdb.large.extents import Extents, Freed
from experience_buffer_server.store.lmdb.large.payload_file import (
    NAME,
    Aligned,
    PayloadWriter,
    Placed,
)
from experience_buffer_server.store.payload import LARGE_PAYLOAD_BYTES, checksum

Transaction: TypeAlias = "lmdb.Transaction[bytes]"
Tables: TypeAlias = "Sequence[lmdb._Database]"
_log = logging.getLogger(__name__)
_LENGTH: Final = struct.Struct(">Q")
_DAMAGE: Final = (DamagedRecordError, struct.error)


class LargeWrites:
    """Belongs to one thread, and to one transaction after the other.

    Args:
        env: The environment.
        tables: Handles, by `Table`.
        path: The store's directory.
        syncs: Every commit is on disk when it ends.
        most_bytes: The file does not grow beyond this.

    Raises:
        StoreFormatError: The file is missing or too short, or there is one beside a new store.
        OSError: It can't be opened.
    """

    def __init__(
        self,
        env: lmdb.Environment,
        tables: Tables,
        path: Path,
        *,
        syncs: bool,
        most_bytes: int,
    ) -> None:
        self._env = env
        self._tables = tables
        self._file = PayloadWriter(path)
        # Before the rows that name it, which the caller syncs now.
        self._file.sync_all()
        self._syncs = syncs
        with env.begin() as txn:
            self._synced = txn.id()
            freed = list(_freed(txn, tables))
            used = list(_used(txn, tables, self._file.num_bytes))
        reach = max((offset + num_bytes for offset, num_bytes in used), default=0)
        if reach > self._file.num_bytes:
            raise StoreFormatError(
                f"{path}: {NAME} is missing or cut short: it has {self._file.num_bytes} bytes, large "
                f"payloads reach to {reach}. It belongs to data.mdb as it is: put it back; or, if it "
                f"is lost, {CURE}"
            )
        # A copy of a store counts its transactions anew, and nobody reads what it was made from.
        self._stale = [run for run in freed if run.transaction > self._synced]
        """Room that is free, though rows say that it was freed by transactions to come."""
        self._room = Extents(used, (run for run in freed if run.transaction <= self._synced))
        self._most_bytes = most_bytes
        self._payloads: list[Placed] = []
        """What the transaction under way stores."""
        self._has_reclaimed = False

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self._room.end

    @property
    def used_bytes(self) -> int:
        """Of these, what holds payloads, or did for somebody who still reads."""
        return self._room.used_bytes

    @property
    def pending_bytes(self) -> int:
        """Of `used_bytes`, what only a reader or an older state of the store still has."""
        return self._room.pending_bytes

    @property
    def can_reclaim(self) -> bool:
        """Whether there is room that `reclaim` would take back now."""
        oldest = self._room.oldest_pending
        return oldest is not None and oldest <= self._newest_unread(self._synced_now())

    def put(self, txn: Transaction, key: bytes, given: memoryview | Aligned) -> None:
        """Store a payload, also in place of one; it must not change until `write`.

        Raises:
            lmdb.Error: See `operations.apply`.
        """
        payload, known = given, b""
        if isinstance(payload, Aligned):
            payload, _, known = payload
        if not self.remove(txn, key):
            txn.delete(key, db=self._tables[Table.PAYLOADS])
        self.reclaim(txn)
        end = self._room.end
        offset = self._room.place(len(payload))
        # A limit that was lowered since lies before the end; what finds room within goes there.
        if self._room.end > max(end, self._most_bytes):
            why = f"{NAME} would grow beyond {self._most_bytes} bytes (max_map_bytes)"
            raise OSError(errno.ENOSPC, why)
        extent = Extent(offset, len(payload), known or checksum(payload))
        row = seal(Table.EXTENTS, key, disk.encode_extent(extent))
        txn.put(key, row, db=self._tables[Table.EXTENTS])
        self._payloads.append((offset, given))

    def remove(self, txn: Transaction, key: bytes) -> bool:
        """Remove the payload of a key; whether it was a large one."""
        stored = txn.pop(key, db=self._tables[Table.EXTENTS])
        if stored is None:
            return False
        try:
            extent = disk.decode_extent(unseal(Table.EXTENTS, key, memoryview(stored)))
        except _DAMAGE:
            return True  # Where it lay is free when the store is opened next.
        run = self._room.free(txn.id(), extent.offset, extent.num_bytes)
        place = disk.freed_key(run.transaction, run.offset)
        row = seal(Table.FREED, place, _LENGTH.pack(run.num_bytes))
        txn.put(place, row, db=self._tables[Table.FREED])
        return True

    def rename(self, txn: Transaction, old: bytes, new: bytes) -> bool:
        """Have the payload of a key under another one; whether there is one. It isn't written again."""
        stored = txn.pop(old, db=self._tables[Table.EXTENTS])
        if stored is None:
            return False
        sound = is_sound(Table.EXTENTS, old, stored)
        row = seal(Table.EXTENTS, new, stored[:-SEAL_BYTES]) if sound else stored
        txn.put(new, row, db=self._tables[Table.EXTENTS])
        return True

    def remove_all(self, txn: Transaction, prefix: bytes) -> None:
        """Remove all payloads of a buffer."""
        with txn.cursor(self._tables[Table.EXTENTS]) as cursor:
            while cursor.set_range(prefix) and cursor.key().startswith(prefix):
                self.remove(txn, cursor.key())

    def reclaim(self, txn: Transaction) -> None:
        """Take back, once in a transaction, what nobody can read any more.

        Raises:
            lmdb.Error: No room in the map.
        """
        if self._has_reclaimed:
            return
        self._has_reclaimed = True
        for run in self._stale:
            self._delete(txn, run)
        if self._room.oldest_pending is not None:
            durable = txn.id() - 1 if self._syncs else self._synced
            for run in self._room.reclaim(self._newest_unread(durable)):
                self._delete(txn, run)

    def _delete(self, txn: Transaction, run: Freed) -> None:
        txn.delete(disk.freed_key(run.transaction, run.offset), db=self._tables[Table.FREED])

    def _newest_unread(self, durable: int) -> int:
        """Nobody can read any more what transactions up to this one have freed."""
        return min([durable, *_readers(self._env)])

    def _synced_now(self) -> int:
        """The newest transaction that no crash takes back, while none is under way."""
        return int(self._env.info()["last_txnid"]) if self._syncs else self._synced

    def write(self) -> None:
        """Bring the transaction's payloads to the disk; as far as the commit is to.

        Raises:
            OSError: No room, or the disk fails; the transaction can't be committed.
        """
        if self._payloads:
            self._file.write(self._payloads)
            if self._syncs:
                self._file.sync()

    def commit(self) -> None:
        """The transaction is stored."""
        self._room.commit()
        if self._has_reclaimed:
            self._stale = []
        self._end()

    def rollback(self) -> None:
        """The transaction is not stored."""
        self._room.rollback()
        if self._payloads:
            self._file.cut(self._room.end)
        self._end()

    def _end(self) -> None:
        self._payloads = []
        self._has_reclaimed = False

    def sync(self) -> None:
        """Have on the disk what was written; before the environment's own sync.

        Raises:
            OSError: The disk fails.
        """
        self._file.sync()

    def note_synced(self) -> None:
        """Everything committed is on the disk now."""
        with self._env.begin() as txn:
            self._synced = txn.id()

    def close(self) -> None:
        """Release the file."""
        self._file.close()


def check_no_payloads(path: Path) -> None:
    """Refuse to make a store where another one's large payloads lie, which it would write over.

    Raises:
        StoreFormatError: They do.
    """
    file = path / NAME
    if file.exists() and file.stat().st_size:
        raise StoreFormatError(
            f"{path} holds {NAME}, the large payloads of a store, and no data.mdb with what they "
            "are: put that back, or use an empty folder"
        )


def large_bytes(value: object) -> int:
    """What the value of an operation takes in the file; 0: it goes into the map."""
    if isinstance(value, Aligned):
        return len(value.blocks)
    if type(value) is memoryview and len(value) - SEAL_BYTES >= LARGE_PAYLOAD_BYTES:
        return whole_blocks(len(value) - SEAL_BYTES)
    return 0


def _readers(env: lmdb.Environment) -> list[int]:
    """The transactions whose states of the store are being read."""
    lines = env.readers().splitlines()[1:]
    numbers = [line.split()[-1] for line in lines if line.strip()]
    return [int(number) for number in numbers if number.isdigit()]


def _used(txn: Transaction, tables: Tables, file_bytes: int) -> Iterator[tuple[int, int]]:
    num_damaged = 0
    with txn.cursor(tables[Table.EXTENTS]) as cursor:
        for key, stored in cursor:
            try:
                extent = disk.decode_extent(unseal(Table.EXTENTS, key, memoryview(stored)))
            except _DAMAGE:
                num_damaged += 1
            else:
                yield extent.offset, extent.num_bytes
    if num_damaged:
        # What they name can mostly be found by who mends the store, if it is still there.
        _log.warning(
            "%d rows of table extents are damaged: no room in %s is used again until it is cured: %s",
            *(num_damaged, NAME, CURE),
        )
        yield 0, file_bytes


def _freed(txn: Transaction, tables: Tables) -> Iterator[Freed]:
    with txn.cursor(tables[Table.FREED]) as cursor:
        for key, stored in cursor:
            try:
                (num_bytes,) = _LENGTH.unpack(unseal(Table.FREED, key, memoryview(stored)))
                yield Freed(*disk.decode_freed_key(key), num_bytes)
            except _DAMAGE:
                continue
