"""Where a group is on its way, which members it has, and why it isn't delivered."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Final

from experience_buffer._show import counted
from experience_buffer.looking import (
    ConsumerPlace,
    ExperienceState,
    GroupInfo,
    GroupMember,
    GroupState,
)
from experience_buffer_server.buffer.inspection.places import (
    kept_from,
    place_info,
    place_of,
    state_of,
    why_kept,
)
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.entries import Entry, Group

MOST_MEMBERS: Final = 256
"""Of a group, or of its missing runs, that are told."""
_MOST_RUNS: Final = 65_536
"""Of a group that is looked through for missing ones."""
_WORDS: Final = 1000
_ORDER: Final[tuple[ExperienceState, ...]] = (
    *("leased", "ready", "held", "quarantined"),
    *("waiting_for_group", "waiting_for_fields", "computing", "retained", "consumed"),
)
"""Of several places of a group's members, the first stands for it."""
_STATES: Final[dict[ExperienceState, GroupState]] = {
    "leased": "leased",
    "ready": "ready",
    "held": "held",
    "quarantined": "quarantined",
    "waiting_for_group": "open",
    "waiting_for_fields": "waiting_for_fields",
    "computing": "computing",
    "retained": "retained",
    "consumed": "consumed",
}


def group_state(state: BufferState, group: Group) -> GroupState:
    """Where a group is on its way: how far it has come, and once it is available, for whom it is what."""
    if group.row.closed == "dropped":
        return "dropped"
    if is_set_aside(state, group):
        return "quarantined"
    if not group.is_whole:
        return "open"
    if not group.available:
        if any(entry.quarantine for entry in group.votes):
            return "quarantined"
        return "waiting_for_fields" if group.missing else "computing"
    places = set()
    for consumer in state.consumers.values():
        place = group_place(state, consumer, group)
        if place == "leased":
            return "leased"
        places.add(place)
    return next((_STATES[one] for one in _ORDER if one in places), "consumed")


def group_place(state: BufferState, consumer: Consumer, group: Group) -> ExperienceState:
    """Where a group is on its way to a consumer; to one of items, where its members are."""
    # Written out: a hundred thousand of them may be looked at.
    keys = [group.row.id]
    if consumer.settings.unit == "item":
        keys = [entry.record.seq for entry in group.members]
    for key in keys if consumer.out else ():
        if key in consumer.out:
            return "leased"
    for key in keys:
        if key in consumer.ready:
            return "ready"
    staying = [entry for entry in group.members if not entry.record.tombstone]
    if consumer.settings.unit == "group" and staying:
        return place_of(state, consumer, staying[0])
    places = {place_of(state, consumer, entry) for entry in staying}
    return next((one for one in _ORDER if one in places), "tombstone")


def is_set_aside(state: BufferState, group: Group) -> bool:
    """Whether rows of it can't be read back."""
    return group.row.quarantined or bool(state.contents.quarantined and group.damage)


def is_stuck(state: BufferState, group: Group) -> bool:
    """Whether it can't be delivered now, to somebody at least who is to get it."""
    if group.row.closed == "dropped":
        return False
    if not group.available or is_set_aside(state, group):
        return True
    for consumer in state.consumers.values():
        if not (consumer.held or consumer.quarantined):
            continue
        if consumer.settings.unit == "group":
            keys = [group.row.id]
        else:
            keys = [entry.record.seq for entry in group.members]
        if any(key in consumer.held or key in consumer.quarantined for key in keys):
            return True
    return False


def group_info(state: BufferState, group: Group, now: float, computing: str) -> GroupInfo:
    """What is known of a group without reading anything.

    Args:
        state: The buffer's.
        group: One of its groups.
        now: Seconds since the Unix epoch.
        computing: What computing waits for or is at work on, in words.
    """
    row, settings = group.row, state.settings
    there = [entry for entry in group.members if entry.durable and not entry.leaving]
    records = [entry.record for entry in there]
    where, num_members = group_state(state, group), group.num_members
    has_deadline = group.is_unfinished and group.deadline < math.inf
    rewards = [record.reward for record in records if record.reward is not None]
    lowest = [record.min_version for record in records if record.min_version is not None]
    highest = [record.max_version for record in records if record.max_version is not None]
    published, low = state.row.policy_version, min(lowest, default=None)
    return GroupInfo(
        group=row.key,
        state=where,
        waits_for=_why(state, group, where, now, computing)[:_WORDS],
        num_members=num_members,
        num_tombstones=sum(record.tombstone for record in records),
        group_size=row.size,
        num_missing=max(row.size - num_members, 0) if row.size and group.is_open else _none(group),
        missing_runs=tuple(missing_runs(state, group)),
        closed=row.closed,
        create_time=row.open_time,
        close_time=_close_time(group),
        age_seconds=max(now - row.open_time, 0.0),
        deadline_time=group.deadline if has_deadline else None,
        on_deadline=settings.on_group_deadline if has_deadline else None,
        is_overdue=group.overdue and group.is_unfinished,
        num_bytes=sum(record.payload_bytes for record in records),
        mean_reward=math.fsum(rewards) / len(rewards) if rewards else None,
        min_policy_version=low,
        max_policy_version=max(highest, default=None),
        staleness=None if published is None or low is None else published - low,
        places=tuple(_places(state, group)),
        members=tuple(_members(state, there)),
    )


def _none(group: Group) -> int | None:
    """A group that takes no more members misses none."""
    return None if group.is_open else 0


