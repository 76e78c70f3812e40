"""Units of a buffer as they leave it: what belongs to one, and what keeps it from leaving.

A unit is a whole group where there are groups, else one experience. Its number is the id of the
group, or the seq of the experience. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.group_table import Entry

_PAUSE_SECONDS = 1.0
"""Until a unit that couldn't leave is looked at again."""


def unit_key(entry: Entry) -> int:
    """The number of an entry's unit."""
    return entry.record.seq if entry.group is None else entry.group.row.id


def members_of(state: BufferState, key: int) -> Sequence[Entry]:
    """All that leaves with a unit, tombstones too; none of one that has left or was dropped.

    Of a group it is a live view, which changes when members come and go.
    """
    if state.settings.group_by == "none":
        entry = state.contents.by_seq(key)
        return () if entry is None else (entry,)
    group = state.contents.groups.by_id(key)
    return () if group is None or group.row.closed == "dropped" else group.members


def is_held(state: BufferState, members: Sequence[Entry]) -> bool:
    """Whether somebody has any of it, works on it, or is to get it back by a rewind."""
    return any(not state.is_idle(entry) or state.is_wanted(entry) for entry in members)


class Parked:
    """Units that couldn't leave, by number, the longest parked first. Not thread-safe."""

    def __init__(self) -> None:
        self._since: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, key: object) -> bool:
        return key in self._since

    def __iter__(self) -> Iterator[int]:
        return iter(self._since)

    def add(self, key: int, now: float) -> None:
        """Park a unit; `now` is in seconds and never less than before."""
        self._since[key] = now
        self._since.move_to_end(key)

    def discard(self, key: int) -> None:
        """Forget a unit, if it is here."""
        self._since.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._since.clear()

    def take_due(self, now: float) -> Iterator[int]:
        """Take those that have been here for a while, one at a time; some may be added meanwhile."""
        while self._since:
            key = next(iter(self._since))
            if now - self._since[key] < _PAUSE_SECONDS:
                return
            del self._since[key]
            yield key
