"""What a store can't do, and the error of it that a caller can act on."""

from __future__ import annotations

from experience_buffer import errors


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


def as_client_error(
    error: errors.ExperienceBufferError | StoreError,
) -> errors.ExperienceBufferError:
    """The store's errors in terms of the contract; others as they are."""
    if isinstance(error, errors.ExperienceBufferError):
        return error
    if isinstance(error, StoreFullError):
        return errors.BufferFullError(f"the store is full: {error}", retry_delay_seconds=5.0)
    if isinstance(error, DamagedRecordError):
        return errors.DataLossError(str(error))
    return errors.UnavailableError(
        f"the store has failed and the server restarts: {error}", retry_delay_seconds=5.0
    )
