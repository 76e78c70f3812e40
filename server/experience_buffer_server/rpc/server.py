"""The gRPC server: its services, limits, credentials and address."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from experience_buffer.v1 import service_pb2, service_pb2_grpc
from experience_buffer_server.access.entrance import UNIX_SCHEME, target
from experience_buffer_server.access.guard import Guard
from experience_buffer_server.access.tls import Certificates
from experience_buffer_server.rpc.boundary import BoundaryInterceptor
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.rpc.health import HealthServicer
from experience_buffer_server.rpc.push_codec import read_push, read_push_stream
from experience_buffer_server.rpc.service import Service
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.settings.server import ConfigurationError, ServerSection

SERVICE_NAME = service_pb2.DESCRIPTOR.services_by_name["ExperienceBuffer"].full_name
_HEALTH_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_MAX_METADATA_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Listening:
    """A server that has started."""

    server: grpc.aio.Server
    address: str
    """Where it listens, with the port that it got."""
    credentials: grpc.ServerCredentials | None
    """Held here because gRPC doesn't hold them."""


async def start(
    backend: Backend,
    service: Service,
    metrics: Metrics,
    guard: Guard,
    certificates: Certificates | None,
) -> Listening:
    """Start a server.

    Without certificates it speaks plain text.

    Raises:
        ConfigurationError: It can't listen on the configured address.
    """
    settings = backend.limits
    most = settings.max_push_items
    server = grpc.aio.server(
        interceptors=[
            BoundaryInterceptor(
                metrics,
                guard,
                backend.quotas,
                max_message_bytes=settings.max_message_bytes,
                readers={
                    f"/{SERVICE_NAME}/Push": partial(read_push, max_payloads=most),
                    f"/{SERVICE_NAME}/PushStream": partial(read_push_stream, max_payloads=most),
                },
            )
        ],
        maximum_concurrent_rpcs=settings.max_calls,
        options=[
            # What exceeds the limit by less is explained by the boundary.
            ("grpc.max_receive_message_length", 2 * settings.max_message_bytes),
            ("grpc.max_send_message_length", settings.max_message_bytes),
            ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
            # Clients may ping idle streams; the default answers that with "too many pings".
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.so_reuseport", 0),
            *_silence(settings),
        ],
    )
    service_pb2_grpc.add_ExperienceBufferServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(
        HealthServicer((SERVICE_NAME,), backend.draining), server
    )
    if settings.reflection:
        names = (SERVICE_NAME, _HEALTH_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    address = target(settings.host, settings.port)
    credentials = None if certificates is None else certificates.credentials()
    try:
        port = (
            server.add_insecure_port(address)
            if credentials is None
            else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise ConfigurationError(
            f"server.host, server.port: can't listen on {address}: the address must be one of "
            "this machine, and the port free, which it isn't where another server runs; port 0 is "
            "a free one"
        ) from error
    await server.start()
    if not settings.host.startswith(UNIX_SCHEME):
        address = target(settings.host, port)
    backend.address = address
    return Listening(server, address, credentials)


def _silence(settings: ServerSection) -> list[tuple[str, int]]:
    """How peers are found that are gone without a word, or never said one.

    A machine that loses its power closes no connection: without this its streams, and the leases on
    them, would stay until their leases expire, and its connections for hours.
    """
    timeout_ms = int(1000 * settings.keepalive_timeout_seconds)
    found = [("grpc.server_handshake_timeout_ms", timeout_ms)]
    if settings.keepalive_seconds:
        found += [
            ("grpc.keepalive_time_ms", int(1000 * settings.keepalive_seconds)),
            ("grpc.keepalive_timeout_ms", timeout_ms),
            # An unanswered ping has a timeout of its own, a minute unless told otherwise.
            ("grpc.http2.ping_timeout_ms", timeout_ms),
            # A stream that waits for hours sends nothing between the questions.
            ("grpc.http2.max_pings_without_data", 0),
        ]
    return found