def _close_time(group: Group) -> float | None:
    """When a whole group's last member was accepted, where all of it is here."""
    if group.row.closed != "whole" or group.row.num_consumed or not group.members:
        return None
    return max(entry.record.push_time for entry in group.members)


def missing_runs(state: BufferState, group: Group) -> Iterator[int]:
    """Runs that are to come, where its size is known and its members are the runs from 0 on."""
    size = group.row.size
    if state.settings.group_by == "run" or not group.is_open or group.row.num_consumed:
        return
    if not 0 < size <= _MOST_RUNS:
        return
    runs = [entry.record.run for entry in group.members if not entry.leaving]
    there = set(runs)
    if len(there) < len(runs) or not all(0 <= run < size for run in there):
        return
    num_told = 0
    for run in range(size):
        if run not in there:
            yield run
            num_told += 1
            if num_told == MOST_MEMBERS:
                return


def _members(state: BufferState, entries: Sequence[Entry]) -> Iterator[GroupMember]:
    parted = ((entry.record.parts, entry) for entry in entries)
    numbered = [(run, step, entry.record.seq, entry) for (_, _, run, step), entry in parted]
    for run, step, _, entry in heapq.nsmallest(MOST_MEMBERS, numbered, key=lambda one: one[:3]):
        yield member_of(state, entry, run, step)


def member_of(state: BufferState, entry: Entry, run: int, step: int) -> GroupMember:
    """What is known of a member without reading anything."""
    record = entry.record
    return GroupMember(
        uid=record.uid,
        run=run,
        step=step,
        state=state_of(state, entry),
        reward=record.reward,
        response_tokens=record.response_tokens,
        payload_bytes=record.payload_bytes,
        min_policy_version=record.min_version,
        max_policy_version=record.max_version,
        push_time=record.push_time,
        magnitude=state.magnitude(entry),
        message=kept_from(state, entry)[:_WORDS],
    )


def _places(state: BufferState, group: Group) -> Iterator[ConsumerPlace]:
    """Where it is for each consumer, by the member that is farthest from being consumed."""
    votes = [entry for entry in group.votes if not entry.leaving]
    for consumer in state.consumers.values() if votes else ():
        entry = votes[0]
        if consumer.settings.unit == "item":
            ranks = [_ORDER.index(place_of(state, consumer, one)) for one in votes]
            entry = votes[ranks.index(min(ranks))]
        yield place_info(state, consumer, entry)


# --- why it isn't delivered, in words


def _why(state: BufferState, group: Group, where: GroupState, now: float, computing: str) -> str:
    match where:
        case "open":
            return _why_open(state, group, now)
        case "waiting_for_fields":
            lacking = [entry for entry in group.votes if entry.missing]
            text = (
                f"{counted(len(lacking), 'member lacks', 'members lack')} "
                f"{', '.join(group.missing)}: add them with annotate"
            )
            return text + _deadline(state, group, now)
        case "computing":
            return "its advantages aren't there yet" + (f": {computing}" if computing else "")
        case "quarantined":
            return group.damage or _quarantine(state, group)
        case "dropped":
            why = f"dropped: {group.row.note}" if group.row.note else "dropped"
            return f"{why}; it leaves when nobody holds any of it"
        case _:
            return "; ".join(_kept(state, group))


def _why_open(state: BufferState, group: Group, now: float) -> str:
    age = max(now - group.row.open_time, 0.0)
    if not group.is_open:
        num_pending = len(group.members) - group.num_durable
        text = f"{counted(num_pending, 'member is', 'members are')} on the way to the disk"
        return text if num_pending else "it is about to go on"
    text = f"has {group.describe()} members after {age:.1f} s"
    if not group.row.size:
        text += "; its size isn't known: seal it when all have come"
    elif runs := list(missing_runs(state, group)):
        shown = ", ".join(map(str, runs[:8])) + (", ..." if len(runs) > 8 else "")
        text += f"; run {shown} is missing" if len(runs) == 1 else f"; runs {shown} are missing"
    if not state.settings.waits_for_groups:
        text += "; its members are delivered all the same: nobody here takes groups"
    return text + _deadline(state, group, now)


def _deadline(state: BufferState, group: Group, now: float) -> str:
    policy, left = state.settings.on_group_deadline, group.deadline - now
    if left == math.inf:
        return ""
    if group.overdue:
        return f'; past its deadline since {-left:.1f} s, and on_group_deadline is "wait": seal or drop it'
    what = {
        "wait": "it counts as overdue and waits on",
        "drop": "it is dropped",
        "use_partial": f"what is there is used, if {state.settings.min_group_size} or more are",
    }[policy]
    return f"; at its deadline, in {max(left, 0.0):.1f} s, {what}"


def _quarantine(state: BufferState, group: Group) -> str:
    """Why it can't be computed, or nobody is given it."""
    whys = (entry.quarantine for entry in group.votes)
    return next(filter(None, whys), "") or "; ".join(_kept(state, group))


def _kept(state: BufferState, group: Group) -> Iterator[str]:
    """Why consumers aren't given it though it is available; each reason once."""
    for consumer in state.consumers.values():
        keys = [group.row.id]
        if consumer.settings.unit == "item":
            keys = [entry.record.seq for entry in group.members]
        whys = dict.fromkeys(filter(None, (why_kept(consumer, key) for key in keys)))
        for why in list(whys)[:2]:
            yield f"{consumer.name}: {why}"
