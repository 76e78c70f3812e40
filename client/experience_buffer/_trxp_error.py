"""Makes the one error that the codec raises."""

from __future__ import annotations

from experience_buffer.errors import TrxpError


def trxp_error(message: str, *, where: str, item: int | None = None) -> TrxpError:
    """Make a `TrxpError` whose text starts with the place.

    Args:
        message: What is wrong, and what to do about it.
        where: Such as `"frame"`, `"metadata offset 123"` or `"items[3].info.when"`.
        item: Index of the experience that the damage is confined to; None for all of them.
    """
    error = TrxpError(f"{where}: {message}", subject=where)
    error.item = item
    return error
