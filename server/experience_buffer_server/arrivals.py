"""Entries by arrival number, in lists of neighbours: a fifth of what one `dict` of them takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experience_buffer_server.groups import Entry

_BITS = 6
_SIZE = 1 << _BITS
_MASK = _SIZE - 1


class Arrivals:
    """A map from seq to entry. Not thread-safe.

    A list of `_SIZE` places goes with its last entry, so what stays for long among much that
    leaves costs at most one list each.
    """

    def __init__(self) -> None:
        self._lists: dict[int, list[Entry | None]] = {}
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    def __iter__(self) -> Iterator[Entry]:
        """In the order of their numbers; no changes meanwhile."""
        for neighbours in self._lists.values():
            for entry in neighbours:
                if entry is not None:
                    yield entry

    def since(self, seq: int) -> Iterator[Entry]:
        """Those with larger numbers, in the order of their numbers; no changes meanwhile."""
        first = (seq + 1) >> _BITS
        for number, neighbours in self._lists.items():
            if number < first:
                continue
            skip = (seq + 1) & _MASK if number == first else 0
            for entry in neighbours[skip:]:
                if entry is not None:
                    yield entry

    def get(self, seq: int) -> Entry | None:
        """The entry with this number."""
        neighbours = self._lists.get(seq >> _BITS)
        return None if neighbours is None else neighbours[seq & _MASK]

    def add(self, seq: int, entry: Entry) -> None:
        """Add an entry; its number is above all before."""
        neighbours = self._lists.get(seq >> _BITS)
        if neighbours is None:
            neighbours = self._lists[seq >> _BITS] = [None] * _SIZE
        neighbours[seq & _MASK] = entry
        self._num_entries += 1

    def remove(self, seq: int) -> None:
        """Remove an entry; KeyError where there is none."""
        neighbours = self._lists.get(seq >> _BITS)
        if neighbours is None or neighbours[seq & _MASK] is None:
            raise KeyError(seq)
        neighbours[seq & _MASK] = None
        self._num_entries -= 1
        if not any(neighbours):
            del self._lists[seq >> _BITS]
