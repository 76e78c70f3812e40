"""The server process: wiring, start, clock, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from prometheus_client import make_wsgi_app

from experience_buffer_server import __version__
from experience_buffer_server.access.entrance import Entrance, check_exposure
from experience_buffer_server.access.tls import Certificates
from experience_buffer_server.archive.archivist import Archivist
from experience_buffer_server.buffer.compute.scheduler import Computer
from experience_buffer_server.buffer.gauges import Gauges
from experience_buffer_server.buffer.intake.compiled.loading import Loading
from experience_buffer_server.buffer.learning_gauges import Watch
from experience_buffer_server.buffer.registry import Registry
from experience_buffer_server.rpc import server
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.rpc.health import Pulse
from experience_buffer_server.rpc.service import Service
from experience_buffer_server.runtime import clock as steady_clock
from experience_buffer_server.runtime.memory import calm_collector, loading
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.runtime.tuning import TUNING, measured_speed
from experience_buffer_server.settings.server import ServerSection, Settings
from experience_buffer_server.store.engines import open_store, snapshots_of
from experience_buffer_server.store.interface import Store
from experience_buffer_server.web.door import listen
from experience_buffer_server.web.inside.texts import Texts
from experience_buffer_server.web.served import Served

if TYPE_CHECKING:
    from experience_buffer_server.web.server import WebServer

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.1


async def serve(settings: Settings) -> int:
    """Run the server until SIGTERM or SIGINT, then drain and stop.

    Args:
        settings: The configuration.

    Returns:
        The exit status: 0 after an orderly end, 1 when the server couldn't go on.

    Raises:
        ConfigurationError: The addresses can't be served as configured, an estimator of the
            operator's own or the tokenizer can't be loaded, there is no such device as configured,
            or a stored buffer uses an estimator that isn't declared.
        StoreError: The store can't be opened.
    """
    server_settings = settings.server
    check_exposure(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    TUNING.fit(measured_speed())
    metrics = Metrics()
    entrance = Entrance(settings, metrics)
    async with AsyncExitStack() as stack:
        store = await open_store(settings.store, metrics)
        stack.push_async_callback(store.close)
        computer = Computer(
            settings.compute,
            store.reader_spec,
            metrics,
            payloads=None if store.reader_spec else store.payloads,
            estimators=settings.estimators,
        )
        computer.start()
        stack.push_async_callback(computer.close)
        if settings.estimators or settings.compute.names_a_device:
            await computer.check()
        archivist = Archivist(
            None if settings.store.memory else settings.store.path / "archive", store.reader_spec
        )
        registry = Registry(settings, store, computer, metrics, archivist)
        reader_loading = Loading(registry.payloads)
        stack.push_async_callback(reader_loading.close)
        with loading():
            if server_settings.compiled_reader:
                await reader_loading.start()
            await registry.load()
        archivist.start()
        stack.push_async_callback(archivist.close)
        snapshots = snapshots_of(settings, metrics)
        if snapshots is not None:
            stack.push_async_callback(snapshots.close)
            await snapshots.start()
        backend = Backend(registry, store, server_settings, asyncio.Event(), snapshots)
        pulse = Pulse(backend.draining)
        watch = Watch()
        metrics.registry.register(
            Gauges(
                lambda: [buffer.stats() for buffer in registry.all()],
                loop,
                lambda: [watch.look(buffer) for buffer in registry.all()],
            )
        )
        listener = _take_port(server_settings, stack)
        texts = None
        if listener is not None and server_settings.tokenizer is not None:
            texts = await asyncio.to_thread(Texts, server_settings.tokenizer)
        service = Service(backend)
        listening = await server.start(
            backend, service, metrics, entrance.guard, entrance.certificates
        )
        pulse.has_begun = True
        if listener is not None:
            served = Served(
                backend=backend,
                service=service,
                guard=entrance.guard,
                pulse=pulse,
                metrics=make_wsgi_app(metrics.registry),
                address=listening.address,
                is_secure=entrance.certificates is not None,
                texts=texts,
            )
            # A third of a second, mostly of importing: meanwhile workers and trainers are served.
            web = await asyncio.to_thread(_make_web, listener, served, entrance.certificates)
            stack.push_async_callback(web.close)
            web.start()
        if settings.compute.start_early:
            computer.warm_up()
        clock = loop.create_task(_tick(backend))
        following = loop.create_task(entrance.follow())
        calm_collector()
        place = {
            "address": listening.address,
            "metrics_port": -1 if listener is None else listener.getsockname()[1],
            "store": store.place,
        }
        _log.info("listening", extra=place | {"version": __version__})
        failed = await _wait(stop, store, (clock, following))
        _log.info("draining")
        backend.draining.set()
        if snapshots is not None:
            await snapshots.close()
        await listening.server.stop(server_settings.shutdown_grace_seconds)
        clock.cancel()
        following.cancel()
        if not failed:
            await registry.drain()
    if not failed and store.failure is not None:
        _log.critical("the store has failed at the end: %s", store.failure)
        failed = True
    _log.info("stopped")
    return 1 if failed else 0


def _take_port(settings: ServerSection, stack: AsyncExitStack) -> socket.socket | None:
    """The port of the HTTP server, whose clients wait until it answers; None where it is off.

    Raises:
        ConfigurationError: It can't be had.
    """
    if settings.metrics_port < 0:
        return None
    listener = listen(settings.metrics_host, settings.metrics_port)
    stack.callback(listener.close)
    return listener


def _make_web(
    listener: socket.socket, served: Served, certificates: Certificates | None
) -> WebServer:
    from experience_buffer_server.web.server import WebServer

    return WebServer(listener, served, certificates)


async def _tick(backend: Backend) -> None:
    while True:
        await asyncio.sleep(_TICK_SECONDS)
        now = steady_clock.now()
        backend.registry.tick(now)
        backend.fullness.look(now)


async def _wait(stop: asyncio.Event, store: Store, clocks: Sequence[asyncio.Task[None]]) -> bool:
    """Wait for the end; True when it came because the server can't go on."""
    loop = asyncio.get_running_loop()
    waits = [loop.create_task(stop.wait()), loop.create_task(store.failed.wait())]
    await asyncio.wait((*waits, *clocks), return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if store.failed.is_set():
        _log.critical("the store has failed; stopping: %s", store.failure)
        return True
    for clock in clocks:
        if clock.done():
            # Without it no lease or grant expires and no deadline is met.
            _log.critical("the clock has stopped; stopping", exc_info=clock.exception())
            return True
    return False
