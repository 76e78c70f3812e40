"""Pushing experiences as JSON, where the operator allows it: what a worker without gRPC needs.

Everything else of a push is as over gRPC: each item has its outcome, and what is answered is durable.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from experience_buffer import EID, Experience, PushResult, Tombstone, errors, trxp
from experience_buffer._arguments import misspelt
from experience_buffer._messages import convert
from experience_buffer._messages.calls import Call
from experience_buffer.v1 import service_pb2
from experience_buffer_server.rpc.push_codec import PushRequest, read_push
from experience_buffer_server.settings.server import ServerSection
from experience_buffer_server.web.api.describing import PREFIX, BufferName
from experience_buffer_server.web.problems import problem
from experience_buffer_server.web.route import Calling, Serving, stands_for
from experience_buffer_server.web.schemas import schema_of

_MOST_BYTES: Final = 16 * 1024 * 1024
"""Of a request: as Python's values it takes several times as much."""
_KEYS: Final = ("experiences", "tombstones", "group_size")
_FIELDS: Final = frozenset(inspect.signature(Experience).parameters)
_NUMBERS: Final = {"type": "array", "items": {"type": "number"}}
_WHOLES: Final = {"type": "array", "items": {"type": "integer"}}
_TEXT: Final = {"type": "string"}
_EID: Final = {
    "type": "object",
    "description": "Its identity; the same again with the same content is a duplicate.",
    "required": ["task"],
    "properties": {
        "batch": {"type": ["string", "integer"]},
        "task": {"type": ["string", "integer"]},
        "run": {"type": "integer"},
        "step": {"type": "integer"},
        "suffix": {"type": "string", "description": "Random where it is left out."},
    },
}
_BODY: Final = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "experiences": {
            "type": "array",
            "items": {
                "type": "object",
                "description": "The arguments of the client's `Experience`; all others as there.",
                "required": ["eid"],
                "properties": {
                    "eid": _EID,
                    "prompt": _WHOLES,
                    "response": _WHOLES,
                    "tokens": _WHOLES,
                    "prompt_length": {"type": "integer"},
                    "logprobs": _NUMBERS,
                    "reward": {"type": "number"},
                    "action_mask": {"type": "array", "items": {"type": "boolean"}},
                    "prompt_text": _TEXT,
                    "response_text": _TEXT,
                    "messages": {"type": "array", "items": {"type": "object"}},
                    "info": {"type": "object"},
                },
            },
        },
        "tombstones": {
            "type": "array",
            "description": "Failed rollouts.",
            "items": {
                "type": "object",
                "required": ["eid"],
                "properties": {"eid": _EID, "reason": _TEXT},
            },
        },
        "group_size": {
            "type": "integer",
            "description": "Members of every group that is named here; 0: the buffer's default.",
        },
    },
}


def add_pushes(app: FastAPI, limits: ServerSection) -> None:
    """Add the route, where it is allowed."""
    if not limits.http_push:
        return
    app.state.kinds.append(PushResult)
    app.add_api_route(
        f"{PREFIX}/buffers/{{buffer}}/push",
        push,
        methods=["POST"],
        operation_id="push",
        tags=["buffers"],
        summary="Store experiences",
        responses={
            200: {
                "description": "What became of each, when all that are stored are durable.",
                "content": {"application/json": {"schema": schema_of(PushResult)}},
            }
        },
        response_class=Response,
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": {"schema": _BODY}}}
        },
    )


@stands_for("Push")
async def push(buffer: BufferName, request: Request, call: Calling, served: Serving) -> Response:
    """Store experiences; answers when all that are stored are durable. Idempotent.

    Each has its outcome: those that are refused don't keep the others out.
    """
    limits = served.backend.limits
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Nor can a form on another site's page send this without asking first, which nobody answers.
        return problem(
            errors.InvalidRequestError(
                f"Content-Type {kind[:100]!r}: send application/json", subject="content-type"
            ),
            status=415,
        )
    most = min(_MOST_BYTES, limits.max_message_bytes)
    try:
        body = await _read(request, most)
    except errors.ResourceExhaustedError as error:
        return problem(error, status=413)
    loop = asyncio.get_running_loop()
    make = partial(_request, buffer, body, limits.max_push_items)
    asked = await loop.run_in_executor(served.lookers, make)
    return await call.answer(Call("Push", _as_message(asked), _result))


