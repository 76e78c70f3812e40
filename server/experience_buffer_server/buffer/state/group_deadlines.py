"""When the groups of one buffer are to be whole at the latest. Pure logic: the caller has the clock."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from experience_buffer_server.buffer.state.entries import Group
from experience_buffer_server.settings.buffer import BufferSettings

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
