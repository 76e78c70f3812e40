"""What is in a buffer now, as callers are told: experiences, groups, leases, page by page."""

from __future__ import annotations

from collections.abc import Sequence

from experience_buffer.looking import GroupInfo, LeaseInfo
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.inspection import (
    experiences,
    group_details,
    group_pages,
    leases,
)
from experience_buffer_server.buffer.inspection.group_pages import GroupsWanted
from experience_buffer_server.buffer.inspection.pages import Page
from experience_buffer_server.buffer.inspection.wanted import Wanted, sieve, with_flags
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.runtime import clock


async def experience_page(
    buffer: Buffer, wanted: Wanted, *, token: str, size: int, newest_first: bool
) -> tuple[list[Entry], str]:
    """A page of experiences, and the next one's token; see `experiences.experience_page`."""
    return await experiences.experience_page(
        buffer.state, wanted, token=token, size=size, newest_first=newest_first
    )


async def all_of(buffer: Buffer, wanted: Wanted) -> list[Entry]:
    """All experiences that are wanted; see `experiences.all_of`."""
    return await experiences.all_of(buffer.state, wanted)


async def matching(buffer: Buffer, wanted: Wanted, entries: Sequence[Entry]) -> Sequence[Entry]:
    """Those of some experiences that are wanted; many are looked at in one go.

    Raises:
        ConsumerNotFoundError: There is no such consumer.
        InvalidRequestError: A consumer is named, and nothing that it might be asked for.
    """
    passed = sieve(buffer.state, wanted)(entries)
    return await with_flags(buffer.state, passed, wanted.flags) if wanted.flags else passed


async def group_page(buffer: Buffer, wanted: GroupsWanted) -> tuple[list[GroupInfo], str]:
    """A page of groups, and the next one's token; see `group_pages.group_page`."""
    words = buffer.flow.computing.describe()
    return await group_pages.group_page(buffer.state, wanted, clock.now(), words)


async def group(buffer: Buffer, key: str) -> GroupInfo:
    """The newest group with a key, with what was computed; see `group_details.group_details`."""
    words = buffer.flow.computing.describe()
    return await group_details.group_details(buffer.state, key, clock.now(), words)


async def lease_page(
    buffer: Buffer, *, consumer: str, lease_id: int, after: int, size: int
) -> Page[LeaseInfo]:
    """Open leases; see `leases.lease_page`."""
    return await leases.lease_page(
        buffer.state, consumer=consumer, lease_id=lease_id, after=after, size=size, now=clock.now()
    )
