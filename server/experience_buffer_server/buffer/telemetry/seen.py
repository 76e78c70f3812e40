"""What is read of experiences and their groups here: this room knows nothing of where they are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from experience_buffer_server.store.record import Record
from experience_buffer_server.store.rows import GroupRow


class SeenGroup(Protocol):
    """A group."""

    @property
    def row(self) -> GroupRow:
        """With its key."""


class Seen(Protocol):
    """An experience, or a failed rollout."""

    @property
    def record(self) -> Record:
        """What is known of it without its payload."""

    @property
    def advantage(self) -> float | None:
        """A mean of its advantages; None where none were computed since the start."""

    @property
    def group(self) -> SeenGroup | None:
        """The one it belongs to."""


@dataclass(frozen=True, slots=True)
class ConsumerDepth:
    """What one consumer has before it at a moment."""

    name: str
    is_raw: bool
    num_ready_units: int
    num_leased_units: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class Depth:
    """What a buffer holds at a moment."""

    num_items: int
    num_bytes: int
    num_open_groups: int
    consumers: tuple[ConsumerDepth, ...]
