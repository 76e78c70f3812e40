"""The document that describes all routes for programs, made of the routes and the client's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from experience_buffer_server.web.schemas import Kind, components

_TITLE: Final = "Experience buffer"
_VERSION: Final = "1"
"""Of what is described; the server's own is told by /api/v1/status to those who may know it."""
_ABOUT: Final = """\
What a server holds and does, as JSON; nothing here consumes or changes anything.

Where the server has an access file, send `Authorization: Bearer TOKEN` with a token of the role `look`.
Times are seconds since the Unix epoch. What JSON has no number for is text: "NaN", "Infinity" and
"-Infinity", and whole numbers beyond 2**53 - 1. Fields are added without notice, never renamed.
"""
_PROBLEM: Final = {
    "description": "Why not: 400, 401, 403, 404, 409, 429 and 503 (with Retry-After), 500.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
}


def document(app: FastAPI, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Make the document, OpenAPI 3.1.

    Args:
        app: With all its routes.
        kinds: The values that routes answer with.
    """
    made: dict[str, Any] = get_openapi(
        title=_TITLE,
        version=_VERSION,
        openapi_version="3.1.0",
        description=_ABOUT,
        routes=app.routes,
    )
    for path in made["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = _PROBLEM
    made["components"] = {
        "schemas": components(kinds),
        "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
    }
    made["security"] = [{}, {"token": []}]
    return made
