"""The server process: wiring, start, clock, and an orderly end."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from wsgiref.simple_server import WSGIServer

import grpc
import prometheus_client
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from experience_buffer.v1 import service_pb2, service_pb2_grpc
from experience_buffer_server import __version__
from experience_buffer_server.backend import Backend
from experience_buffer_server.compute import Computer
from experience_buffer_server.config import ConfigurationError, ServerSection, Settings
from experience_buffer_server.gauges import Gauges
from experience_buffer_server.health import HealthServicer
from experience_buffer_server.interceptors import BoundaryInterceptor
from experience_buffer_server.interceptors.size import receive_limit
from experience_buffer_server.memory import calm_collector, loading
from experience_buffer_server.metrics import Metrics
from experience_buffer_server.registry import Registry
from experience_buffer_server.service import Service
from experience_buffer_server.stats import buffer_stats
from experience_buffer_server.store.lmdb_store import LmdbStore

_log = logging.getLogger(__name__)

SERVICE_NAME = service_pb2.DESCRIPTOR.services_by_name["ExperienceBuffer"].full_name
_HEALTH_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_TICK_SECONDS = 0.1


async def serve(settings: Settings) -> int:
    """Run the server until SIGTERM or SIGINT, then drain and stop.

    Args:
        settings: The configuration.

    Returns:
        The exit status: 0 after an orderly end, 1 when the server couldn't go on.

    Raises:
        ConfigurationError: The addresses can't be served as configured, an estimator of the
            operator's own can't be loaded, or a stored buffer uses one that isn't declared.
        StoreError: The store can't be opened.
    """
    server_settings = settings.server
    check_exposure(server_settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        store = await _open_store(settings, metrics)
        stack.push_async_callback(store.close)
        computer = Computer(
            settings.compute, settings.store.path, metrics, estimators=settings.estimators
        )
        computer.start()
        stack.push_async_callback(computer.close)
        if settings.estimators:
            await computer.check_estimators()
        registry = Registry(settings, store, computer, metrics)
        with loading():
            await registry.load()
        backend = Backend(registry, store, server_settings, asyncio.Event())
        metrics_port = _start_metrics(server_settings, metrics, registry, stack)
        server, port = await _start_grpc(backend, metrics)
        clock = loop.create_task(_tick(registry))
        calm_collector()
        address = f"{server_settings.host}:{port}"
        place = {"address": address, "metrics_port": metrics_port, "store": settings.store.path}
        _log.info("listening", extra=place | {"version": __version__})
        failed = await _wait(stop, store, clock)
        _log.info("draining")
        backend.draining.set()
        await server.stop(server_settings.shutdown_grace_seconds)
        clock.cancel()
        if not failed:
            await registry.drain()
    _log.info("stopped")
    return 1 if failed else 0


def check_exposure(settings: ServerSection) -> None:
    """Refuse to serve plain text to other machines unless told so.

    Raises:
        ConfigurationError: The host isn't loopback and `insecure` isn't set.
    """
    try:
        loopback = ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        loopback = settings.host == "localhost"
    if not loopback and not settings.insecure:
        raise ConfigurationError(
            f"server.host: {settings.host!r} is reachable from other machines in plain text; "
            "bind 127.0.0.1, or pass --insecure (server.insecure = true) on a trusted network"
        )


async def _open_store(settings: Settings, metrics: Metrics) -> LmdbStore:
    store = await LmdbStore.open(
        settings.store.path,
        durability=settings.store.durability,
        interval_seconds=settings.store.sync_interval_seconds,
        max_map_bytes=settings.store.max_map_bytes,
    )
    store.on_work = lambda work: metrics.written(
        num_transactions=work.num_transactions,
        num_batches=work.num_batches,
        seconds=work.apply_seconds + work.commit_seconds,
    )
    return store


async def _start_grpc(backend: Backend, metrics: Metrics) -> tuple[grpc.aio.Server, int]:
    settings = backend.limits
    server = grpc.aio.server(
        interceptors=[BoundaryInterceptor(metrics, max_message_bytes=settings.max_message_bytes)],
        options=[
            ("grpc.max_receive_message_length", receive_limit(settings.max_message_bytes)),
            ("grpc.max_send_message_length", settings.max_message_bytes),
            # Clients may ping idle streams; the default answers that with "too many pings".
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.so_reuseport", 0),
        ],
    )
    service_pb2_grpc.add_ExperienceBufferServicer_to_server(Service(backend), server)
    health_pb2_grpc.add_HealthServicer_to_server(
        HealthServicer((SERVICE_NAME,), backend.draining), server
    )
    if settings.reflection:
        names = (SERVICE_NAME, _HEALTH_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    address = f"{settings.host}:{settings.port}"
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigurationError(
            f"server.host, server.port: can't listen on {address}: the address must be one of "
            "this machine, and the port free"
        ) from error
    await server.start()
    return server, port


def _start_metrics(
    settings: ServerSection, metrics: Metrics, registry: Registry, stack: AsyncExitStack
) -> int:
    """Serve /metrics from a thread; returns its port, -1 when it is off."""
    metrics.registry.register(
        Gauges(
            lambda: [buffer_stats(buffer) for buffer in registry.all()],
            asyncio.get_running_loop(),
        )
    )
    if settings.metrics_port < 0:
        return -1
    http: WSGIServer
    thread: threading.Thread
    try:
        http, thread = prometheus_client.start_http_server(
            settings.metrics_port, settings.metrics_host, metrics.registry
        )
    except OSError as error:
        raise ConfigurationError(
            f"server.metrics_port: can't listen on {settings.metrics_host}:"
            f"{settings.metrics_port}: {error.strerror}"
        ) from error

    async def end() -> None:
        await asyncio.to_thread(http.shutdown)
        http.server_close()
        await asyncio.to_thread(thread.join)

    stack.push_async_callback(end)
    return http.server_port


async def _tick(registry: Registry) -> None:
    while True:
        await asyncio.sleep(_TICK_SECONDS)
        registry.tick(time.time())


async def _wait(stop: asyncio.Event, store: LmdbStore, clock: asyncio.Task[None]) -> bool:
    """Wait for the end; True when it came because the server can't go on."""
    loop = asyncio.get_running_loop()
    waits = [
        loop.create_task(_until(stop.wait)),
        loop.create_task(_until(store.failed.wait)),
    ]
    await asyncio.wait((*waits, clock), return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if store.failed.is_set():
        _log.critical("the store has failed; stopping: %s", store.failure)
        return True
    if clock.done():
        # Without it no lease expires and no deadline is met.
        _log.critical("the clock has stopped; stopping", exc_info=clock.exception())
        return True
    return False


async def _until(wait: Callable[[], Awaitable[object]]) -> object:
    return await wait()
