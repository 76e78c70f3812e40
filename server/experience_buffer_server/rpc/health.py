"""grpc.health.v1: serving until the server drains.

Not the servicer of grpcio-health-checking: its watches would outlast the drain and cost every stop
the whole grace period.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2

from experience_buffer import errors

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

_MAX_NAME = 100
"""Characters of a name, in a message."""
_Response = health_pb2.HealthCheckResponse
_PULSE_SECONDS = 3.0
"""How long a turn of the event loop may take; one that hangs for ever answers nobody."""


class Pulse:
    """Whether the server serves. Belongs to the event loop, which does all the work."""

    def __init__(self, draining: asyncio.Event) -> None:
        self.has_begun = False
        """Set once the server listens."""
        self._draining = draining

    async def is_serving(self) -> bool:
        """Whether it does; takes a turn of the event loop.

        Raises:
            TimeoutError: The turn took so long that callers would have given up.
        """
        asked = time.monotonic()
        await asyncio.sleep(0)
        if time.monotonic() - asked > _PULSE_SECONDS:
            raise TimeoutError
        return self.has_begun and not self._draining.is_set()


class HealthServicer:
    """Answers for the server (the empty name) and for its services."""

    def __init__(self, services: Collection[str], draining: asyncio.Event) -> None:
        self._services = frozenset(("", *services))
        self._draining = draining

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Any:
        """The status now.

        Raises:
            NotFoundError: There is no such service.
        """
        if request.service not in self._services:
            raise errors.NotFoundError(
                f"no service {request.service[:_MAX_NAME]!r} is served here; the empty name stands "
                "for the server"
            )
        return self._status()

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> Any:
        """The status of every service."""
        statuses = dict.fromkeys(sorted(self._services), self._status())
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[Any]:
        """The status now and when the server drains; then the stream ends."""
        is_known = request.service in self._services
        del request  # The stream may last for days.
        yield self._status() if is_known else _Response(status=_Response.SERVICE_UNKNOWN)
        if not self._draining.is_set():
            await self._draining.wait()
            if is_known:
                yield self._status()

    def _status(self) -> Any:
        draining = self._draining.is_set()
        return _Response(status=_Response.NOT_SERVING if draining else _Response.SERVING)
