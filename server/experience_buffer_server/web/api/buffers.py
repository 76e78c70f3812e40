"""Buffers: how they are set up, what they hold, what waits, and how that came."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query
from starlette.responses import Response

from experience_buffer import BufferInfo, BufferStats, ConsumerStats, Stats
from experience_buffer._messages import convert
from experience_buffer._messages.calls import Call, call_of
from experience_buffer._messages.convert import reader_of
from experience_buffer.advice import Advice, advise
from experience_buffer.history import Trends
from experience_buffer_server.web.api.describing import BufferName, add, listed
from experience_buffer_server.web.route import Calling, stands_for
from experience_buffer_server.web.schemas import Page


def add_buffers(app: FastAPI) -> None:
    """Add the routes."""
    add(app, "/buffers", list_buffers, Page("buffers", BufferInfo, has_token=False))
    add(app, "/buffers/{buffer}", get_buffer, BufferInfo)
    add(app, "/buffers/{buffer}/stats", get_buffer_stats, BufferStats)
    add(
        app,
        "/buffers/{buffer}/consumers",
        list_consumers,
        Page("consumers", ConsumerStats, has_token=False),
    )
    add(app, "/buffers/{buffer}/advice", get_buffer_advice, Page("advice", Advice, has_token=False))
    add(app, "/buffers/{buffer}/trends", get_trends, Trends)


@stands_for("ListBuffers")
async def list_buffers(call: Calling) -> Response:
    """All buffers that the caller may see, by name, with their settings."""
    return await call.answer(call_of("ListBuffers", convert.buffers), listed("buffers"))


@stands_for("GetBuffer")
async def get_buffer(buffer: BufferName, call: Calling) -> Response:
    """One buffer with its settings."""
    return await call.answer(call_of("GetBuffer", convert.buffer, name=buffer))


@stands_for("GetStats")
async def get_buffer_stats(buffer: BufferName, call: Calling) -> Response:
    """Counts, depths and waits of one buffer."""
    return await call.answer(_stats(buffer), lambda stats: stats.buffers[0].to_dict())


@stands_for("GetStats")
async def list_consumers(buffer: BufferName, call: Calling) -> Response:
    """The readers of a buffer: what each has, and what it waits for."""
    consumers = listed("consumers")
    return await call.answer(_stats(buffer), lambda stats: consumers(stats.buffers[0].consumers))


@stands_for("GetStats")
async def get_buffer_advice(buffer: BufferName, call: Calling) -> Response:
    """What of one buffer needs a person, or explains a wait, in sentences; the worst first."""
    return await call.answer(_stats(buffer), lambda stats: listed("advice")(advise(stats)))


@stands_for("GetTrends")
async def get_trends(
    buffer: BufferName,
    call: Calling,
    seconds: Annotated[
        float, Query(ge=0, description="How far back; 0: fifteen minutes, which is the most.")
    ] = 0.0,
) -> Response:
    """The last minutes of a buffer: rates, depths, rewards, staleness."""
    asked = call_of("GetTrends", reader_of(Trends), buffer=buffer, seconds=seconds)
    return await call.answer(asked)


def _stats(buffer: str) -> Call[Stats]:
    return call_of("GetStats", reader_of(Stats), buffer=buffer)