async def _read(request: Request, most: int) -> bytes:
    """The body of a request.

    Raises:
        ResourceExhaustedError: It has more bytes than this.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise errors.ResourceExhaustedError(
                f"the request has more than {most} bytes; send fewer experiences at once",
                subject="body",
            )
    return bytes(body)


def _as_message(request: PushRequest) -> Any:
    # To the service it is one, as over gRPC.
    return request


def _result(answer: bytes) -> PushResult:
    return convert.push_result(service_pb2.PushResponse.FromString(answer), positions=())


def _request(buffer: str, body: bytes, max_items: int) -> PushRequest:
    """What a body asks for, in a thread.

    Raises:
        InvalidRequestError: It is no JSON, or not what a push takes; the text says where.
    """
    given = _parsed(body)
    experiences = _entries(given, "experiences")
    tombstones = _entries(given, "tombstones")
    if len(experiences) + len(tombstones) > max_items:
        raise errors.InvalidRequestError(
            f"{len(experiences) + len(tombstones)} experiences in a push are over the limit "
            f"server.max_push_items, {max_items}",
            subject="experiences",
        )
    group_size = given.get("group_size", 0)
    if type(group_size) is not int or not 0 <= group_size < 2**32:
        raise errors.InvalidRequestError(
            f"group_size {group_size!r} is no number of members", subject="group_size"
        )
    made = [_made(each, f"experiences[{i}]", _experience) for i, each in enumerate(experiences)]
    dead = [_made(each, f"tombstones[{i}]", _tombstone) for i, each in enumerate(tombstones)]
    message = service_pb2.PushRequest(
        buffer=buffer,
        payload=trxp.encode(made) if made else b"",
        tombstones=convert.tombstones_to_messages(dead),
        group_size=group_size,
    )
    return read_push(message.SerializeToString(), max_payloads=1)


def _parsed(body: bytes) -> dict[str, Any]:
    def refuse(text: str) -> Any:
        raise errors.InvalidRequestError(f"JSON has no {text}; leave the value out", subject="body")

    try:
        given = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        if isinstance(error, errors.InvalidRequestError):
            raise
        raise errors.InvalidRequestError(f"the body is no JSON: {error}", subject="body") from error
    if not isinstance(given, dict):
        raise errors.InvalidRequestError(
            'the body is no object; send {"experiences": [...]}', subject="body"
        )
    _check(given, _KEYS, "")
    return given


def _check(given: dict[str, Any], known: Any, where: str) -> None:
    for name in given:
        if name not in known:
            raise errors.InvalidRequestError(
                f"{where}{name[:100]!r} is no field; {misspelt(name, known)}",
                subject=f"{where}{name[:100]}",
            )


def _entries(given: dict[str, Any], name: str) -> list[Any]:
    entries = given.get(name, [])
    if not isinstance(entries, list):
        raise errors.InvalidRequestError(f"{name} is no list", subject=name)
    return entries


def _made(given: Any, where: str, make: Callable[[dict[str, Any], str], Any]) -> Any:
    if not isinstance(given, dict):
        raise errors.InvalidRequestError(f"{where} is no object", subject=where)
    try:
        return make(given, where)
    except (errors.InvalidRequestError, errors.TrxpError, TypeError) as error:
        said = str(error)
        said = said if where in said else f"{where}: {said}"
        raise errors.InvalidRequestError(said, subject=where) from error


def _experience(given: dict[str, Any], where: str) -> Experience:
    _check(given, _FIELDS, f"{where}.")
    return Experience(**{**given, "eid": _eid(given)})


def _tombstone(given: dict[str, Any], where: str) -> Tombstone:
    _check(given, ("eid", "reason"), f"{where}.")
    return Tombstone(_eid(given), given.get("reason", ""))


def _eid(given: dict[str, Any]) -> EID:
    parts = given.get("eid")
    if not isinstance(parts, dict):
        raise errors.InvalidRequestError('eid is missing; give {"batch": 0, "task": 7, "run": 1}')
    return EID(**parts)
