"""Groups with their members, and the leases on them."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query
from starlette.responses import Response

from experience_buffer import GroupInfo, LeaseInfo
from experience_buffer._messages import convert
from experience_buffer._messages.calls import call_of
from experience_buffer._messages.filters import group_states
from experience_buffer._messages.names import GROUP_ORDER
from experience_buffer.looking import GroupOrder, GroupState
from experience_buffer_server.web.api.describing import (
    BufferName,
    PageSize,
    PageToken,
    add,
    paged,
)
from experience_buffer_server.web.route import Calling, stands_for
from experience_buffer_server.web.schemas import Page


def add_groups(app: FastAPI) -> None:
    """Add the routes."""
    add(app, "/buffers/{buffer}/groups", list_groups, Page("groups", GroupInfo))
    add(app, "/buffers/{buffer}/group", get_group, GroupInfo)
    add(app, "/buffers/{buffer}/leases", list_leases, Page("leases", LeaseInfo))


@stands_for("ListGroups")
async def list_groups(
    buffer: BufferName,
    call: Calling,
    state: Annotated[
        list[GroupState] | None, Query(description="Only those in one of these states.")
    ] = None,
    prefix: Annotated[str, Query(description="Only those whose key begins so.")] = "",
    order: Annotated[
        GroupOrder,
        Query(description="`stuck`: those that can't be delivered first, then the oldest."),
    ] = "stuck",
    page_size: PageSize = 100,
    page_token: PageToken = "",
) -> Response:
    """Groups with their members: which are stuck, and on what."""
    asked = call_of(
        "ListGroups",
        convert.page_of("groups"),
        buffer=buffer,
        states=group_states(state),
        prefix=prefix,
        order=GROUP_ORDER.number(order, "order"),
        page_size=page_size,
        page_token=page_token,
    )
    return await call.answer(asked, paged("groups"))


@stands_for("GetGroup")
async def get_group(
    buffer: BufferName,
    call: Calling,
    key: Annotated[str, Query(description="The group's key, such as 0/27; of several the newest.")],
) -> Response:
    """One group, with the advantages of its members and how they were computed."""
    return await call.answer(call_of("GetGroup", convert.group, buffer=buffer, group=key))


@stands_for("ListLeases")
async def list_leases(
    buffer: BufferName,
    call: Calling,
    consumer: Annotated[str, Query(description="Only those of this consumer.")] = "",
    lease_id: Annotated[int, Query(ge=0, description="Only this one, with all its units.")] = 0,
    page_size: PageSize = 100,
    page_token: PageToken = "",
) -> Response:
    """Open leases, oldest first: who holds what, since when, until when."""
    asked = call_of(
        "ListLeases",
        convert.page_of("leases"),
        buffer=buffer,
        consumer=consumer,
        lease_id=lease_id,
        page_size=page_size,
        page_token=page_token,
    )
    return await call.answer(asked, paged("leases"))
