"""Updates of priorities: compared with their generation, and stored in one commit.

Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from experience_buffer import errors
from experience_buffer._messages.delivery_calls import BAD_PRIORITY
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.store.interface import MAX_PRIORITY, Record

MAX_UPDATES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityUpdate:
    """A new priority for one experience."""

    uid: str
    priority: float
    generation: int
    """What it must still be; 0: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What became of the updates of one call."""

    num_updated: int
    unknown_uids: list[str]
    """Not stored (any more)."""
    outdated_uids: list[str]
    """Updated by someone else since, or pushed anew."""


async def update_priorities(state: BufferState, updates: Sequence[PriorityUpdate]) -> Updated:
    """Set the priorities that can be set, in one commit.

    Raises:
        InvalidRequestError: Too many updates, or two for one uid: none is set. Or a priority is none, such
            as NaN: all others are set.
        StoreFullError: They can't be stored; none is set.
    """
    _check(updates)
    contents = state.contents
    # Entries, with their records before and after.
    before: list[tuple[Entry, Record, Record]] = []
    unknown, outdated = [], []
    bad = [update for update in updates if not 0 <= update.priority < math.inf]
    for update in updates:
        if not 0 <= update.priority < math.inf:
            continue
        entry = contents.by_uid(update.uid)
        if entry is None or entry.leaving or not entry.durable or entry.record.tombstone:
            unknown.append(update.uid)
        elif entry.changing or update.generation not in (0, entry.record.generation):
            # One that is being annotated is about to be another experience.
            outdated.append(update.uid)
        else:
            priority = min(float(update.priority), MAX_PRIORITY)
            version = contents.next_seq()
            new = dataclasses.replace(entry.record, priority=priority, version=version)
            before.append((entry, entry.record, new))

    def put_back(_: BaseException) -> None:
        """Nothing was set, but for what has been set anew since."""
        for entry, old, new in before:
            if entry.record is new:
                contents.replace_record(entry, old)
        state.events.revalue([entry for entry, _, _ in before])

    if before:
        # At once and submitted here and now: the next call compares with these generations.
        batch = state.changes.batch()
        for entry, _, new in before:
            batch.put_record(state.id, new)
            contents.replace_record(entry, new)
        try:
            state.events.revalue([entry for entry, _, _ in before])
        except BaseException as error:
            put_back(error)
            raise
        await state.changes.submit(batch, None, put_back)
    if bad:
        raise errors.InvalidRequestError(
            f"{len(bad)} of {len(updates)} priorities are refused, all others are set: priority "
            f"{bad[0].priority} of {bad[0].uid!r:.200} must be finite and at least 0",
            subject=BAD_PRIORITY,
        )
    return Updated(num_updated=len(before), unknown_uids=unknown, outdated_uids=outdated)


def check_count(num_updates: int) -> None:
    """Refuse more updates than a call may have.

    Raises:
        InvalidRequestError: More than `MAX_UPDATES`.
    """
    if num_updates > MAX_UPDATES:
        raise errors.InvalidRequestError(
            f"{num_updates} priorities in one call, the limit is {MAX_UPDATES}; split them",
            subject="priorities",
        )


def _check(updates: Sequence[PriorityUpdate]) -> None:
    check_count(len(updates))
    if len({update.uid for update in updates}) < len(updates):
        raise errors.InvalidRequestError(
            "a uid is named twice; give each one priority", subject="priorities"
        )
