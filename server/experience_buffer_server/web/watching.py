"""For machines that watch the server: its health and its metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Final

from fastapi import FastAPI, Query
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from experience_buffer import errors
from experience_buffer_server.web.calls import METRICS
from experience_buffer_server.web.route import Serving, stands_for
from experience_buffer_server.web.served import Served

_log = logging.getLogger(__name__)
_SHOWN_CHARS: Final = 80


def add_watching(app: FastAPI) -> None:
    """Add the routes."""
    app.get("/health", operation_id="health", tags=["server"])(health)
    app.get("/metrics", operation_id="metrics", tags=["server"])(metrics)


async def health(served: Serving) -> Response:
    """Whether the server serves, as a word; to everybody. 503 where it doesn't."""
    try:
        is_serving = await served.pulse.is_serving()
    except TimeoutError:
        return PlainTextResponse("NOT_SERVING: the server is too busy to answer\n", 503)
    return PlainTextResponse(
        "SERVING\n" if is_serving else "NOT_SERVING\n", 200 if is_serving else 503
    )


@stands_for(METRICS)
async def metrics(
    request: Request,
    served: Serving,
    names: Annotated[
        list[str] | None, Query(alias="name[]", description="Only metrics of these names.")
    ] = None,
) -> Response:
    """The metrics, in the format of Prometheus or OpenMetrics that the Accept header asks for."""
    accepted = request.headers.get("accept", "")
    try:
        choose_encoder(accepted)
    except (TypeError, ValueError) as error:
        raise errors.InvalidRequestError(
            f"Accept {accepted[:_SHOWN_CHARS]!a}: a version must be numbers with dots",
            subject="accept",
        ) from error
    loop = asyncio.get_running_loop()
    try:
        status, headers, body = await loop.run_in_executor(
            served.renderers, partial(_render, served, request)
        )
    except TimeoutError as error:
        _log.error("metrics: the server was too busy to be read: %s", error)
        raise errors.UnavailableError(
            "the server is too busy; scrape again later", retry_delay_seconds=5.0
        ) from error
    return Response(body, status, dict(headers))


def _render(served: Served, request: Request) -> tuple[int, Sequence[tuple[str, str]], bytes]:
    """Write the metrics, in a thread."""
    environ = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": request.url.path,
        "QUERY_STRING": request.url.query,
        "HTTP_ACCEPT": request.headers.get("accept", ""),
        "HTTP_ACCEPT_ENCODING": request.headers.get("accept-encoding", ""),
    }
    begun: list[tuple[str, list[tuple[str, str]]]] = []
    body = b"".join(served.metrics(environ, lambda *answer: begun.append(answer)))
    status, headers = begun[0]
    return int(status.split()[0]), headers, body
