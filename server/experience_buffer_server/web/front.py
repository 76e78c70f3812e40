"""What every request passes first and every answer last: names of this host, headers, and bugs.

Nothing here may be embedded, guessed at, kept or sent elsewhere by a browser, and nothing allows other
sites to read it: there is no CORS.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Callable, Iterable
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from experience_buffer import errors
from experience_buffer_server.rpc.boundary import explained
from experience_buffer_server.web.problems import problem
from experience_buffer_server.web.speaker import SPEAKER, Speaker

CONTENT_POLICY: Final = b"content-security-policy"
_DATA_POLICY: Final = b"default-src 'none'; frame-ancestors 'none'; sandbox"
_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_OPEN: Final = frozenset(("/health", "/metrics"))
"""Of these nobody reads an experience: machines ask for them under any name."""
_PRIVATE: Final = (
    *("localhost", "local", "internal", "lan", "home.arpa", "svc", "cluster.local", "test"),
)
"""Ends of names that no stranger can have: they aren't given away in public."""


class Front:
    """The outermost application. Belongs to the event loop.

    Args:
        app: What answers.
        names: Names of this host, beside those that nobody else can have; None: any will do, as
            where callers have to show a token, which another site's script hasn't.
        count: Called with each answer's route, status and seconds.
    """

    def __init__(
        self, app: ASGIApp, names: Iterable[str] | None, count: Callable[[str, str, float], None]
    ) -> None:
        self._app = app
        self._count = count
        self._names = None if names is None else {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        speaker: Speaker = scope["state"][SPEAKER]
        task = asyncio.current_task()
        assert task is not None
        speaker.answering(task)
        begun, code, started = False, "0", time.perf_counter()

        async def send_dressed(message: Message) -> None:
            nonlocal begun, code
            if message["type"] == "http.response.start":
                begun, code = True, str(message["status"])
                message = {**message, "headers": dressed(message["headers"])}
            await send(message)

        # What answers a GET answers a HEAD: the body is left out where it is written.
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            if (refusal := self._refusal(asked)) is not None:
                await problem(refusal)(asked, receive, send_dressed)
            else:
                await self._app(asked, receive, send_dressed)
        except asyncio.CancelledError:
            if not speaker.is_gone:
                raise
            task.uncancel()
        except Exception as error:
            failed = explained(scope["path"], error)
            if begun:
                speaker.transport.abort()
            else:
                await problem(failed)(scope, receive, send_dressed)
        finally:
            self._count(route_of(asked), code, time.perf_counter() - started)

    def _refusal(self, scope: Scope) -> errors.ExperienceBufferError | None:
        """Why a request may not be answered under the name that it came to."""
        if self._names is None or scope["path"] in _OPEN:
            return None
        host = Request(scope).headers.get("host", "")
        if is_ours(host, self._names):
            return None
        return errors.ForbiddenError(
            f"this server isn't known as {host[:100]!r}: ask it under its address or a name of its "
            "network, or add the name to server.http_names",
            subject="host",
        )


def route_of(scope: Scope) -> str:
    """Which route was asked for, of a bounded number: "none" for what isn't there."""
    if (route := scope.get("route")) is not None:
        return str(route.path)
    path = scope["path"]
    if path.startswith("/ui/"):
        return "/ui/"
    return path if path in ("/", "/ui", "/openapi.json") else "none"


def dressed(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of an answer with those that all have; its own policies win."""
    found = list(headers)
    names = {name.lower() for name, _ in found}
    found += [(name, value) for name, value in _HEADERS if name not in names]
    if CONTENT_POLICY not in names:
        found.append((CONTENT_POLICY, _DATA_POLICY))
    if b"cache-control" not in names:
        found.append((b"cache-control", b"no-store"))
    return found


def is_ours(host: str, names: Iterable[str]) -> bool:
    """Whether a Host header can only mean this server.

    A name that somebody else owns may lead here, too, and then a script of theirs would read what is
    here as if it were theirs (DNS rebinding). Nobody owns an address, a name without a dot, or one of
    a private network.
    """
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        port = port.removeprefix(":")
    else:
        name, _, port = host.partition(":")
    name = name.lower().removesuffix(".")
    if not name or not (port.isdecimal() or not port):
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        pass
    else:
        return True
    if "." not in name or name in names:
        return True
    return any(name.endswith(f".{end}") for end in _PRIVATE)


def names_of_this_host(configured: Iterable[str]) -> set[str]:
    """Those of the configuration, and the machine's own."""
    return {*configured, socket.gethostname()}
