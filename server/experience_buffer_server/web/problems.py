"""What goes wrong, as HTTP says it: the status that fits, and the same reason and words as gRPC has."""

from __future__ import annotations

import html
import math
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from experience_buffer import errors
from experience_buffer.status import to_request_error
from experience_buffer_server.web.answers import json_answer

STATUSES: Final = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 503,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
    "UNIMPLEMENTED": 501,
    "DATA_LOSS": 500,
    "INTERNAL": 500,
}
"""By the status of gRPC."""
_NAMES: Final = {404: "NOT_FOUND", 405: "UNIMPLEMENTED", 413: "RESOURCE_EXHAUSTED"}
_WORDS: Final = {404: "Nothing is here", 405: "This can't be done here"}


def problem(error: errors.ExperienceBufferError, *, status: int = 0) -> Response:
    """The answer to a request that failed.

    Args:
        error: Why.
        status: Of HTTP; 0: the one that fits the error.
    """
    answer = json_answer({"error": described(error)}, status=status or STATUSES[error.status])
    if error.status == "UNAUTHENTICATED":
        answer.headers["WWW-Authenticate"] = "Bearer"
    if error.retry_delay_seconds is not None:
        answer.headers["Retry-After"] = str(max(math.ceil(error.retry_delay_seconds), 1))
    return answer


def described(error: errors.ExperienceBufferError) -> dict[str, Any]:
    """An error as plain data, its texts as short as gRPC has them."""
    short = to_request_error(error)
    return {
        "status": error.status,
        "reason": error.reason,
        "message": short.message,
        "subject": short.subject,
        "retry_delay_seconds": error.retry_delay_seconds,
    }


def missing(request: Request, *, status: int = 404, message: str = "") -> Response:
    """The answer where nothing is: a small page for people, JSON for programs."""
    words = _WORDS.get(status, "That failed")
    if wants_page(request):
        text = (
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f'<meta name="color-scheme" content="light dark"><title>{words}</title>'
            f"<h1>{words}</h1><p>{html.escape(message)}</p>"
            '<p><a href="/">The experience buffer</a></p></html>\n'
        )
        return Response(text, status, media_type="text/html")
    name = _NAMES.get(status, "INVALID_ARGUMENT")
    error = {
        "status": name,
        "reason": {"UNIMPLEMENTED": "UNSUPPORTED"}.get(name, name),
        "message": message or words,
        "subject": "",
        "retry_delay_seconds": None,
    }
    return json_answer({"error": error}, status=status)


def wants_page(request: Request) -> bool:
    """Whether a browser asks for something to show."""
    return "text/html" in request.headers.get("accept", "")
