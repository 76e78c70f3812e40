"""The server as a whole: what it is, and what of it needs a person."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from experience_buffer import Stats
from experience_buffer._messages.calls import call_of
from experience_buffer._messages.convert import reader_of
from experience_buffer._show import Shown
from experience_buffer.advice import Advice, advise
from experience_buffer_server.runtime.callers import caller_of
from experience_buffer_server.web.api.describing import add, listed
from experience_buffer_server.web.route import Calling, Serving, stands_for
from experience_buffer_server.web.schemas import Page


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServerStatus(Shown):
    """What a server is.

    Attributes:
        name: "experience-buffer".
        version: Of the server's package.
        python_version: Of its interpreter.
        uptime_seconds: Since it started.
        is_serving: False while it drains.
        grpc_address: Where clients reach it, as it listens: "host:port" or "unix:/path".
        is_secure: Whether its ports speak TLS.
        needs_token: Whether callers have to be known.
        caller: Who asks: the name of the token or certificate, else the address.
        has_page: Whether the page is served, at /ui/.
        has_tokenizer: Whether it has texts for token ids.
        can_push: Whether experiences can be pushed as JSON.
        buffers: Names of the buffers that the caller may see.
    """

    name: str
    version: str
    python_version: str
    uptime_seconds: float
    is_serving: bool
    grpc_address: str
    is_secure: bool
    needs_token: bool
    caller: str
    has_page: bool
    has_tokenizer: bool
    can_push: bool
    buffers: tuple[str, ...]


def add_server(app: FastAPI) -> None:
    """Add the routes."""
    add(app, "/status", get_status, ServerStatus)
    add(app, "/stats", get_stats, Stats)
    add(app, "/advice", get_advice, Page("advice", Advice, has_token=False))


@stands_for("GetStats")
async def get_status(call: Calling, served: Serving) -> Response:
    """What the server is: its version, how to reach it, what it can, and which buffers it has."""
    limits, caller = served.backend.limits, caller_of()

    def status(stats: Stats) -> Any:
        return ServerStatus(
            name="experience-buffer",
            version=stats.server_version,
            python_version=platform.python_version(),
            uptime_seconds=stats.uptime_seconds,
            is_serving=not served.backend.draining.is_set(),
            grpc_address=served.address,
            is_secure=served.is_secure,
            needs_token=served.guard.grants is not None,
            caller=caller,
            has_page=limits.page,
            has_tokenizer=served.texts is not None,
            can_push=limits.http_push,
            buffers=tuple(buffer.name for buffer in stats.buffers),
        ).to_dict()

    return await call.answer(call_of("GetStats", reader_of(Stats)), status)


@stands_for("GetStats")
async def get_stats(call: Calling) -> Response:
    """Counts, depths and waits of all buffers that the caller may see."""
    return await call.answer(call_of("GetStats", reader_of(Stats)))


@stands_for("GetStats")
async def get_advice(call: Calling) -> Response:
    """What needs a person, or explains a wait, in sentences; the worst first."""
    asked = call_of("GetStats", reader_of(Stats))
    return await call.answer(asked, lambda stats: listed("advice")(advise(stats)))
