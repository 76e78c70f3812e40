"""What has left a buffer and isn't archived yet: its rows, in a transaction of the writer's.

Its record and progress become one row under its number. Its payload and what was computed stay where
they are: moving them would cost as much as the push has. Only where its uid is used again, its payload
is kept under a key of its own.
"""

from __future__ import annotations

from experience_buffer_server.store import row_codec
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import SEAL_BYTES, Table, is_sound, seal
from experience_buffer_server.store.lmdb.large.writes import LargeWrites, Tables, Transaction
from experience_buffer_server.store.lmdb.writer_protocol import ARCHIVED, DEPART, DEPARTURE


def apply(
    txn: Transaction, tables: Tables, large: LargeWrites, code: int, key: bytes, value: bytes
) -> None:
    """Carry out one of the operations `DEPART`, `FREE_UID` and `ARCHIVED` of `writer_protocol`.

    Raises:
        lmdb.Error: See `operations.apply`.
    """
    if code == DEPART:
        end = DEPARTURE.size + DEPARTURE.unpack_from(value)[0]
        _depart(txn, tables, large, key, place=value[DEPARTURE.size : end], note=value[end:])
        return
    stored = txn.get(key, db=tables[Table.DEPARTED])
    if stored is None:
        return
    is_freed = row_codec.is_uid_freed(stored)
    aside = disk.departed_payload_key(key)
    if code == ARCHIVED:
        txn.delete(key, db=tables[Table.DEPARTED])
        _remove(txn, tables, large, key, aside if is_freed else value)
    elif not is_freed and _move(txn, tables, large, value, aside):
        row = seal(Table.DEPARTED, key, row_codec.freed(stored[:-SEAL_BYTES]))
        txn.put(key, row, db=tables[Table.DEPARTED])


def _depart(
    txn: Transaction, tables: Tables, large: LargeWrites, key: bytes, *, place: bytes, note: bytes
) -> None:
    record = txn.pop(key, db=tables[Table.RECORDS])
    progress = txn.pop(key, db=tables[Table.PROGRESS])
    if record is None or not is_sound(Table.RECORDS, key, record):
        # Nobody could say what it was.
        _remove(txn, tables, large, key, place)
        return
    if progress is not None and not is_sound(Table.PROGRESS, key, progress):
        progress = None
    row = row_codec.encode_departed(note, record[:-SEAL_BYTES], (progress or b"")[:-SEAL_BYTES])
    txn.put(key, seal(Table.DEPARTED, key, row), db=tables[Table.DEPARTED])


def _remove(txn: Transaction, tables: Tables, large: LargeWrites, key: bytes, place: bytes) -> None:
    """Remove payload and what was computed."""
    if not txn.delete(place, db=tables[Table.PAYLOADS]):
        large.remove(txn, place)
    txn.delete(key, db=tables[Table.ADVANTAGES])
    txn.delete(key, db=tables[Table.MAGNITUDES])


def _move(txn: Transaction, tables: Tables, large: LargeWrites, old: bytes, new: bytes) -> bool:
    """Keep a payload under another key; whether there is one."""
    stored = txn.pop(old, db=tables[Table.PAYLOADS])
    if stored is None:
        return large.rename(txn, old, new)
    # A damaged one stays damaged.
    sound = is_sound(Table.PAYLOADS, old, stored)
    row = seal(Table.PAYLOADS, new, stored[:-SEAL_BYTES]) if sound else stored
    txn.put(new, row, db=tables[Table.PAYLOADS])
    return True
