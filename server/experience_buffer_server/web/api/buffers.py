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
from experience_buffer_server.web.answers import json_answer
from experience_buffer_server.web.api.describing import BufferName, add
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
    buffers = await call(call_of("ListBuffers", convert.buffers))
    return json_answer({"buffers": [buffer.to_dict() for buffer in buffers]})


@stands_for("GetBuffer")
async def get_buffer(buffer: BufferName, call: Calling) -> Response:
    """One buffer with its settings."""
    found = await call(call_of("GetBuffer", convert.buffer, name=buffer))
    return json_answer(found.to_dict())


@stands_for("GetStats")
async def get_buffer_stats(buffer: BufferName, call: Calling) -> Response:
    """Counts, depths and waits of one buffer."""
    return json_answer((await call(_stats(buffer))).buffers[0].to_dict())


@stands_for("GetStats")
async def list_consumers(buffer: BufferName, call: Calling) -> Response:
    """The readers of a buffer: what each has, and what it waits for."""
    (found,) = (await call(_stats(buffer))).buffers
    return json_answer({"consumers": [consumer.to_dict() for consumer in found.consumers]})


@stands_for("GetStats")
async def get_buffer_advice(buffer: BufferName, call: Calling) -> Response:
    """What of one buffer needs a person, or explains a wait, in sentences; the worst first."""
    return json_answer({"advice": [each.to_dict() for each in advise(await call(_stats(buffer)))]})


@stands_for("GetTrends")
async def get_trends(
    buffer: BufferName,
    call: Calling,
    seconds: Annotated[
        float, Query(ge=0, description="How far back; 0: fifteen minutes, which is the most.")
    ] = 0.0,
) -> Response:
    """The last minutes of a buffer: rates, depths, rewards, staleness."""
    found = await call(call_of("GetTrends", reader_of(Trends), buffer=buffer, seconds=seconds))
    return json_answer(found.to_dict())


def _stats(buffer: str) -> Call[Stats]:
    return call_of("GetStats", reader_of(Stats), buffer=buffer)
