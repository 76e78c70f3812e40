"""A payload as what it is joined of, so that it is joined where it is to lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from xxhash import xxh3_64_digest

from experience_buffer_server.runtime.memory_arena import Buffer

LARGE_PAYLOAD_BYTES: Final = 64 * 1024
"""Payloads from this size on stay in pieces until they are stored, and are read ahead: see
`interface.Store.fetched`."""
CHECKSUM_BYTES: Final = 8


def checksum(payload: bytes | memoryview) -> bytes:
    """What tells a damaged payload, for whoever stores it."""
    return xxh3_64_digest(payload)


def checksum_of_digest(digest: bytes) -> bytes:
    """The same from the digest (`Record.digest`) of a payload, whose lower half it is.

    Only of more than 240 bytes: XXH3 makes both from one run over them then.
    """
    return digest[-CHECKSUM_BYTES:]


class Scattered:
    """Bytes that lie in several places. None of them may change."""

    __slots__ = ("_num_bytes", "checksum", "parts")

    def __init__(self, parts: Sequence[Buffer], checksum: bytes = b"") -> None:
        self.parts = parts
        """One behind the other; views are of bytes."""
        self.checksum = checksum
        """Of them joined, see `checksum`; empty where it isn't known."""
        self._num_bytes = sum(map(len, parts))

    def __len__(self) -> int:
        return self._num_bytes

    def __eq__(self, other: object) -> bool:
        return (
            bytes(self) == bytes(other) if isinstance(other, bytes | Scattered) else NotImplemented
        )

    __hash__ = None  # type: ignore[assignment]

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


Payload: TypeAlias = bytes | Scattered
