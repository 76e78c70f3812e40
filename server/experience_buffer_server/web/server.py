"""The HTTP server: a task on the server's own event loop, from its port to its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator
from typing import Final

import uvicorn

from experience_buffer_server.access.tls import Certificates
from experience_buffer_server.web.application import make_application
from experience_buffer_server.web.door import Door, Visit
from experience_buffer_server.web.served import Served
from experience_buffer_server.web.speaker import Speaker

_MAX_HEADER_BYTES: Final = 32 * 1024
"""Of a request's line and headers: browsers send the cookies of all servers of a host to each."""
_KEEP_ALIVE_SECONDS: Final = 15
"""A page that is looked at asks again within them."""


class _Uvicorn(uvicorn.Server):
    """The server's signals are its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class WebServer:
    """Serves HTTP until it is closed. Belongs to the event loop.

    Args:
        listener: The port, from `door.listen`.
        served: What is shown.
        certificates: None: plain text.
    """

    def __init__(
        self, listener: socket.socket, served: Served, certificates: Certificates | None
    ) -> None:
        # What callers do wrong is no news; a defect is logged where it is caught.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            make_application(served),
            http=Speaker,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            headers=[("server", "experience-buffer")],
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        config.load()
        self._served = served
        self._server = _Uvicorn(config)
        self._door = Door(listener, certificates, self._speak)
        self._tasks: list[asyncio.Task[None]] = []

    def _speak(self, visit: Visit) -> Speaker:
        return Speaker(self._server.config, self._server.server_state, visit)

    def start(self) -> None:
        """Begin to answer; who has connected before is answered, too."""
        loop = asyncio.get_running_loop()
        # It listens nowhere: connections come through the door.
        self._tasks = [
            loop.create_task(self._server.serve(sockets=[])),
            loop.create_task(self._door.accept()),
        ]

    async def close(self) -> None:
        """Stop listening and end all connections, whatever is under way."""
        self._server.should_exit = True
        self._tasks[1].cancel()
        self._door.close()
        await asyncio.wait(self._tasks)
        for threads in (self._served.renderers, self._served.lookers):
            threads.shutdown(wait=False, cancel_futures=True)
