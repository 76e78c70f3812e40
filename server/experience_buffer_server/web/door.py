"""The door of the HTTP server: its port, who comes in, how many at once, and for how long.

When too many connections are open, the oldest that asks nothing is closed for the newest, and then the
oldest of all: slow and silent clients neither keep others out nor pile up. A connection takes the
server's certificates as they are when it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from typing import Any, Final, Protocol

from experience_buffer_server.access.tls import Certificates
from experience_buffer_server.settings.server import ConfigurationError

_log = logging.getLogger(__name__)
_BACKLOG: Final = 128
_MAX_CONNECTIONS: Final = 64
"""Of which streams have a part only; see `events`."""
_MAX_SECONDS: Final = 30.0
"""From a connection's beginning to its first answer, and from each answer to the next."""
_HANDSHAKE_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.1
"""After a connection that couldn't be accepted, as without a free descriptor."""


def listen(host: str, port: int) -> socket.socket:
    """Take the port; who connects meanwhile waits.

    Raises:
        ConfigurationError: It can't be had.
    """
    try:
        found: Any = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, _, _, place = found[0]
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            stack.pop_all()
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        cure = ", by another server perhaps; give another port (0: a free one, -1: no HTTP)"
        raise ConfigurationError(
            f"server.metrics_port: can't listen on {host}:{port}: {error.strerror}"
            f"{cure if is_taken else ''}"
        ) from error
    return listener


class Speaker(Protocol):
    """What speaks HTTP with one connection: an asyncio protocol."""

    transport: asyncio.Transport

    @property
    def is_answering(self) -> bool:
        """Whether a request has come that isn't answered yet."""


class Visit:
    """One connection, from its acceptance to its end. Belongs to the event loop."""

    def __init__(self, door: Door, connection: socket.socket) -> None:
        self.is_gone = False
        """Whether the client is, so that nobody waits for an answer."""
        self._door = door
        self._connection = connection
        self._opening: asyncio.Task[None] | None = None
        self._speaker: Speaker | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_stream = False

    @property
    def rank(self) -> int:
        """How much would be lost with it: 0 nothing, 1 an answer under way, 2 a stream."""
        if self._is_stream:
            return 2
        return int(self._speaker is not None and self._speaker.is_answering)

    def open(self) -> None:
        """Begin: shake hands where there is TLS, then listen to what is asked."""
        self.give_time(_MAX_SECONDS)
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        loop, certificates = asyncio.get_running_loop(), self._door.certificates
        speaker = self._door.speak(self)
        tls: dict[str, Any] = {}
        if certificates is not None:
            tls = {"ssl": certificates.context, "ssl_handshake_timeout": _HANDSHAKE_SECONDS}
        try:
            # It is a protocol, which this module can't say.
            made: Any = speaker
            await loop.connect_accepted_socket(lambda: made, self._connection, **tls)
        except OSError as error:
            # Clients that hang up, time out, or don't speak TLS are no concern of the server's.
            _log.debug("a connection failed: %s", error)
            self._connection.close()
            self.ended()
            return
        self._speaker = speaker

    def give_time(self, seconds: float) -> None:
        """End it after so many seconds from now, unless it gets others."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.is_gone:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.hang_up)

    def stream(self) -> None:
        """Let it last: its answer has no end of its own."""
        self._is_stream = True
        if self._timer is not None:
            self._timer.cancel()

    def hang_up(self) -> None:
        """End it at once, whatever is under way."""
        if self._speaker is not None:
            self._speaker.transport.abort()
        elif self._opening is not None:
            self._opening.cancel()
            self._connection.close()
        self.ended()

    def ended(self) -> None:
        """It is over. Idempotent."""
        self.is_gone = True
        if self._timer is not None:
            self._timer.cancel()
        self._door.left(self)


class Door:
    """Accepts connections. Belongs to the event loop.

    Args:
        listener: From `listen`.
        certificates: None: plain text.
        speak: Makes what speaks HTTP with one connection.
        most: Connections at once.
    """

    def __init__(
        self,
        listener: socket.socket,
        certificates: Certificates | None,
        speak: Callable[[Visit], Speaker],
        *,
        most: int = _MAX_CONNECTIONS,
    ) -> None:
        self.certificates = certificates
        self.speak = speak
        self._listener = listener
        self._most = most
        self._visits: dict[Visit, None] = {}
        """The oldest first."""

    @property
    def num_visits(self) -> int:
        """Connections that are open, those that shake hands included."""
        return len(self._visits)

    async def accept(self) -> None:
        """Let connections in until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                _log.debug("a connection couldn't be accepted: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if len(self._visits) >= self._most:
                min(self._visits, key=lambda visit: visit.rank).hang_up()
            visit = Visit(self, connection)
            self._visits[visit] = None
            visit.open()

    def close(self) -> None:
        """Stop listening and end all connections."""
        self._listener.close()
        for visit in tuple(self._visits):
            visit.hang_up()

    def left(self, visit: Visit) -> None:
        """A connection has ended."""
        self._visits.pop(visit, None)
