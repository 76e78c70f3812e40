"""Real servers for the tests, always ended, with their logs in the report of a failed test."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from experience_buffer import Client
from tests.integration.server import MakeServer, Server, Stub, serving

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that neither stop nor configure it; each uses its own buffer."""
    with serving(Server(tmp_path_factory.mktemp("shared"), compiled_reader=True)) as server:
        yield server


@pytest.fixture
def stub(shared_server: Server) -> Iterator[Stub]:
    """A plain stub of the shared server."""
    with shared_server.stub() as plain:
        yield plain


@pytest.fixture
def client(shared_server: Server) -> Iterator[Client]:
    """A client of the shared server."""
    with Client(shared_server.address) as connected:
        yield connected


@pytest.fixture
def name() -> str:
    """A buffer name that no other test uses."""
    return f"buffer-{next(_NUMBERS)}"


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    """Makes and starts servers of the test's own; takes the options of `Server`."""
    made: list[Server] = []

    def make(**options: Any) -> Server:
        made.append(Server(tmp_path / f"server-{len(made)}", **options))
        return made[-1].start()

    yield make
    for server in made:
        server.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the logs of running servers to the report of a failed test."""
    report = yield
    if report.failed:
        for server in Server.running:
            report.sections.append((f"log of the server at {server.address}", server.tail()))
    return report
