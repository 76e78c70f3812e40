"""Lengths and tags as the wire format of protobuf writes them."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """A number of at least 0: seven bits per byte, the lowest first."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
