"""Who owns a buffer, and which of its commits was the last: by that the writer process takes commits.

It is a row of table META, written in the transaction of the commit that it speaks of: what it says is
as durable as that, and void where that fails.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import lmdb

from experience_buffer_server.store.errors import DamagedRecordError
from experience_buffer_server.store.lmdb.disk.format import Table, seal, unseal
from experience_buffer_server.store.lmdb.writer_protocol import Request

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


def _key(buffer_id: int) -> bytes:
    return _KEY.pack(b"owner ", buffer_id)


class FencedError(lmdb.Error):
    """A batch of somebody who doesn't own the buffer any more."""


class Fences:
    """Those of one store. Belongs to one thread, and to one transaction after the other.

    Args:
        meta: Handle of table META.
    """

    def __init__(self, meta: lmdb._Database) -> None:
        self._meta = meta
        self._stored: dict[int, Ownership] = {}
        self._changed: dict[int, Ownership] = {}
        """By the transaction under way."""

    def admit(self, txn: lmdb.Transaction[bytes], request: Request) -> None:
        """Note a batch as the last one of the buffers that it changes.

        Raises:
            FencedError: Somebody has claimed one of them since, or the number was given before.
        """
        for buffer_id, epoch, number in request.stamps:
            owned = self._owned(txn, buffer_id)
            if epoch != owned.epoch:
                raise FencedError(
                    f"buffer {buffer_id} was claimed by another owner: its epoch is {owned.epoch}, "
                    f"this commit is of epoch {epoch}"
                )
            if number <= owned.number:
                raise FencedError(
                    f"buffer {buffer_id} is at commit {owned.number} already, this is commit {number}"
                )
            self._changed[buffer_id] = Ownership(epoch, number)

    def claim(self, txn: lmdb.Transaction[bytes], buffer_id: int) -> int:
        """Refuse from now on the batches of whoever has claimed the buffer before; the new epoch."""
        owned = self._owned(txn, buffer_id)
        self._changed[buffer_id] = owned._replace(epoch=owned.epoch + 1)
        return owned.epoch + 1

    def remove(self, txn: lmdb.Transaction[bytes], buffer_id: int) -> None:
        """The buffer is deleted."""
        txn.delete(_key(buffer_id), db=self._meta)  # Its id isn't given again.
        self._changed.pop(buffer_id, None)
        self._stored.pop(buffer_id, None)

    def write(self, txn: lmdb.Transaction[bytes]) -> None:
        """Store what the transaction has changed, before it is committed."""
        for buffer_id, owned in self._changed.items():
            key = _key(buffer_id)
            txn.put(key, seal(Table.META, key, _ROW.pack(*owned)), db=self._meta)

    def commit(self) -> None:
        """The transaction is stored."""
        self._stored |= self._changed
        self._changed = {}

    def rollback(self) -> None:
        """The transaction is not stored."""
        self._changed = {}

    def _owned(self, txn: lmdb.Transaction[bytes], buffer_id: int) -> Ownership:
        owned = self._changed.get(buffer_id) or self._stored.get(buffer_id)
        return owned or read_ownership(txn, self._meta, buffer_id)
