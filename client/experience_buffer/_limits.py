"""How much a payload may ask of its reader, before anything is allocated for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one TRXP payload; whatever exceeds one is refused, naming it.

    The size of the payload itself is bounded by whoever receives it.
    """

    max_items: int = 65_536
    """Experiences in a payload."""
    max_metadata_bytes: int = 64 * 1024 * 1024
    """Size of the metadata section."""
    max_header_bytes: int = 8 * 1024 * 1024
    """Size of the JSON that describes the tensors, some 75 bytes each."""
    max_nodes: int = 1_000_000
    """Values in the metadata, a shared one counted as often as it is reached."""
    max_depth: int = 64
    """Containers inside one another within an experience's metadata, the item itself included."""


DEFAULT_LIMITS = Limits()
