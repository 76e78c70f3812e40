"""The metrics endpoint: HTTP for Prometheus, under the same rules of access as the gRPC service.

It also answers health checks of those who speak no gRPC.

Each connection has a thread, one request and a bounded time; when too many are open, the oldest is
closed for the newest, so that slow or silent clients neither block a scrape nor pile up threads.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import choose_encoder

from experience_buffer import errors
from experience_buffer_server.access.audit import Event
from experience_buffer_server.access.calls import COMMON_NAME, OTHER_NAMES, names_of
from experience_buffer_server.access.grants import digest_of
from experience_buffer_server.access.guard import Guard, RefusedError, token_of, wrong_role
from experience_buffer_server.access.policy import METRICS
from experience_buffer_server.access.tls import Certificates
from experience_buffer_server.settings.server import ConfigurationError

_log = logging.getLogger(__name__)
_MAX_CONNECTIONS = 32
_MAX_SECONDS = 30.0
"""From a connection's beginning to its end."""
_LOOK_SECONDS = 0.5
_SHOWN_CHARS = 80
_METHOD = "metrics"
_HEALTH = "/health"
_PLAIN = [("Content-Type", "text/plain; charset=utf-8")]


class MetricsServer(ThreadingMixIn, TCPServer):
    """Serves the metrics from threads of its own. Not thread-safe.

    Args:
        registry: What is shown.
        guard: Who may see it.
        is_serving: Whether the server serves, for whoever asks; a TimeoutError: it is stuck.
        certificates: None: plain text.

    Raises:
        ConfigurationError: It can't listen there.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        guard: Guard,
        is_serving: Callable[[], bool],
        certificates: Certificates | None,
    ) -> None:
        self._certificates = certificates
        self._lock = threading.Lock()
        self._open: OrderedDict[socket.socket, float] = OrderedDict()
        """Connections and when they have to end, oldest first."""
        given = {
            "app": make_wsgi_app(registry),
            "guard": guard,
            "is_serving": staticmethod(is_serving),
        }
        handler = type("Handler", (_Handler,), given)
        try:
            found: Any = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            self.address_family, _, _, _, place = found[0]
            super().__init__(place, handler)
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            cure = ", by another server perhaps; give another port (0: a free one, -1: no metrics)"
            raise ConfigurationError(
                f"server.metrics_port: can't listen on {host}:{port}: {error.strerror}"
                f"{cure if is_taken else ''}"
            ) from error
        self.port: int = self.server_address[1]
        self._serving = threading.Thread(
            target=self.serve_forever, args=(_LOOK_SECONDS,), name="metrics", daemon=True
        )
        self._serving.start()

    def close(self) -> None:
        """Stop listening and end all connections. Blocks for a moment."""
        with contextlib.suppress(OSError):
            # Wakes the thread, which would look up from its wait twice a second only.
            self.socket.shutdown(socket.SHUT_RDWR)
        self.shutdown()
        self.server_close()
        self._end_connections(math.inf)
        self._serving.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hand a connection to a thread, in place of the oldest if there are too many."""
        with self._lock:
            if len(self._open) >= 2 * _MAX_CONNECTIONS:
                # Threads that were told to end haven't yet.
                self.shutdown_request(request)
                return
            self._open[request] = time.monotonic() + _MAX_SECONDS
            excess = len(self._open) - _MAX_CONNECTIONS
            for oldest in list(self._open)[: max(excess, 0)]:
                _hang_up(oldest)
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, in its thread; a handshake of TLS first."""
        try:
            request.settimeout(_MAX_SECONDS)
            if self._certificates is None:
                super().finish_request(request, client_address)
                return
            context = self._certificates.context
            with context.wrap_socket(request.dup(), server_side=True) as secured:
                super().finish_request(secured, client_address)
        except OSError as error:
            # Clients that hang up, time out, or don't speak TLS are no concern of the server's.
            _log.debug("metrics: a connection from %s failed: %s", client_address, error)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def service_actions(self) -> None:
        """End the connections whose time is over; called twice a second."""
        self._end_connections(time.monotonic())

    def _end_connections(self, now: float) -> None:
        with self._lock:
            for request, end in self._open.items():
                if end <= now:
                    _hang_up(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what a handler raised."""
        _log.exception("metrics: a request from %s failed", client_address)


