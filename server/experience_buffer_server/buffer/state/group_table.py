"""Group assembly: who belongs together, when a group is closed, and what comes too late.

So is when a group is to be whole at the latest. Pure logic over keys and counts: the caller brings the clock and stores the rows.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal

from experience_buffer_server.buffer.state.entries import Entry, Group, Reason, Refusal
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.store.interface import GroupRow, WriteBatch

Closing = Literal["whole", "sealed", "deadline", "dropped"]


_SPARE = 64
"""Deadlines that may be kept beyond twice the number of groups."""


class GroupDeadlines:
    """Finds what is overdue without looking at all groups. Not thread-safe.

    Args:
        groups: A live view of the groups by id.
    """

    def __init__(self, groups: Mapping[int, Group]) -> None:
        self._groups = groups
        self._heap: list[tuple[float, int]] = []
        """Also those of groups that are gone, and those from before a change, which are cleared at
        times: most groups are gone long before."""

    def clear(self) -> None:
        """Forget all."""
        self._heap.clear()

    def schedule(self, group: Group, settings: BufferSettings) -> None:
        """Give the group the deadline that the settings ask for."""
        seconds = settings.group_deadline_seconds
        deadline = group.row.open_time + seconds if seconds else math.inf
        if group.overdue or deadline != group.deadline:
            group.deadline, group.overdue = deadline, False
            self.watch(group)

    def postpone(self, group: Group, deadline: float) -> None:
        """Look at a group's deadline again later."""
        group.deadline = deadline
        self.watch(group)

    def watch(self, group: Group) -> None:
        """Let a group be found when it is overdue."""
        if not _has_one(group):
            return
        heapq.heappush(self._heap, (group.deadline, group.row.id))
        if len(self._heap) > 2 * len(self._groups) + _SPARE:
            self._heap = [
                (other.deadline, other.row.id)
                for other in self._groups.values()
                if _has_one(other) and not other.overdue
            ]
            heapq.heapify(self._heap)

    def overdue(self, now: float) -> list[Group]:
        """Unfinished groups whose deadline has passed since the last call, earliest first."""
        due: dict[int, Group] = {}
        while self._heap and self._heap[0][0] <= now:
            deadline, group_id = heapq.heappop(self._heap)
            group = self._groups.get(group_id)
            # A deadline that was changed since has its own place in the heap.
            if group is not None and group.is_unfinished and group.deadline == deadline:
                due[group_id] = group
        return list(due.values())


def _has_one(group: Group) -> bool:
    return group.row.closed != "dropped" and group.deadline < math.inf


