"""Who owns a buffer, and which of its commits was the last: rows of table META.

A row is written in the transaction of the commit that it speaks of: what it says is as durable as that.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import lmdb

from experience_buffer_server.store.errors import DamagedRecordError
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.disk.seal import seal, unseal

_KEY: Final = struct.Struct(">6sI")
_ROW: Final = struct.Struct(">QQ")


class Ownership(NamedTuple):
    """Of one buffer."""

    epoch: int = 0
    """Of the last claim; 0: nobody has claimed it."""
    number: int = 0
    """Of the last commit."""


def read_ownership(
    txn: lmdb.Transaction[bytes] | lmdb.Transaction[memoryview],
    meta: lmdb._Database,
    buffer_id: int,
) -> Ownership:
    """What a transaction sees of a buffer; of a row that can't be read back, that nobody has it."""
    key = _key(buffer_id)
    stored = txn.get(key, db=meta)
    try:
        return Ownership(*_ROW.unpack(unseal(Table.META, key, memoryview(stored or b""))))
    except (DamagedRecordError, struct.error):
        return Ownership()


def write_ownership(
    txn: lmdb.Transaction[bytes], meta: lmdb._Database, buffer_id: int, owned: Ownership
) -> None:
    """Store it with what else the transaction stores."""
    key = _key(buffer_id)
    txn.put(key, seal(Table.META, key, _ROW.pack(*owned)), db=meta)


def delete_ownership(txn: lmdb.Transaction[bytes], meta: lmdb._Database, buffer_id: int) -> None:
    """The buffer is gone, and its id isn't given again."""
    txn.delete(_key(buffer_id), db=meta)


def _key(buffer_id: int) -> bytes:
    return _KEY.pack(b"owner ", buffer_id)
