"""Closing groups of one buffer: by command, at their deadline, or by dropping them.

Belongs to one buffer and its event loop. Who may join which group is in `state/group_table.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from experience_buffer import errors
from experience_buffer._show import counted
from experience_buffer_server.buffer.leaving.removal import Removal
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.departure import Cause
from experience_buffer_server.buffer.state.entries import Entry, Group
from experience_buffer_server.buffer.state.group_keys import namesake, wrong_key
from experience_buffer_server.buffer.state.group_table import Closing, put_row
from experience_buffer_server.runtime import clock
from experience_buffer_server.store.interface import StoreFullError, WriteBatch

_POSTPONE_SECONDS = 1.0
"""Until a deadline that met a lease is looked at again."""


class Grouping:
    """Seals, drops and expires groups. Not thread-safe."""

    def __init__(self, state: BufferState, removal: Removal) -> None:
        self._state = state
        self._removal = removal
        self._contents = state.contents
        self._changes = state.changes
        self._metrics = state.metrics
        self._tasks = state.tasks
        self._undone: set[int] = set()
        """Ids of groups whose drop found no room: it is owed to the disk, and not counted yet."""

    async def seal(self, key: str, size: int) -> Group:
        """Close a group with the members it has, or with `size` members once they are there.

        Raises:
            InvalidRequestError: No group of the buffer may have so many members.
            GroupNotFoundError: No group with this key has members.
            WrongStateError: The group was dropped, or has more than `size` members.
            StoreFullError: It can't be stored; the group stays as it was.
        """
        if problem := self._state.settings.group_size_problem(size):
            raise errors.InvalidRequestError(problem, subject="group_size")
        group = self._contents.groups.get(key)
        name = self._state.name
        if group is None:
            raise errors.GroupNotFoundError(
                f"buffer {name!r} holds no member of group {key!r}{self._namesake(key)}",
                subject=key,
            )
        num_members = group.num_members
        if group.row.closed == "dropped":
            raise errors.WrongStateError(
                f"group {key!r} of buffer {name!r} was dropped: {group.row.note}", subject=key
            )
        if size and size < num_members:
            raise errors.WrongStateError(
                f"group {key!r} of buffer {name!r} has {num_members} members already, more than "
                f"the {size} it is to be sealed with",
                subject=key,
            )
        if not group.is_open:
            return group
        previous_size = group.row.size
        if size > num_members:
            group.row.size = size
        else:
            self._close(group, "sealed")

        def failed(error: BaseException) -> None:
            if group.row.closed in ("", "sealed"):
                self._contents.groups.reopen(group, size=previous_size)

        # Closed and submitted here and now: a drop or a push can't come in between.
        await self._submit_row(group, lambda: self._go_on(group), failed)
        return group

    async def drop(self, key: str, reason: str) -> int:
        """Discard the newest group of a key, and treat later members as late.

        Returns:
            How many experiences it had.

        Raises:
            InvalidRequestError: No group can have this key.
            GroupNotFoundError: Nothing is here of it, but of one that may be meant.
            StoreFullError: It can't be stored. Members that came are not offered any more, and
                removed when there is room again.
        """
        if problem := wrong_key(key, self._state.settings.group_by):
            raise errors.InvalidRequestError(problem, subject="group")
        if self._contents.groups.was_dropped(key):
            return 0  # Said again; older groups of the key aren't meant.
        group = self._contents.groups.get(key)
        if group is not None:
            return await self._tasks.finish(self._drop(group, reason, "group_dropped"))
        if other := self._namesake(key):
            raise errors.GroupNotFoundError(
                f"buffer {self._state.name!r} holds no member of group {key!r}{other}", subject=key
            )
        batch = self._changes.batch()
        batch.remember(self._state.id, "group", key, b"dropped", clock.now())
        await self._changes.submit(batch)
        # Members may have come while nothing said yet that they are too late.
        group = self._contents.groups.get(key)
        if group is None:
            return 0
        return await self._tasks.finish(self._drop(group, reason, "group_dropped"))

    def _namesake(self, key: str) -> str:
        return namesake(key, self._state.settings.group_by, self._contents.groups.get)

    def expire(self, now: float) -> None:
        """Close, reduce or drop the groups past their deadline, by the buffer's policy."""
        settings = self._state.settings
        for group in self._contents.groups.deadlines.overdue(now):
            lacking = [entry for entry in group.votes if entry.missing and entry.is_staying]
            num_complete = len(group.votes) - len(lacking) + group.row.num_consumed
            if settings.on_group_deadline == "wait":
                group.overdue = True
            elif any(not e.durable or self._state.is_leased(e) for e in lacking):
                # It is on its way to the disk, or somebody is about to annotate it; the lease's end
                # bounds the wait.
                self._contents.groups.deadlines.postpone(group, now + _POSTPONE_SECONDS)
            elif (
                settings.on_group_deadline == "use_partial"
                and num_complete >= settings.min_group_size
            ):
                self._use_partial(group, lacking)
            else:
                self._tasks.spawn(self._drop(group, _not_whole(group), "group_dropped"))

    def expire_open(self, group: Group, note: str, label: str) -> None:
        """Drop a group that can't be kept for longer; `label` is one of the metrics'."""
        self._tasks.spawn(self._drop(group, note, label))

    def evict_open(self, group: Group, note: str) -> asyncio.Task[int]:
        """Drop a group whose room is needed, here and now; the task ends when it is off the disk."""
        return self._tasks.start(self._drop_now(group, note, "evicted"))

    def _use_partial(self, group: Group, lacking: Sequence[Entry]) -> None:
        """Close a group with the members it has, without those that lack fields."""
        was_open, previous_size = group.is_open, group.row.size
        if was_open:
            self._close(group, "deadline")
        postpone = self._contents.groups.deadlines.postpone

        def failed(error: BaseException) -> None:
            if was_open and group.row.closed == "deadline":
                self._contents.groups.reopen(group, size=previous_size)
            # The deadline is looked at again.
            postpone(group, clock.now() + _POSTPONE_SECONDS)

        def stored() -> None:
            postpone(group, clock.now() + _POSTPONE_SECONDS)
            if not lacking:  # Else it goes on once they are gone.
                self._go_on(group)

        def removed() -> None:
            self._metrics.dropped(self._state.name, "missing_field", len(lacking))

        # Submitted here and now: nobody can lease one of them in between.
        self._changes.log(self._submit_row(group, stored, failed))
        if lacking:
            names = ", ".join(dict.fromkeys(name for entry in lacking for name in entry.missing))
            cause = Cause("missing_field", f"{names} still missing at its group's deadline")
            self._removal.remove_now(lacking, cause, removed)

    def withhold(self, group: Group, batch: WriteBatch) -> Awaitable[int]:
        """Drop a group that has nothing to teach: all its rewards are equal.

        Args:
            group: The group.
            batch: Gets its row; its members are removed by the awaitable that is returned.
        """
        reason = "zero variance: all its rewards are equal"
        self._close_dropped(group, reason)
        put_row(batch, self._state.id, group, clock.now())
        return self._drop(group, reason, "zero_variance")

    def tidy(self) -> None:
        """Forget groups that are over; a crash may leave their rows."""
        for group in [group for group in self._contents.groups if not group.members]:
            self._contents.groups.left(group)
            if group.is_over:
                self._changes.log(self._submit_row(group))

    def describe_missing(self) -> str:
        """Which fields are waited for, in words; empty when none are."""
        lacking = self._contents.lacking
        if not lacking:
            return ""
        oldest = next(iter(lacking.values()))
        age = max(clock.now() - oldest.record.push_time, 0.0)
        return (
            f"{counted(len(lacking), 'experience waits', 'experiences wait')} for fields, the oldest, "
            f"{oldest.record.uid!r}, for "
            f"{', '.join(oldest.missing)} for {age:.1f} s; add them with annotate"
        )

    def describe(self) -> str:
        """What is incomplete, in words; empty when nothing is."""
        oldest, count = self._contents.groups.oldest_open, len(self._contents.groups.open_groups)
        if oldest is None:
            return ""
        age = max(clock.now() - oldest.row.open_time, 0.0)
        return (
            f"{counted(count, 'group')} incomplete; oldest open group {oldest.row.key!r} has "
            f"{oldest.describe()} after {age:.1f} s"
        )

    def _close(self, group: Group, reason: Closing) -> None:
        self._contents.groups.close(group, reason, size=group.num_members)
        self._metrics.group_closed(self._state.name, reason)

    def _go_on(self, group: Group) -> None:
        """The group's row is on disk."""
        self._contents.groups.left(group)
        self._state.events.check_whole(group)

    def _submit_row(
        self,
        group: Group,
        stored: Callable[[], None] | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> asyncio.Future[None]:
        batch = self._changes.batch()
        put_row(batch, self._state.id, group, clock.now())
        return self._changes.submit(batch, stored, failed)

    async def _drop(self, group: Group, reason: str, label: str) -> int:
        return await self._drop_now(group, reason, label)

    def _drop_now(self, group: Group, reason: str, label: str) -> Coroutine[Any, Any, int]:
        """Nobody is offered any of it from this moment; what is returned sees to the rest."""
        is_new = self._close_dropped(group, reason) or group.row.id in self._undone
        members = [entry for entry in group.members if entry.durable and not entry.leaving]
        self._state.withdraw(members)
        commits = (
            self._submit_row(group),
            self._removal.remove_free(members, Cause(label, reason)),
        )

        async def finish() -> int:
            try:
                for commit in commits:
                    await commit
            except StoreFullError:
                # Nobody is offered it any more: it can't stay half dropped until the next start.
                self._undone.add(group.row.id)
                self._changes.owe_again(self._drop_again, [(group, reason, label)])
                raise
            self._undone.discard(group.row.id)
            self._contents.groups.left(group)
            num_dropped = sum(not entry.record.tombstone for entry in members)
            if is_new:
                # Else somebody still holds what was counted before.
                self._metrics.dropped(self._state.name, label, num_dropped)
            return num_dropped

        return finish()

    def _close_dropped(self, group: Group, reason: str) -> bool:
        """Whether it wasn't dropped before."""
        if group.row.closed == "dropped":
            return False
        size = group.row.size or group.num_members
        self._contents.groups.close(group, "dropped", size=size, note=reason)
        self._metrics.group_closed(self._state.name, "dropped")
        return True

    def _drop_again(self, undone: Iterable[tuple[Group, str, str]]) -> None:
        self._tasks.spawn(self._drop_undone(deque(undone)))

    async def _drop_undone(self, undone: deque[tuple[Group, str, str]]) -> None:
        """Go on with what found no room; the first that finds none again ends it for now."""
        try:
            while undone:
                await self._drop(*undone.popleft())
        finally:
            self._changes.owe_again(self._drop_again, undone)


def _not_whole(group: Group) -> str:
    if group.is_open:
        return "not whole at its deadline"
    return f"{', '.join(group.missing)} still missing at its deadline"
