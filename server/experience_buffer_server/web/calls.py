"""One request as a call of the service: the same handlers, the same rules of access, the same limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from experience_buffer._messages.calls import Call as UnaryCall
from experience_buffer.v1 import service_pb2
from experience_buffer_server.access.calls import GuardedCall
from experience_buffer_server.access.guard import Guard
from experience_buffer_server.runtime.callers import caller_of
from experience_buffer_server.runtime.quotas import Quotas
from experience_buffer_server.web.answers import json_answer
from experience_buffer_server.web.served import Served
from experience_buffer_server.web.speaker import SPEAKER, Speaker

SERVICE: Final = service_pb2.DESCRIPTOR.services_by_name["ExperienceBuffer"].full_name
METRICS: Final = "/metrics"
_FEW_BYTES: Final = 4096
"""Of a response that takes less than a millisecond to become JSON."""
_SECONDS: Final = 25.0
"""Less than `speaker` gives a connection for its next answer."""
T = TypeVar("T")


class Call:
    """One call of the service that a request makes. Belongs to its task.

    It is to the service what gRPC's context is: who calls, how long there is, and when it is over.
    """

    def __init__(self, served: Served, guarded: GuardedCall, request: Request) -> None:
        self._service = served.service
        self._threads = served.lookers
        self._guarded = guarded
        self._request = request
        self._speaker: Speaker = getattr(request.state, SPEAKER)
        self._endings: list[Callable[[Any], None]] = []

    @contextlib.contextmanager
    def entered(self, quotas: Quotas) -> Iterator[Call]:
        """Say who calls and take a place among the calls under way, for as long as the block takes.

        Raises:
            UnauthenticatedError: Nobody that is known.
            ForbiddenError: The caller may not make this call.
            ResourceExhaustedError: The caller has too many calls under way.
        """
        # It asks of a context no more than this class has.
        context: Any = self
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            stack.enter_context(self._guarded.entered(context))
            stack.enter_context(quotas.calls.within(caller_of()))
            yield self

    async def ask(self, asked: UnaryCall[Any]) -> Any:
        """Make a call of the service; its response as it is.

        Args:
            asked: As the client says it.

        Raises:
            ExperienceBufferError: As the method does; or the caller may not make it.
        """
        method = getattr(self._service, asked.method)
        return await method(self._guarded.check(asked.request), self)

    async def answer(
        self, asked: UnaryCall[T], plain: Callable[[T], Any] | None = None
    ) -> Response:
        """Make a call of the service, and JSON of what the client makes of its response.

        Args:
            asked: As the client says it.
            plain: Makes plain data of the value, maybe in a thread; None: as it says itself.

        Raises:
            ExperienceBufferError: As `ask` does, and `plain`.
        """
        message = await self.ask(asked)
        size = len(message) if isinstance(message, bytes) else message.ByteSize()

        def make() -> Response:
            value: Any = asked.parse(message)
            return json_answer(value.to_dict() if plain is None else plain(value))

        return await self.aside(make, size)

    async def aside(self, make: Callable[[], T], num_bytes: int) -> T:
        """Make something of so many bytes: in a thread if there are many, so that nobody waits for it.

        Raises:
            ExperienceBufferError: As `make` does.
        """
        if num_bytes <= _FEW_BYTES:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._threads, make)

    def give_time(self, seconds: float) -> None:
        """Allow for an answer that takes so long to send, beside what every answer may take."""
        self._speaker.give_time(seconds)

    def peer(self) -> str:
        """Where it calls from, as gRPC names it."""
        client = self._request.client
        if client is None:
            return "unix:"
        if ":" in client.host:
            return f"ipv6:{quote(f'[{client.host}]', safe='')}:{client.port}"
        return f"ipv4:{client.host}:{client.port}"

    def auth_context(self) -> dict[str, list[bytes]]:
        """The names in the client's verified certificate."""
        return self._speaker.auth_context()

    def time_remaining(self) -> float | None:
        """Seconds until the answer has to be there: a connection is given that long."""
        return _SECONDS

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Have something called when the answer has left, or never will."""
        self._endings.append(callback)

    def cancelled(self) -> bool:
        """Whether the client has gone."""
        return self._speaker.transport.is_closing()

    def _end(self) -> None:
        endings, self._endings = self._endings, []
        for ending in endings:
            ending(self)


def guarded(guard: Guard, method: str, request: Request) -> GuardedCall:
    """The call of a method, or of `METRICS`, as the rules of access know it."""
    name = method if method.startswith("/") else f"/{SERVICE}/{method}"
    values = request.headers.getlist("authorization")
    return GuardedCall(guard, name, [("authorization", value) for value in values])
