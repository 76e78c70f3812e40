"""Whose commits the writer process takes: each buffer's epoch and the number of its last commit.

What a transaction has changed of them is stored with it, once, and is void where it fails.
"""

from __future__ import annotations

import lmdb

from experience_buffer_server.store.lmdb.disk.ownership import (
    Ownership,
    delete_ownership,
    read_ownership,
    write_ownership,
)
from experience_buffer_server.store.lmdb.writer_protocol import Request


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
        delete_ownership(txn, self._meta, buffer_id)
        self._changed.pop(buffer_id, None)
        self._stored.pop(buffer_id, None)

    def write(self, txn: lmdb.Transaction[bytes]) -> None:
        """Store what the transaction has changed, before it is committed."""
        for buffer_id, owned in self._changed.items():
            write_ownership(txn, self._meta, buffer_id, owned)

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
