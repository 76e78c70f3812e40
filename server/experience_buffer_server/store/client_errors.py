"""What the store reports, as the error that a caller can act on."""

from __future__ import annotations

from experience_buffer import errors
from experience_buffer_server.store.interface import DamagedRecordError, StoreError, StoreFullError


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
