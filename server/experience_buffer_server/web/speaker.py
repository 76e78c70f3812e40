"""What speaks HTTP/1.1 with one connection: uvicorn's protocol, and what this server adds to it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any, Final

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from experience_buffer_server.access.calls import COMMON_NAME, OTHER_NAMES
from experience_buffer_server.web.door import Visit

VISIT: Final = "visit"
SPEAKER: Final = "speaker"
"""Keys of a scope's state."""
_NEXT_SECONDS: Final = 30.0


class Speaker(H11Protocol):
    """One connection's protocol. Belongs to the event loop."""

    def __init__(self, config: Config, server_state: ServerState, visit: Visit) -> None:
        super().__init__(config, server_state, {VISIT: visit, SPEAKER: self})
        self._visit = visit
        self._answering: asyncio.Task[Any] | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the client is, so that nobody waits for an answer."""
        return self._visit.is_gone

    @property
    def is_answering(self) -> bool:
        """Whether a request has come that isn't answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def give_time(self, seconds: float) -> None:
        """Allow for an answer that takes so long to send, beside what every answer may take."""
        self._visit.give_time(_NEXT_SECONDS + seconds)

    def stream(self) -> None:
        """Let the connection last: its answer has no end of its own."""
        self._visit.stream()

    def answering(self, task: asyncio.Task[Any]) -> None:
        """A task answers a request: it ends when the client goes."""
        self._answering = task
        task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[Any]) -> None:
        if self._answering is task:
            self._answering = None

    def on_response_complete(self) -> None:
        """An answer has left: the connection has time for the next request."""
        self._visit.give_time(_NEXT_SECONDS)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, or was shown out."""
        self._visit.ended()
        super().connection_lost(exc)
        if self._answering is not None:
            self._answering.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in a line of text."""
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"x-content-type-options", b"nosniff"),
            (b"connection", b"close"),
        ]
        text = (
            "This isn't HTTP/1.1 as it is spoken here: a line or header is malformed or too long.\n"
        )
        with contextlib.suppress(h11.LocalProtocolError):  # An answer is under way.
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=text.encode()),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def auth_context(self) -> dict[str, list[bytes]]:
        """The names in the client's verified certificate, as gRPC has them."""
        tls: ssl.SSLObject | None = self.transport.get_extra_info("ssl_object")
        shown: Any = (tls.getpeercert() if tls is not None else None) or {}
        subject = [pair for part in shown.get("subject", ()) for pair in part]
        return {
            COMMON_NAME: [value.encode() for key, value in subject if key == "commonName"],
            OTHER_NAMES: [str(value).encode() for _, value in shown.get("subjectAltName", ())],
        }
