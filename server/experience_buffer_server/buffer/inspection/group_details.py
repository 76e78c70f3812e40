"""One group with what was computed for it: advantages of its members, mean and std used, flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from experience_buffer import errors, trxp
from experience_buffer.looking import GroupInfo, GroupMember
from experience_buffer_server.advantages.arrays.decoding import decode_mask
from experience_buffer_server.advantages.arrays.values import MASK_DTYPES
from experience_buffer_server.buffer.delivery.read_ahead import fetched
from experience_buffer_server.buffer.inspection.glance import Glance
from experience_buffer_server.buffer.inspection.groups import group_info
from experience_buffer_server.buffer.inspection.places import places_of
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.buffer.state.group_keys import namesake
from experience_buffer_server.store.interface import AdvantageRow

_OF_MEMBER: Final = frozenset(("mean_magnitude", "mean_advantage", "zero_mask", "bootstrapped"))
"""Of what is recorded with a member's advantages, what isn't its group's."""
_FLOAT32: Final = "<f4"


async def group_details(state: BufferState, key: str, now: float, computing: str) -> GroupInfo:
    """The newest group with a key, with what was computed for its members as far as it can be read.

    Args:
        state: The buffer's.
        key: The group's key.
        now: Seconds since the Unix epoch.
        computing: What computing waits for or is at work on, in words.

    Raises:
        GroupNotFoundError: No member of such a group is here.
    """
    groups = state.contents.groups
    if (group := groups.get(key)) is None:
        other = namesake(key, state.settings.group_by, groups.get)
        raise errors.GroupNotFoundError(
            f"buffer {state.name!r} holds no member of group {key!r:.200}{other}", subject=key
        )
    info = group_info(state, group, now, computing)
    glance, members = Glance(), []
    computation: dict[str, Any] | None = None
    for member in info.members:
        entry = state.contents.by_uid(member.uid)
        if entry is None or entry.leaving or entry.record.tombstone:
            members.append(member)
            continue
        async with fetched(state.store, state.id, [entry]):
            row = _row(state, entry)
            members.append(_computed(state, entry, member, row))
        if row is not None and computation is None:
            computation = {k: v for k, v in row.details.items() if k not in _OF_MEMBER}
        await glance.breathe()
    return dataclasses.replace(info, members=tuple(members), computation=computation)


def _row(state: BufferState, entry: Entry) -> AdvantageRow | None:
    """What was computed for an experience; None where nothing was, or it can't be read back."""
    (row,) = state.store.advantages(state.id, [entry.record.seq])
    return row if isinstance(row, AdvantageRow) else None


def _computed(
    state: BufferState, entry: Entry, member: GroupMember, row: AdvantageRow | None
) -> GroupMember:
    places = places_of(state, entry)
    if row is None:
        return dataclasses.replace(member, places=places)
    advantages = np.frombuffer(row.advantages, dtype=_FLOAT32)
    trained = advantages[_mask(state, entry, row.details, len(advantages)) != 0]
    seen = trained.astype(np.float64)
    return dataclasses.replace(
        member,
        places=places,
        magnitude=float(row.details["mean_magnitude"]),
        advantage=float(seen.mean()) if seen.size else None,
        min_advantage=float(seen.min()) if seen.size else None,
        max_advantage=float(seen.max()) if seen.size else None,
        num_trained_tokens=int(seen.size),
        per_token=bool(seen.size and seen.min() != seen.max()),
        flags=tuple(row.flags),
    )


def _mask(
    state: BufferState, entry: Entry, details: Mapping[str, Any], length: int
) -> NDArray[np.uint8]:
    """Which response tokens train, shape [T]: 1 where they do; all, where the payload doesn't say."""
    if details.get("masked"):
        return np.zeros(length, dtype=np.uint8)
    every = np.ones(length, dtype=np.uint8)
    (payload,) = state.store.payloads(state.id, [entry.record.uid])
    item = trxp.read(payload)[0] if isinstance(payload, bytes) else None
    mask = item.tensors.get("action_mask") if isinstance(item, trxp.Item) else None
    if mask is None or mask.shape != (length,) or mask.dtype not in MASK_DTYPES:
        return every
    return decode_mask(bytes(mask.data), mask.dtype)
