"""A web server over a world of the test's own, and a plain HTTP client that asks it."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import make_wsgi_app

from experience_buffer_server.access.audit import Audit
from experience_buffer_server.access.grants import Grants
from experience_buffer_server.access.guard import Guard
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.rpc.health import Pulse
from experience_buffer_server.rpc.service import Service
from experience_buffer_server.web.door import listen
from experience_buffer_server.web.served import Served
from experience_buffer_server.web.server import WebServer

SECONDS = 20.0


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    """By their names in lower case."""
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def data(self) -> Any:
        """The JSON that it holds."""
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.data["error"]


@dataclass
class Asking:
    """A server and how to ask it."""

    server: WebServer
    served: Served
    port: int
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Method and reason of each refused call."""

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.ask("GET", path, None, **headers)

    async def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> Answer:
        """Ask on a connection of its own, from a thread."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return await asyncio.to_thread(ask, self.port, method, path, body, given)


def ask(
    port: int,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, found, answer.read())
    finally:
        connection.close()


@asynccontextmanager
async def asking(
    backend: Backend,
    *,
    grants: Grants | None = None,
    prepare: Callable[[Served], Served] = lambda served: served,
) -> AsyncIterator[Asking]:
    """Serve a backend over HTTP.

    Args:
        backend: From `World.backend`.
        grants: None: everybody may everything.
        prepare: Changes what is served.
    """
    refused: list[tuple[str, str]] = []
    guard = Guard(
        grants,
        Audit(time.monotonic),
        shows_certificates=False,
        count=lambda method, reason: refused.append((method, reason)),
    )
    pulse = Pulse(backend.draining)
    pulse.has_begun = True
    served = prepare(
        Served(
            backend=backend,
            service=Service(backend),
            guard=guard,
            pulse=pulse,
            metrics=make_wsgi_app(backend.registry.metrics.registry),
            address="127.0.0.1:50051",
            is_secure=False,
        )
    )
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = WebServer(listener, served, None)
    server.start()
    try:
        yield Asking(server, served, port, refused)
    finally:
        await server.close()
        listener.close()
