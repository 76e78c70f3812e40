"""Answers as JSON: the plain data of the client's values, as `to_dict()` gives it."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


def json_answer(data: Any, *, status: int = 200) -> Response:
    """Plain data as an answer.

    Args:
        data: What `to_dict()` gives; what JSON has no numbers for is text in it already.
        status: Of HTTP.
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A text may hold half of a pair of surrogates, which UTF-8 can't: escaped, JSON can.
    try:
        body = text.encode()
    except UnicodeEncodeError:
        body = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    return Response(body + b"\n", status, media_type="application/json")