class GroupTable:
    """The groups of one buffer. Not thread-safe; owned by its buffer."""

    def __init__(self) -> None:
        self._newest: dict[str, Group] = {}
        self._older: dict[str, dict[int, Group]] = {}
        """Those before the newest of their key, by id, oldest first; only for keys that have some."""
        self._outlived: set[str] = set()
        """Keys whose newest group was dropped and is gone, while older ones are here."""
        self._by_id: dict[int, Group] = {}
        self._open: dict[int, Group] = {}
        self._deserted: dict[int, Group] = {}
        """Open groups that wait for more members, and that those that came have left."""
        self._dropped: dict[int, Group] = {}
        """Dropped groups of which somebody still holds a member, or that are just leaving."""
        self.deadlines = GroupDeadlines(self._by_id)
        self._last_id = 0

    def __iter__(self) -> Iterator[Group]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def open_groups(self) -> Collection[Group]:
        """Those that take more members: a live view, without looking at all the others."""
        return self._open.values()

    @property
    def oldest_open(self) -> Group | None:
        """The one of them that was opened first, without looking at the others."""
        return next(iter(self._open.values()), None)

    @property
    def dropped_groups(self) -> Collection[Group]:
        """Those that were dropped and aren't gone yet: a live view."""
        return self._dropped.values()

    def take_deserted(self, count: int) -> list[Group]:
        """Some of the open groups that all members have left; in turn, if called again and again."""
        taken = list(itertools.islice(self._deserted.items(), count))
        for group_id, group in taken:
            del self._deserted[group_id]
            self._deserted[group_id] = group
        return [group for _, group in taken]

    def get(self, key: str) -> Group | None:
        """The newest group with this key."""
        return self._newest.get(key)

    def of_key(self, key: str) -> list[Group]:
        """All groups with this key, oldest first."""
        newest = self._newest.get(key)
        return [*self._older.get(key, {}).values(), *([] if newest is None else [newest])]

    def was_dropped(self, key: str) -> bool:
        """Whether the last group of this key that was opened is gone, as it was dropped."""
        return key in self._outlived

    def by_id(self, group_id: int) -> Group | None:
        """The group with this id."""
        return self._by_id.get(group_id)

    def all(self) -> list[Group]:
        """All groups in the order in which they were opened: by id."""
        return list(self._by_id.values())

    def clear(self) -> None:
        """Forget all groups, and let go of their members."""
        for group in self._by_id.values():
            group.members.clear()
        self._newest.clear()
        self._older.clear()
        self._outlived.clear()
        self._by_id.clear()
        self._open.clear()
        self._deserted.clear()
        self._dropped.clear()
        self.deadlines.clear()

    def reserve(self, group_id: int) -> None:
        """Give ids above this one only: it was given, though no group can be found that has it."""
        self._last_id = max(self._last_id, group_id)

    def restore(self, row: GroupRow, settings: BufferSettings) -> Group:
        """Put back a group as stored; its members follow with `Group.members`."""
        group = Group(row)
        self._add(group, settings)
        return group

    def join(
        self, key: str, stated_size: int, *, settings: BufferSettings, now: float, remembered: str
    ) -> Group | Refusal:
        """Find or open the group that a new member with this key belongs to.

        Args:
            key: The group's key.
            stated_size: Members that make it whole, as the push says; 0: not said.
            settings: The buffer's settings.
            now: Seconds since the Unix epoch.
            remembered: How a group with this key was closed before it was retired; empty: never.
        """
        group = self._newest.get(key)
        closed = remembered if group is None else group.row.closed
        if closed and settings.late_members == "refuse":
            return Refusal(Reason.LATE, _late(key, closed, group))
        if group is None or closed:
            row = GroupRow(
                id=self._last_id + 1,
                key=key,
                size=stated_size or settings.group_size,
                open_time=now,
            )
            group = Group(row)
            self._add(group, settings)
            return group
        return self._agree_on_size(group, stated_size)

    def forecast(
        self, key: str, count: int, stated_size: int, *, settings: BufferSettings, remembered: str
    ) -> tuple[int, int, int]:
        """What `join` would do with so many new members of a key, one after the other.

        Returns:
            How many join a group that is open, how many come into groups that they open, and how
            many groups these are. The others would be refused.
        """
        group = self._newest.get(key)
        closed = remembered if group is None else group.row.closed
        opens_more = settings.late_members == "new_group"
        num_joining = 0
        if group is not None and not closed:
            if _size_problem(group, stated_size):
                return 0, 0, 0
            num_joining = min(count, _room(group, stated_size, count))
        may_open = opens_more or (group is None and not closed)
        rest = count - num_joining
        if not rest or not may_open:
            return num_joining, 0, 0
        size = stated_size or settings.group_size or rest
        num_opened = -(-rest // size) if opens_more else 1
        return num_joining, min(rest, num_opened * size), num_opened

    def add_member(self, group: Group, entry: Entry) -> bool:
        """Add a pending member; True when the group's row has changed (it is closed now)."""
        if self._deserted:
            self._deserted.pop(group.row.id, None)
        group.members.append(entry)
        size = group.row.size
        # Most groups lack more than is leaving: those on their way out are counted at the end only.
        if size and len(group.members) + group.row.num_consumed >= size <= group.num_members:
            self.close(group, "whole")
            return True
        return False

    def withdraw(self, group: Group, entry: Entry) -> None:
        """Take back a pending member whose commit failed; a group closed by it is open again."""
        group.members.remove(entry)
        if group.row.closed == "whole" and group.num_members < group.row.size:
            self.reopen(group, size=group.row.size)
        elif group.row.closed in ("sealed", "deadline"):
            # Its size is that of the members that it was closed with.
            group.row.size -= 1
        self.left(group)

    def left(self, group: Group) -> None:
        """Members have left, or the group's end is on disk: forget it if it is over."""
        if group.is_over:
            self.remove(group)
        else:
            self._note_if_deserted(group)

    def _note_if_deserted(self, group: Group) -> None:
        if not group.members and self._open.get(group.row.id) is group:
            self._deserted[group.row.id] = group

    def close(self, group: Group, reason: Closing, *, size: int = 0, note: str = "") -> None:
        """Take no more members."""
        group.row.closed = reason
        group.row.size = size or group.row.size
        group.row.note = note
        if reason == "dropped" and self._by_id.get(group.row.id) is group:
            self._dropped[group.row.id] = group
        self._open.pop(group.row.id, None)
        self._deserted.pop(group.row.id, None)

    def reopen(self, group: Group, *, size: int) -> None:
        """Take members again: what closed the group could not be stored."""
        group.row.closed = ""
        group.row.size = size
        if self._by_id.get(group.row.id) is group:
            # In the order in which they were opened. It is rare: a commit has failed.
            opened = sorted({**self._open, group.row.id: group}.items())
            self._open.clear()
            self._open.update(opened)
            self._note_if_deserted(group)
        self.deadlines.watch(group)

    def remove(self, group: Group) -> None:
        """Forget a group that is over."""
        self._by_id.pop(group.row.id, None)
        self._open.pop(group.row.id, None)
        self._deserted.pop(group.row.id, None)
        self._dropped.pop(group.row.id, None)
        self._unlist(group)

    def _unlist(self, group: Group) -> None:
        key = group.row.key
        older = self._older.get(key, {})
        if self._newest.get(key) is not group:
            older.pop(group.row.id, None)
        elif older:
            _, self._newest[key] = older.popitem()
            if group.row.closed == "dropped":
                self._outlived.add(key)
        else:
            del self._newest[key]
        if not older:
            self._older.pop(key, None)
        if key not in self._newest:
            self._outlived.discard(key)

    def _add(self, group: Group, settings: BufferSettings) -> None:
        self._last_id = max(self._last_id, group.row.id)
        self._by_id[group.row.id] = group
        if group.is_open:
            self._open[group.row.id] = group
        elif group.row.closed == "dropped":
            self._dropped[group.row.id] = group
        if (previous := self._newest.get(group.row.key)) is not None:
            self._older.setdefault(group.row.key, {})[previous.row.id] = previous
        self._newest[group.row.key] = group
        self._outlived.discard(group.row.key)
        self.deadlines.schedule(group, settings)

    @staticmethod
    def _agree_on_size(group: Group, stated_size: int) -> Group | Refusal:
        if problem := _size_problem(group, stated_size):
            return Refusal(Reason.GROUP_SIZE, problem)
        if stated_size:
            group.row.size = stated_size
        return group


def _size_problem(group: Group, stated_size: int) -> str:
    """Why a push can't state this size for an open group; empty when it can."""
    size = group.row.size
    if not stated_size or stated_size == size:
        return ""
    if size:
        return (
            f"group {group.row.key!r} is to have {size} members as stated before; "
            f"this push states {stated_size}"
        )
    if stated_size <= group.num_members:
        return (
            f"group {group.row.key!r} has {group.num_members} members already; "
            f"this push states {stated_size}"
        )
    return ""


def _room(group: Group, stated_size: int, count: int) -> int:
    """How many of so many members an open group takes until it is whole; at least one."""
    size = group.row.size or stated_size
    if not size:
        return count
    at_least = size - len(group.members) - group.row.num_consumed
    # Only where that isn't enough is it worth while to look who is leaving.
    return at_least if at_least >= count else max(size - group.num_members, 1)


_CLOSED_WORDS = {
    "whole": "is whole",
    "sealed": "was sealed",
    "deadline": "was closed at its deadline",
    "dropped": "was dropped",
}


def _late(key: str, closed: str, group: Group | None) -> str:
    state = _CLOSED_WORDS.get(closed, closed)
    members = "" if group is None else f" with {group.describe()} members"
    note = f" ({group.row.note})" if group is not None and group.row.note else ""
    return (
        f"group {key!r} {state}{members}{note}; "
        'set late_members = "new_group" to open a new one instead'
    )


def groups_of(entries: Iterable[Entry]) -> list[Group]:
    """The groups that entries belong to, each once, in order of appearance."""
    return list({id(e.group): e.group for e in entries if e.group is not None}.values())


def put_row(batch: WriteBatch, buffer_id: int, group: Group, now: float) -> None:
    """Add a group's row to a batch; of one that is over, how it was closed, if it was.

    Args:
        batch: Stored by the caller.
        buffer_id: The buffer's id in the store.
        group: Of the buffer.
        now: Seconds since the Unix epoch.
    """
    if not group.is_over:
        batch.put_group(buffer_id, group.row)
        return
    batch.delete_group(buffer_id, group.row.id)
    if not group.is_open:
        batch.remember(buffer_id, "group", group.row.key, group.row.closed.encode(), now)
