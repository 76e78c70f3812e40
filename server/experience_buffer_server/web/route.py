"""A route: what it takes, who may ask, and what becomes of an error.

One kind for all: the rules of access are those of the call that stands behind a route, judged before
anything that was sent is looked at.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import cached_property
from typing import Annotated, Any, Final, TypeVar

from fastapi import Depends
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from experience_buffer import errors
from experience_buffer_server.rpc.boundary import explained
from experience_buffer_server.web.calls import Call, guarded
from experience_buffer_server.web.problems import problem
from experience_buffer_server.web.served import Served
from experience_buffer_server.web.speaker import SPEAKER, Speaker

_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Coroutine[Any, Any, Response]])
_SERVED: Final = "served"
_CALL: Final = "call"
_METHOD: Final = "__method__"
_SHOWN: Final = 100


def stands_for(method: str) -> Callable[[_Endpoint], _Endpoint]:
    """Say which call of the service a route is: who may make it may ask."""

    def mark(endpoint: _Endpoint) -> _Endpoint:
        setattr(endpoint, _METHOD, method)
        return endpoint

    return mark


def call_of(request: Request) -> Call:
    """The call that a request makes."""
    call: Call = getattr(request.state, _CALL)
    return call


def served_of(request: Request) -> Served:
    """The server that is asked."""
    served: Served = getattr(request.app.state, _SERVED)
    return served


Calling = Annotated[Call, Depends(call_of)]
Serving = Annotated[Served, Depends(served_of)]


class Route(APIRoute):
    """A route that stands for a call; without one anybody may ask."""

    @cached_property
    def _parameters(self) -> list[Any]:
        """Those of its query, with those of what it depends on."""
        found, left = [], [self.dependant]
        while left:
            each = left.pop()
            found += each.query_params
            left += each.dependencies
        return found

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the caller in, answer, and say what went wrong."""
        begun = False

        async def sending(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            method = getattr(self.endpoint, _METHOD, "")
            if not method or scope["method"] not in (self.methods or ()):
                await super().handle(scope, receive, sending)
                return
            request = Request(scope, receive)
            served = served_of(request)
            call = Call(served, guarded(served.guard, method, request), request)
            with call.entered(served.backend.quotas):
                setattr(request.state, _CALL, call)
                self._check_names(request)
                await super().handle(scope, receive, sending)
        except HTTPException:
            raise
        except Exception as error:
            failed = explained(self.path, error)
            if begun:
                # A defect; or its caller's grant has ended while it was answered.
                speaker: Speaker = scope["state"][SPEAKER]
                speaker.transport.abort()
                return
            await problem(failed)(scope, receive, send)

    def _check_names(self, request: Request) -> None:
        """Refuse what would be ignored.

        Raises:
            InvalidRequestError: A parameter is unknown, or is given twice.
        """
        known = {field.alias for field in self._parameters}
        lists = {
            field.alias for field in self._parameters if "list" in str(field.field_info.annotation)
        }
        given = Counter(name for name, _ in request.query_params.multi_items())
        for name, count in given.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                there = ", ".join(sorted(known)) or "none"
                cure = f"did you mean {near[0]}?" if near else f"there are: {there}"
                raise errors.InvalidRequestError(
                    f"unknown parameter {name[:_SHOWN]!r}; {cure}", subject=name[:_SHOWN]
                )
            if count > 1 and name not in lists:
                raise errors.InvalidRequestError(
                    f"{name} is given {count} times; give it once", subject=name
                )


async def invalid(request: Request, error: Exception) -> Response:
    """The answer to parameters that can't be: what pydantic found, in a line."""
    assert isinstance(error, RequestValidationError)
    said, subject = [], ""
    for detail in error.errors():
        where = ".".join(str(part) for part in detail["loc"][1:]) or str(detail["loc"][0])
        subject = subject or where[:_SHOWN]
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "missing":
            said.append(f"{where} is missing")
        else:
            said.append(f"{where}: {message} (got {str(detail.get('input'))[:_SHOWN]!r})")
    return problem(errors.InvalidRequestError("; ".join(said[:5]), subject=subject))
