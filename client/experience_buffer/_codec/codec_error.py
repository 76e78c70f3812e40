"""Makes the one error that the codec raises, and shows a sender's values in it."""

from __future__ import annotations

from typing import Final

from experience_buffer.errors import TrxpError

_MAX_CHARS: Final = 80
_MAX_BITS: Final = 256


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


def shown(value: object) -> str:
    """Print a value that a sender made: cut before it is printed, a container by its type alone.

    A few bytes of a pickle can stand for a list that would take hours and gigabytes to print.
    """
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return repr(value)
    if isinstance(value, int) and kind is int:
        bits = value.bit_length()
        return repr(value) if bits <= _MAX_BITS else f"an integer of {bits} bits"
    if isinstance(value, str | bytes) and kind in (str, bytes):
        return repr(value[:_MAX_CHARS])
    return f"a {kind.__name__}"
