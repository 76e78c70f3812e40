"""Groups page by page: what is stuck first, by age or by key, without looking at all of them at once."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from experience_buffer import errors
from experience_buffer.looking import GroupInfo, GroupOrder, GroupState
from experience_buffer_server.buffer.inspection.glance import Glance
from experience_buffer_server.buffer.inspection.groups import group_info, group_state, is_stuck
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Group

_AT_ONCE: Final = 64
"""Groups between two looks at the time."""
_MOST_MEMBERS: Final = 8192
"""Of all groups in a page, about: messages have a limit."""
_STUCK: Final = frozenset(("open", "waiting_for_fields", "computing"))
"""States of groups that aren't available; quarantined ones may be, for another consumer."""
_TOKENS: Final[dict[GroupOrder, re.Pattern[str]]] = {
    "stuck": re.compile(r"s[01]-[0-9]{1,20}"),
    "oldest": re.compile(r"o-[0-9]{1,20}"),
    "newest": re.compile(r"n-[0-9]{1,20}"),
    "key": re.compile(r"k[0-9]{1,20}-.*", re.DOTALL),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsWanted:
    """Which groups a page is to have."""

    states: frozenset[GroupState]
    """Empty: all."""
    prefix: str
    """What keys begin with."""
    order: GroupOrder
    size: int
    """Most of them in the page."""
    token: str
    """What the page before ended with; empty: the first one."""


async def group_page(
    state: BufferState, wanted: GroupsWanted, now: float, computing: str
) -> tuple[list[GroupInfo], str]:
    """A page of groups, and the next one's token; it is empty after the last.

    A group that changes in between may be told twice or not at all, the others are told once.

    Raises:
        InvalidRequestError: The token is none of this order.
    """
    if wanted.token and not _TOKENS[wanted.order].fullmatch(wanted.token):
        raise errors.InvalidRequestError(
            f"page_token {wanted.token!r:.60} is not one that a page in the order "
            f"{wanted.order!r} ended with",
            subject="page_token",
        )
    if wanted.order == "key":
        return await _by_key(state, wanted, now, computing)
    groups, glance = state.contents.groups, Glance()
    infos: list[GroupInfo] = []
    last, num_members = wanted.token, 0
    for rank, ids in _passes(wanted, groups.ids()):
        for start in range(0, len(ids), _AT_ONCE):
            for number in ids[start : start + _AT_ONCE]:
                group = groups.by_id(number)
                if group is None or not _matches(state, wanted, group, rank):
                    continue
                if len(infos) == wanted.size:
                    return infos, last
                infos.append(group_info(state, group, now, computing))
                last = _token(wanted.order, rank, number)
                num_members += len(infos[-1].members)
                if num_members >= _MOST_MEMBERS:
                    return infos, last
                await glance.breathe()
            last = _token(wanted.order, rank, number)
            if glance.is_over:
                return infos, last
            await glance.breathe()
    return infos, ""


def _passes(wanted: GroupsWanted, ids: Sequence[int]) -> Iterator[tuple[int | None, Sequence[int]]]:
    """The groups' numbers in order, behind those of the pages before: by rank, where there are ranks."""
    rank, _, number = wanted.token[1:].partition("-")
    after = int(number) if number else None
    if wanted.order == "newest":
        yield None, ids[: len(ids) if after is None else bisect_left(ids, after)][::-1]
        return
    rest = ids if after is None else ids[bisect_right(ids, after) :]
    if wanted.order == "oldest":
        yield None, rest
        return
    if rank in ("", "0"):
        yield 0, rest
    if not wanted.states or not wanted.states <= _STUCK:
        yield 1, rest if rank == "1" else ids


def _token(order: GroupOrder, rank: int | None, number: int) -> str:
    return f"{order[0]}{'' if rank is None else rank}-{number}"


def _matches(state: BufferState, wanted: GroupsWanted, group: Group, rank: int | None) -> bool:
    if wanted.prefix and not group.row.key.startswith(wanted.prefix):
        return False
    if rank is not None and is_stuck(state, group) != (rank == 0):
        return False
    if not wanted.states:
        return True
    if group.available and wanted.states <= _STUCK and not group.damage:
        return False  # Known without a look at its consumers.
    return group_state(state, group) in wanted.states


async def _by_key(
    state: BufferState, wanted: GroupsWanted, now: float, computing: str
) -> tuple[list[GroupInfo], str]:
    """The first groups by key, behind those of the pages before; all are looked at."""
    groups, glance = state.contents.groups, Glance()
    number, _, key = wanted.token[1:].partition("-")
    after = (key, int(number)) if wanted.token else ("", -1)
    first: list[tuple[str, int]] = []
    ids = groups.ids()
    for start in range(0, len(ids), _AT_ONCE):
        for group in map(groups.by_id, ids[start : start + _AT_ONCE]):
            if group is None:
                continue
            place = (group.row.key, group.row.id)
            if place <= after or (len(first) > wanted.size and place > first[-1]):
                continue
            if _matches(state, wanted, group, None):
                insort(first, place)
                del first[wanted.size + 1 :]
        await glance.breathe()
    infos: list[GroupInfo] = []
    num_members = 0
    for count, (key, number_of_group) in enumerate(first[: wanted.size], 1):
        if (found := groups.by_id(number_of_group)) is None:
            continue
        infos.append(group_info(state, found, now, computing))
        num_members += len(infos[-1].members)
        if count < len(first) and (count == wanted.size or num_members >= _MOST_MEMBERS):
            return infos, f"k{number_of_group}-{key}"
        await glance.breathe()
    return infos, ""
