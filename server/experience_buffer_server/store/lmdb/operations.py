"""What the operations of a batch do to the tables, in a transaction of the writer's.

Knows the layout on disk, and nothing of when a transaction begins or ends.
"""

from __future__ import annotations

import lmdb

from experience_buffer_server.store.interface import DamagedRecordError
from experience_buffer_server.store.lmdb import departures
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import (
    SEAL_BYTES,
    Table,
    seal,
    seal_in_place,
    unseal,
)
from experience_buffer_server.store.lmdb.fences import Fences
from experience_buffer_server.store.lmdb.large.payload_file import Aligned
from experience_buffer_server.store.lmdb.large.writes import (
    LargeWrites,
    Tables,
    Transaction,
    large_bytes,
)
from experience_buffer_server.store.lmdb.writer_protocol import (
    ARCHIVED,
    CLAIM,
    DELETE_BUFFER,
    DEPART,
    FREE_UID,
    INSERT_RECORD,
    PRUNE,
    PRUNE_LIMITS,
    REMEMBER,
    REMOVE,
    Request,
)

_SPARSE = (Table.ADVANTAGES, Table.MAGNITUDES, Table.PROGRESS)
"""Tables in which an experience may have a row."""


def apply(
    txn: Transaction, tables: Tables, large: LargeWrites, fences: Fences, request: Request
) -> int:
    """Carry out a batch's operations in order; see `Result.answer`.

    Args:
        txn: The transaction; the caller ends it.
        tables: Handles, by `Table`.
        large: Stores large payloads; the caller has it write them.
        fences: Says whether the batch may change its buffers.
        request: The batch.

    Raises:
        lmdb.Error: No room, a key or value that is too long, a record whose number is taken, or
            `FencedError`; the transaction can't be committed then.
    """
    fences.admit(txn, request)
    count = 0
    put, delete = txn.put, txn.delete
    has_extents = bool(txn.stat(tables[Table.EXTENTS])["entries"])
    sparse: list[lmdb._Database] | None = None
    for table, key, value in request.operations:
        if table == DELETE_BUFFER:
            large.remove_all(txn, key)
            _delete_buffer(txn, tables, key)
            fences.remove(txn, int.from_bytes(key, "big"))
        elif value is None:
            delete(key, db=tables[table])
        elif isinstance(value, Aligned):
            large.put(txn, key, value)
            has_extents = True
        elif type(value) is memoryview:
            if large_bytes(value):
                large.put(txn, key, value[:-SEAL_BYTES])
                has_extents = True
            else:
                if has_extents:
                    large.remove(txn, key)
                put(key, seal_in_place(table, key, value), db=tables[table])
        elif table == REMOVE:
            if sparse is None:
                # Mostly they have no rows at all, and looking for them costs as much as removing.
                sparse = [tables[t] for t in _SPARSE if txn.stat(tables[t])["entries"]]
            if value and not delete(value, db=tables[Table.PAYLOADS]) and has_extents:
                large.remove(txn, value)
            delete(key, db=tables[Table.RECORDS])
            for db in sparse:
                delete(key, db=db)
        elif table in (DEPART, FREE_UID, ARCHIVED):
            departures.apply(txn, tables, large, table, key, value)
            sparse = None
        elif table == REMEMBER:
            log_key = disk.memory_log_key(key, disk.memory_time(value))
            put(key, seal(Table.MEMORY, key, value), db=tables[Table.MEMORY])
            put(log_key, seal(Table.MEMORY_LOG, log_key, key), db=tables[Table.MEMORY_LOG])
        elif table == PRUNE:
            before, limit = PRUNE_LIMITS.unpack(value)
            count += _prune(txn, tables, key, before, limit)
        elif table == CLAIM:
            count = fences.claim(txn, int.from_bytes(key, "big"))
        elif table == INSERT_RECORD:
            row = seal(Table.RECORDS, key, value)
            if not put(key, row, overwrite=False, db=tables[Table.RECORDS]):
                name = disk.row_name(Table.RECORDS, key)
                raise lmdb.KeyExistsError(f"{name} is there already; nothing was overwritten")
        else:
            if table == Table.PAYLOADS and has_extents:
                large.remove(txn, key)
            # Sealed here and not by the owner: its event loop has other things to do.
            put(key, seal(table, key, value), db=tables[table])
            sparse = None
            if table == Table.BUFFERS:
                _note_buffer_id(txn, tables[Table.META], int.from_bytes(key, "big"))
    return count


def _delete_buffer(txn: Transaction, tables: Tables, prefix: bytes) -> None:
    for table in Table:
        if table is Table.META:
            continue
        with txn.cursor(tables[table]) as cursor:
            found = cursor.set_range(prefix)
            while found and cursor.key().startswith(prefix):
                # The cursor then stands on the next row, or nowhere (an empty key).
                cursor.delete()
                found = bool(cursor.key())


def _note_buffer_id(txn: Transaction, meta: lmdb._Database, buffer_id: int) -> None:
    """See to it that the id isn't given again once the buffer's rows are gone."""
    key = disk.LAST_BUFFER_KEY
    stored = txn.get(key, db=meta)
    value = b"" if stored is None else _sound(Table.META, key, stored)
    if not value or disk.decode_counter(value) < buffer_id:
        txn.put(key, seal(Table.META, key, disk.encode_counter(buffer_id)), db=meta)


def _prune(txn: Transaction, tables: Tables, prefix: bytes, before: float, limit: int) -> int:
    memory = tables[Table.MEMORY]
    forgotten = 0
    with txn.cursor(tables[Table.MEMORY_LOG]) as cursor:
        found = cursor.set_range(prefix)
        while found and forgotten < limit:
            log_key, logged = cursor.item()
            if not log_key.startswith(prefix):
                break
            noted_time = disk.memory_log_time(log_key)
            if noted_time >= before:
                break
            place = _sound(Table.MEMORY_LOG, log_key, logged)
            stored = txn.get(place, db=memory) if place else None
            if stored is not None:
                value = _sound(Table.MEMORY, place, stored)
                # Remembered again since: that has its own, later entry in the log. Of a damaged
                # one nobody knows when, nor what.
                if not value or disk.memory_time(value) == noted_time:
                    txn.delete(place, db=memory)
                    forgotten += 1
            cursor.delete()
            found = bool(cursor.key())
    return forgotten


def _sound(table: Table, key: bytes, stored: bytes) -> bytes:
    """The value of a stored row; empty where it is damaged."""
    try:
        return bytes(unseal(table, key, memoryview(stored)))
    except DamagedRecordError:
        return b""
