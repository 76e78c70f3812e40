"""A payload as what it is joined of, so that it is joined where it is to lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from experience_buffer_server.runtime.memory_arena import Buffer


class Scattered:
    """Bytes that lie in several places. None of them may change."""

    __slots__ = ("_num_bytes", "checksum", "parts")

    def __init__(self, parts: Sequence[Buffer], checksum: bytes = b"") -> None:
        self.parts = parts
        """One behind the other; views are of bytes."""
        self.checksum = checksum
        """Of them joined, as `seal.checksum` makes it; empty where it isn't known."""
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
