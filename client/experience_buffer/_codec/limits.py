"""How much a payload may ask of its reader, before anything is allocated for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MAX_SHARED_BYTES: Final = 24 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one TRXP payload; whatever exceeds one is refused, naming it.

    The size of the payload itself is bounded by whoever receives it.

    Attributes:
        max_message_bytes: A server's `max_message_bytes`. What the experiences may take each alone;
            see `max_alone_bytes`.
        max_items: Experiences in a payload.
        max_metadata_bytes: Size of the metadata section.
        max_header_bytes: Size of the JSON that describes the tensors, some 75 bytes each.
        max_tensors: Tensors of one experience.
        max_nodes: A server's `max_metadata_nodes`. Values in the metadata, a shared one counted as
            often as it is reached.
        max_depth: A server's `max_metadata_depth`. Containers inside one another within an
            experience's metadata, the item itself included.
    """

    max_message_bytes: int = 64 * 1024 * 1024
    max_items: int = 65_536
    max_metadata_bytes: int = 64 * 1024 * 1024
    max_header_bytes: int = 8 * 1024 * 1024
    max_tensors: int = 4_096
    max_nodes: int = 1_000_000
    max_depth: int = 64

    def max_alone_bytes(self, payload_bytes: int) -> int:
        """What the experiences of a payload of this size may take, each in one of its own.

        A text that they share is written with each: a megabyte could become many gigabytes. As much
        as one message may bring without sharing is fine; a payload near that size, or over it, may
        become twice as large and 24 MiB more.

        Args:
            payload_bytes: Size of the payload that they come in.
        """
        return max(2 * payload_bytes + _MAX_SHARED_BYTES, self.max_message_bytes)


DEFAULT_LIMITS = Limits()
