"""Adding a route, with what it answers in the words of OpenAPI."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final

from fastapi import FastAPI, Path, Query
from starlette.responses import Response

from experience_buffer_server.web.schemas import Kind, Page, schema_of

PREFIX: Final = "/api/v1"

BufferName = Annotated[str, Path(description="The buffer's name.")]
PageSize = Annotated[
    int, Query(ge=1, le=1000, description="Most of them in one answer, 1 to 1,000.")
]
PageToken = Annotated[
    str, Query(description="`next_page_token` of the page before; empty: the first page.")
]


def add(app: FastAPI, path: str, endpoint: Callable[..., Any], gives: Kind | Page) -> None:
    """Add a GET route below the prefix, whose answer is JSON.

    Args:
        app: The application.
        path: Its path, below the prefix.
        endpoint: Its docstring describes it: the first line is the summary.
        gives: What it answers, for the document.
    """
    app.state.kinds.append(gives.kind if isinstance(gives, Page) else gives)
    _add(app, path, endpoint, {"application/json": {"schema": schema_of(gives)}})


def add_file(app: FastAPI, path: str, endpoint: Callable[..., Any], *types: str) -> None:
    """Add a GET route below the prefix, whose answer is bytes of one of these types."""
    _add(app, path, endpoint, {key: {"schema": {"type": "string"}} for key in types})


def add_stream(app: FastAPI, path: str, endpoint: Callable[..., Any]) -> None:
    """Add a GET route below the prefix, whose answer is server-sent events."""
    _add(app, path, endpoint, {"text/event-stream": {"schema": {"type": "string"}}})


def _add(app: FastAPI, path: str, endpoint: Callable[..., Any], content: dict[str, Any]) -> None:
    summary, _, rest = (inspect.getdoc(endpoint) or "").partition("\n")
    app.add_api_route(
        f"{PREFIX}{path}",
        endpoint,
        methods=["GET"],
        operation_id=endpoint.__name__,
        tags=["server" if path.count("/") == 1 else "buffers"],
        summary=summary.rstrip("."),
        description=rest.strip() or summary,
        responses={200: {"description": "The answer.", "content": content}},
        response_class=Response,
    )


def paged(name: str) -> Callable[[tuple[tuple[Any, ...], str]], Any]:
    """What makes plain data of a page of values and the next page's token."""
    return lambda page: listed(name)(page[0]) | {"next_page_token": page[1]}


def listed(name: str) -> Callable[[Iterable[Any]], dict[str, Any]]:
    """What makes plain data of values, under a name."""
    return lambda values: {name: [value.to_dict() for value in values]}
