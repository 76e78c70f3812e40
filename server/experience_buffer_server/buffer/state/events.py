"""What happens to experiences that more than one room of a buffer has to hear of.

A room says here what has happened, or what is to happen next, to whoever stands above it; all that it
asks of rooms below, it asks them. Implemented once, by `buffer.flow`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from experience_buffer_server.buffer.state.entries import Entry, Group
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import WriteBatch


class BufferEvents(Protocol):
    """Takes the events of one buffer. Not thread-safe."""

    # --- on the way to available

    def stored(self, entries: Sequence[Entry]) -> None:
        """New entries are on disk."""

    def advance(self, entries: Sequence[Entry]) -> None:
        """Durable entries, and their groups, may go on as far as they can."""

    def check_whole(self, group: Group) -> None:
        """A group may be closed and all on disk, or dropped: it goes on."""

    def make_available(self, entries: Sequence[Entry]) -> None:
        """Consumers may sample the entries, and the groups that are available with them."""

    # --- on the way out

    def returning(self, units: Sequence[Unit]) -> None:
        """Leases of these units end: those that are due to leave are to be marked as gone."""

    def discard_units(self, units: Sequence[Unit]) -> None:
        """Units came back that nobody is to get any more."""

    def drop_stale(self, units: Iterable[list[Entry]], consumer: str) -> list[list[Entry]]:
        """Units are too stale for a consumer; returns what stays because somebody may want it."""

    def postpone(self, entries: Sequence[Entry]) -> None:
        """Every consumer has done with the entries, and the store had no room to say so."""

    def withhold(self, group: Group, batch: WriteBatch) -> None:
        """All rewards of a group are equal; the batch is about to say that it is closed."""

    def removed(self, entry: Entry) -> None:
        """An entry was removed; its group still has it."""

    def room_made(self) -> None:
        """There is less than before: what waits for room may have it."""

    # --- changes of what is there

    def revalue(self, entries: Sequence[Entry]) -> None:
        """What entries are chosen by, to be delivered or to be removed, has changed."""

    def set_aside(self, reasons: Mapping[int, str]) -> None:
        """Experiences can't be read back: by seq, what of each."""

    def published(self, version: int) -> None:
        """A policy version is on disk."""

    def describe_wait(self) -> str:
        """What keeps experiences from being sampled, in words; empty when nothing does."""
