"""What a store can't do."""

from __future__ import annotations


class StoreError(Exception):
    """The store could not do what was asked; nothing of the batch is stored."""


class StoreFullError(StoreError):
    """No room: the disk is full or the configured map limit is reached. Removals still work."""


class StoreFailedError(StoreError):
    """The store can't go on (I/O error, writer process gone); the server must restart."""


class StoreFencedError(StoreError):
    """Another owner has claimed the buffer; nothing of the batch is stored, and nothing will be."""


class StoreFormatError(StoreError):
    """The directory holds a store of another format version, or no store at all."""


class DamagedRecordError(StoreError):
    """A stored row can't be read back; the message names it."""