class _Handler(BaseHTTPRequestHandler):
    app: Callable[[dict[str, Any], Callable[[str, list[tuple[str, str]]], None]], Iterable[bytes]]
    guard: Guard
    is_serving: Callable[[], bool]
    timeout = _MAX_SECONDS

    def do_GET(self) -> None:
        """Answer with the state of health, or with the metrics, to those who may see them."""
        path, _, query = self.path.partition("?")
        if path == _HEALTH:
            self._tell_health()
            return
        if self.guard.grants is not None:
            try:
                self._authorize()
            except RefusedError as refused:
                self._refuse(refused)
                return
        accepted = self.headers.get("Accept", "")
        try:
            choose_encoder(accepted)
        except (TypeError, ValueError):
            text = f"Accept {accepted[:_SHOWN_CHARS]!a}: a version must be numbers with dots\n"
            self._answer(400, _PLAIN, text.encode())
            return
        environ = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "HTTP_ACCEPT": accepted,
            "HTTP_ACCEPT_ENCODING": self.headers.get("Accept-Encoding", ""),
        }
        begun: list[tuple[str, list[tuple[str, str]]]] = []
        try:
            body = b"".join(type(self).app(environ, lambda *answer: begun.append(answer)))
        except TimeoutError as error:
            _log.error("metrics: the server was too busy to be read: %s", error)
            self._answer(503, _PLAIN, b"the server is too busy; scrape again later\n")
            return
        status, headers = begun[0]
        self._answer(int(status.split()[0]), headers, body)

    def _tell_health(self) -> None:
        """As grpc.health.v1 does: to everybody, and nothing else."""
        try:
            state = "SERVING" if self.is_serving() else "NOT_SERVING"
        except TimeoutError:
            state = "NOT_SERVING: the server is too busy to answer"
        self._answer(200 if state == "SERVING" else 503, _PLAIN, f"{state}\n".encode())

    def _authorize(self) -> None:
        values = self.headers.get_all("Authorization", [])
        token = token_of([("authorization", value) for value in values])
        names = _shown(self.request) if self.guard.shows_certificates else ()
        identity = self.guard.identify(None if token is None else digest_of(token), names)
        if identity.roles.isdisjoint(METRICS.roles):
            raise wrong_role(identity, METRICS, _METHOD)

    def _refuse(self, refused: RefusedError) -> None:
        host = str(self.client_address[0])
        self.guard.report(
            refused,
            Event(
                who=refused.who or host,
                peer=str(self.client_address),
                method=_METHOD,
                is_known=bool(refused.who),
            ),
        )
        is_unknown = isinstance(refused.error, errors.UnauthenticatedError)
        ask = [("WWW-Authenticate", "Bearer")] if is_unknown else []
        self._answer(401 if is_unknown else 403, _PLAIN + ask, f"{refused}\n".encode())

    def _answer(self, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        for key, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: scrapes are no news."""

    def version_string(self) -> str:
        """No versions for those who only knock."""
        return "experience-buffer"


def _shown(request: ssl.SSLSocket) -> tuple[str, ...]:
    """The names in a client's verified certificate."""
    shown: Any = request.getpeercert() or {}
    subject = [pair for part in shown.get("subject", ()) for pair in part]
    return names_of(
        {
            COMMON_NAME: [value.encode() for key, value in subject if key == "commonName"],
            OTHER_NAMES: [str(value).encode() for _, value in shown.get("subjectAltName", ())],
        }
    )


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
