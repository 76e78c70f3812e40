"""One browser and one server with training in it per file: both take seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from experience_buffer import Client
from tests.integration.page import world
from tests.integration.page.browser import Browser, browsing
from tests.integration.server import Server, eventually, serving


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that looks at nothing yet."""
    with browsing(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def trained(window: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in which there is training, open groups, an open lease, and what somebody hostile pushed."""
    folder = tmp_path_factory.mktemp("trained")
    with serving(Server(folder, toml=world.settings(folder), compiled_reader=True)) as server:
        with Client(server.address) as client:
            world.fill(client)
        with Client(server.address) as client, world.waiting(server.address):
            eventually(
                lambda: client.get_stats(world.MATH).buffers[0].consumers[0].num_waiting,
                "a trainer that waits",
            )
            yield server


@pytest.fixture
def browser(window: Browser, trained: Server) -> Browser:
    """A browser before the page of that server; what it complained of before is forgotten."""
    window.base = f"http://127.0.0.1:{trained.metrics_port}/ui/"
    window.complaints()
    window.asked()
    return window
