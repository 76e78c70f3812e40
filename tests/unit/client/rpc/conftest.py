"""Clients of either kind, connected to a scripted server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import pytest

from experience_buffer import Client
from experience_buffer.v1 import service_pb2_grpc
from tests.unit.client.rpc.pushed import FAST
from tests.unit.client.rpc.scripted_server import ScriptedServer


@pytest.fixture
def server() -> Iterator[tuple[ScriptedServer, str]]:
    """A running scripted server and its address."""
    script = ScriptedServer()
    running = grpc.server(ThreadPoolExecutor(16))
    service_pb2_grpc.add_ExperienceBufferServicer_to_server(script, running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield script, f"127.0.0.1:{port}"
    running.stop(None).wait()


@pytest.fixture
def script(server: tuple[ScriptedServer, str]) -> ScriptedServer:
    """What the server does and has been asked."""
    return server[0]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for calls that wait."""
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def connected(server: tuple[ScriptedServer, str], connect: Any) -> Any:
    """Makes a client of the server, of either kind; see `connect`."""
    return partial(connect, server[1])


@pytest.fixture
def buffer(connected: Any) -> Iterator[Client]:
    """One that tries again soon."""
    with connected(token="secret", options=FAST) as client:
        yield client
