"""What the overview shows, as server-sent events: at most one a second, to a bounded number of tabs.

An event costs the event loop as much as a call of GetStats. It is paced by what it takes: large ones come
less often, so that looking stays far below what training costs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from experience_buffer import BufferStats, Stats, errors
from experience_buffer._messages.calls import call_of
from experience_buffer._messages.convert import reader_of
from experience_buffer._show import Shown
from experience_buffer.advice import Advice, advise
from experience_buffer.history import TrendPoint, Trends
from experience_buffer_server.runtime.callers import caller_of
from experience_buffer_server.runtime.quotas import Bound, Places, Report
from experience_buffer_server.web.api.describing import add_stream
from experience_buffer_server.web.route import Calling, Serving, stands_for
from experience_buffer_server.web.speaker import SPEAKER, Speaker

_MAX_TABS: Final = 32
_MAX_TABS_OF_ONE: Final = 16
_SECONDS: Final = 1.0
"""Between two events, at least."""
_SHARE: Final = 50
"""So many times what an event took to make passes before the next."""
_BYTES_PER_SECOND: Final = 200_000
_STATS: Final = call_of("GetStats", reader_of(Stats))
_NEVER: Final = (0.0, None)
_SLOWEST_SECONDS: Final = 10.0
"""For a tab to take an event."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServerEvent(Shown):
    """What an event `overview` holds.

    Attributes:
        server_version: Version of the server's package.
        uptime_seconds: Since it started.
        time: When it was made, seconds since the Unix epoch.
        buffers: The buffers that the caller may see, by name.
        advice: What needs a person, or explains a wait; the worst first.
        points: The newest point of each buffer's trends, by the buffer's name.
    """

    server_version: str
    uptime_seconds: float
    time: float
    buffers: tuple[BufferStats, ...]
    advice: tuple[Advice, ...]
    points: dict[str, TrendPoint]


def add_events(app: FastAPI, report: Report) -> None:
    """Add the route.

    Args:
        app: The application.
        report: Where refused tabs are counted.
    """
    words = "{whose} {have} streams of events, the limit is {most}; close some tabs"
    app.state.tabs = Places(
        report,
        Bound("events_per_client", _MAX_TABS_OF_ONE, words),
        Bound("events", _MAX_TABS, words),
    )
    app.state.kinds.append(ServerEvent)
    add_stream(app, "/events", get_events)


@stands_for("GetStats")
async def get_events(call: Calling, served: Serving) -> Response:
    """What the overview shows, whenever it may have changed, as server-sent events.

    The events `overview` hold a `ServerEvent` each, one a second at most; a tab that doesn't take them is
    shut out. The event `end` is the last: the server stops.
    """
    return EventStream(call, served)


class EventStream(Response):
    """An answer that lasts until its tab, its caller's grant or the server ends."""

    def __init__(self, call: Calling, served: Serving) -> None:
        super().__init__(media_type="text/event-stream")
        self._call = call
        self._served = served
        self._points: dict[str, tuple[float, TrendPoint]] = {}
        """By buffer, when there is a newer one, and the newest that was read."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events.

        Raises:
            ResourceExhaustedError: Too many are open.
        """
        speaker: Speaker = scope["state"][SPEAKER]
        with scope["app"].state.tabs.within(caller_of()):
            speaker.stream()
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            headers += [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if speaker.scope["method"] == "HEAD":
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            async for event in self._events():
                try:
                    async with asyncio.timeout(_SLOWEST_SECONDS):
                        await send({"type": "http.response.body", "body": event, "more_body": True})
                except TimeoutError:
                    speaker.transport.abort()
                    return
            await send(
                {"type": "http.response.body", "body": _event("end", {}), "more_body": False}
            )

    async def _events(self) -> AsyncIterator[bytes]:
        draining = self._served.backend.draining
        while not draining.is_set():
            begun = time.perf_counter()
            event = await self._overview()
            took = time.perf_counter() - begun
            yield event
            pause = max(_SECONDS, _SHARE * took, len(event) / _BYTES_PER_SECOND)
            try:
                async with asyncio.timeout(pause):
                    await draining.wait()
            except TimeoutError:
                continue

    async def _overview(self) -> bytes:
        message = await self._call.ask(_STATS)
        await self._read_points([buffer.name for buffer in message.buffers])

        def make() -> bytes:
            stats = _STATS.parse(message)
            names = {buffer.name for buffer in stats.buffers}
            event = ServerEvent(
                server_version=stats.server_version,
                uptime_seconds=stats.uptime_seconds,
                time=time.time(),
                buffers=stats.buffers,
                advice=tuple(advise(stats)),
                points={name: point for name, (_, point) in self._points.items() if name in names},
            )
            return _event("overview", event.to_dict())

        return await self._call.aside(make, message.ByteSize())

    async def _read_points(self, names: Iterable[str]) -> None:
        """Read the newest point of each buffer's trends, once per point."""
        now = time.time()
        for name in names:
            if now < self._points.get(name, _NEVER)[0]:
                continue
            asked = call_of("GetTrends", reader_of(Trends), buffer=name, seconds=_SECONDS)
            try:
                found = asked.parse(await self._call.ask(asked))
            except errors.BufferNotFoundError:
                continue
            if found.points:
                point = found.points[-1]
                due = max(point.time + found.interval_seconds, now + _SECONDS)
                self._points[name] = due, point
            await asyncio.sleep(0)  # Others are answered in between.


def _event(name: str, data: Any) -> bytes:
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n".encode()
