"""Searching a buffer by what experiences are and hold."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Query
from starlette.responses import Response

from experience_buffer import ExperienceSummary
from experience_buffer._messages import convert
from experience_buffer._messages.calls import call_of
from experience_buffer._messages.filters import filter_of
from experience_buffer.looking import ExperienceState
from experience_buffer_server.web.api.describing import (
    BufferName,
    PageSize,
    PageToken,
    add,
    paged,
)
from experience_buffer_server.web.route import Calling, stands_for
from experience_buffer_server.web.schemas import Page

_Whole = Annotated[int | None, Query()]
_Number = Annotated[float | None, Query()]
_Text = Annotated[str, Query()]


def add_search(app: FastAPI) -> None:
    """Add the route."""
    add(
        app,
        "/buffers/{buffer}/experiences",
        list_experiences,
        Page("experiences", ExperienceSummary),
    )


@stands_for("List")
async def list_experiences(
    buffer: BufferName,
    call: Calling,
    tid: _Text = "",
    rid: _Text = "",
    sid: _Text = "",
    uid_prefix: _Text = "",
    text: Annotated[str, Query(description="What the uid holds, anywhere.")] = "",
    state: Annotated[ExperienceState | None, Query()] = None,
    consumer: Annotated[str, Query(description="For whom `state` and `step` hold.")] = "",
    step: Annotated[int | None, Query(description="Acknowledged with this step.")] = None,
    min_reward: _Number = None,
    max_reward: _Number = None,
    min_response_tokens: _Whole = None,
    max_response_tokens: _Whole = None,
    min_policy_version: _Whole = None,
    max_policy_version: _Whole = None,
    min_staleness: _Whole = None,
    max_staleness: _Whole = None,
    min_push_time: Annotated[float | None, Query(description="Seconds since the epoch.")] = None,
    max_push_time: Annotated[float | None, Query(description="Seconds since the epoch.")] = None,
    truncated: Annotated[
        bool | None, Query(description="Whether the response was cut off.")
    ] = None,
    flag: Annotated[
        list[str] | None, Query(description="All of these, such as zero_variance.")
    ] = None,
    newest_first: Annotated[bool, Query()] = False,
    archived: Annotated[
        bool, Query(description="What the archive holds, in place of what is stored.")
    ] = False,
    departure_reason: Annotated[
        str, Query(description="Of what is archived: why it left, such as evicted.")
    ] = "",
    min_departure_time: _Number = None,
    max_departure_time: _Number = None,
    page_size: PageSize = 100,
    page_token: PageToken = "",
) -> Response:
    """Summaries of stored experiences, oldest first; all that is given has to hold.

    A page may have fewer than asked for, even none, while there are more: each call looks at a bounded
    number of experiences.
    """
    where: dict[str, Any] = {
        "tid": tid,
        "rid": rid,
        "sid": sid,
        "uid_prefix": uid_prefix,
        "text": text,
        "state": state,
        "consumer": consumer,
        "step": step,
        "reward": (min_reward, max_reward),
        "response_tokens": (min_response_tokens, max_response_tokens),
        "policy_version": (min_policy_version, max_policy_version),
        "staleness": (min_staleness, max_staleness),
        "push_time": (min_push_time, max_push_time),
        "truncated": truncated,
        "flags": flag,
        "departure_reason": departure_reason,
        "departure_time": (min_departure_time, max_departure_time),
    }
    asked = call_of(
        "List",
        convert.page,
        buffer=buffer,
        filter=filter_of(where),
        newest_first=newest_first,
        archived=archived,
        page_size=page_size,
        page_token=page_token,
    )
    return await call.answer(asked, paged("experiences"))
