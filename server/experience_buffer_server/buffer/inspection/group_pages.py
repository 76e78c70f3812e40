"""Groups page by page: what is stuck first, by age or by key, without looking at all of them at once."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from experience_buffer import errors
from experience_buffer.looking import GroupInfo, GroupOrder, GroupState
from experience_buffer_server.buffer.inspection.glance import Glance
from experience_buffer_server.buffer.inspection.groups import group_info, group_state, is_stuck
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Group

_AT_ONCE: Final = 256
"""Groups between two looks at the time."""
_MOST_MEMBERS: Final = 4096
"""Of all groups in a page, about: messages and times have a limit."""
_STUCK: Final = frozenset(("open", "waiting_for_fields", "computing", "held", "quarantined"))
"""States of groups that can't be delivered, all of them."""
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
    sieve, glance = _Sieve(state, wanted), Glance()
    if wanted.order == "key":
        found, token = await _by_key(state, wanted, sieve, glance)
    else:
        found, token = await _in_order(state, wanted, sieve, glance)
    infos: list[GroupInfo] = []
    num_members = 0
    for group, of_group in found:
        if state.contents.groups.by_id(group.row.id) is not group:
            continue
        infos.append(group_info(state, group, now, computing))
        num_members += len(infos[-1].members)
        if num_members >= _MOST_MEMBERS and group is not found[-1][0]:
            return infos, of_group
        await glance.breathe()
    return infos, token


_Found: TypeAlias = list[tuple[Group, str]]
"""Groups in order, each with the token of a page that ends with it."""


async def _in_order(
    state: BufferState, wanted: GroupsWanted, sieve: _Sieve, glance: Glance
) -> tuple[_Found, str]:
    """The first groups that match, and the token of the next page."""
    found: _Found = []
    last = wanted.token
    groups = state.contents.groups.all()
    await glance.breathe()
    for rank, places in _passes(wanted, groups):
        for start in range(0, len(places), _AT_ONCE):
            some = [groups[place] for place in places[start : start + _AT_ONCE]]
            for group in sieve.passing(some, rank):
                if len(found) == wanted.size:
                    return found, found[-1][1]
                found.append((group, _token(wanted.order, rank, group.row.id)))
            last = _token(wanted.order, rank, some[-1].row.id)
            if glance.is_over:
                return found, last
            await glance.breathe()
    return found, ""


def _passes(wanted: GroupsWanted, groups: Sequence[Group]) -> Iterator[tuple[int | None, range]]:
    """Places of groups in order, behind those of the pages before: by rank, where there are ranks."""
    rank, _, number = wanted.token[1:].partition("-")
    after = int(number) if number else None
    if wanted.order == "newest":
        end = len(groups) if after is None else bisect_left(groups, after, key=_number_of)
        yield None, range(end - 1, -1, -1)
        return
    begin = 0 if after is None else bisect_right(groups, after, key=_number_of)
    if wanted.order == "oldest":
        yield None, range(begin, len(groups))
        return
    if rank in ("", "0"):
        yield 0, range(begin, len(groups))
    if not wanted.states or not wanted.states <= _STUCK:
        yield 1, range(begin if rank == "1" else 0, len(groups))


def _number_of(group: Group) -> int:
    return group.row.id


def _token(order: GroupOrder, rank: int | None, number: int) -> str:
    return f"{order[0]}{'' if rank is None else rank}-{number}"


class _Sieve:
    """Lets the groups pass that a page is to have, as far as that is known of them one by one."""

    def __init__(self, state: BufferState, wanted: GroupsWanted) -> None:
        self._state = state
        self._wanted = wanted

    def passing(self, groups: Sequence[Group], rank: int | None) -> Sequence[Group]:
        """Those that are to pass; what is cheap to know is looked at first, of all of them."""
        state, wanted = self._state, self._wanted
        if prefix := wanted.prefix:
            groups = [group for group in groups if group.row.key.startswith(prefix)]
        if rank == 0 or (wanted.states and wanted.states <= _STUCK):
            if not self._any_kept():
                groups = [g for g in groups if not g.available or g.row.quarantined]
            groups = [group for group in groups if is_stuck(state, group)]
        elif rank == 1:
            groups = [group for group in groups if not is_stuck(state, group)]
        if not wanted.states:
            return groups
        return [group for group in groups if group_state(state, group) in wanted.states]

    def _any_kept(self) -> bool:
        """Whether there may be groups that are available and can't be delivered to all."""
        consumers, contents = self._state.consumers.values(), self._state.contents
        return bool(contents.quarantined) or any(one.held or one.quarantined for one in consumers)


async def _by_key(
    state: BufferState, wanted: GroupsWanted, sieve: _Sieve, glance: Glance
) -> tuple[_Found, str]:
    """The first groups by key, behind those of the pages before; all are looked at."""
    number, _, key = wanted.token[1:].partition("-")
    after = (key, int(number)) if wanted.token else ("", -1)
    first: list[tuple[str, int, Group]] = []
    groups = state.contents.groups.all()
    for start in range(0, len(groups), _AT_ONCE):
        some: Sequence[Group] = [
            group
            for group in groups[start : start + _AT_ONCE]
            if (group.row.key, group.row.id) > after
        ]
        if len(first) > wanted.size:
            last = first[-1][:2]
            some = [group for group in some if (group.row.key, group.row.id) < last]
        for group in sieve.passing(some, None) if some else ():
            insort(first, (group.row.key, group.row.id, group))
        del first[wanted.size + 1 :]
        await glance.breathe()
    found = [(group, f"k{number}-{key}") for key, number, group in first[: wanted.size]]
    return found, found[-1][1] if len(first) > wanted.size else ""
