"""What the page shows where it can't show what was asked for: without a token, without a role, without a server."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from experience_buffer import Client
from tests.integration.credentials import entry, write
from tests.integration.page.browser import NARROW, Browser
from tests.integration.page.world import rollout
from tests.integration.server import Server

_TOML = """
[access]
file = "access.toml"

[buffers.math]
group_size = 4
advantage = "grpo"

[buffers.secret]
"""


@pytest.fixture(scope="module")
def guarded(window: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that wants tokens; "viewer" may look at one buffer only, "worker" at none."""
    folder: Path = tmp_path_factory.mktemp("guarded")
    write(
        folder / "access.toml",
        entry("viewer", "look", buffers=["math"]),
        entry("worker", "push"),
    )
    server = Server(folder, toml=_TOML).start()
    with Client(server.address, token="worker") as client:
        client.push([rollout(1, run) for run in range(3)], buffer="math")
    yield server
    server.close()


@pytest.fixture
def locked(window: Browser, guarded: Server) -> Browser:
    """A browser before the page of that server, without a token."""
    window.base = f"http://127.0.0.1:{guarded.metrics_port}/ui/"
    window.run("location.href = arguments[0]", window.base)
    window.waited("document.querySelector('main') !== null")
    window.run("sessionStorage.clear()")
    return window


def enter(browser: Browser, token: str) -> None:
    browser.waited("document.getElementById('token') !== null")
    browser.run("document.getElementById('token').focus()")
    browser.press(token, Keys.ENTER)


@pytest.mark.parametrize("width", [1400, NARROW])
def test_a_token_is_asked_for_and_stays_in_the_tab(locked: Browser, width: int) -> None:
    locked.look("#/b/math/groups", width=width)
    assert "This server asks for a token" in locked.text()
    locked.shot(f"token-{width}")
    enter(locked, "wrong")
    locked.waited("document.querySelector('main').innerText.includes(\"isn't known\")")
    enter(locked, "viewer")
    locked.waited("document.querySelector('main').innerText.includes('0/1')")
    locked.waited("document.querySelector('.live.on') !== null")
    kept = "[Object.values(sessionStorage), Object.keys(localStorage), document.cookie]"
    assert locked.value(kept) == [["viewer"], [], ""]
    assert "viewer" not in locked.value("location.href")


def test_what_a_token_may_not_see_says_so(locked: Browser) -> None:
    locked.look("#/b/secret/groups")
    enter(locked, "viewer")
    locked.waited("document.querySelector('main').innerText.includes('may not see this')")
    locked.shot("forbidden")
    assert "Use another token" in locked.text()
    locked.run("location.hash = '#/b/math/groups'")
    locked.waited("document.querySelector('main').innerText.includes('0/1')")


def test_a_token_without_the_role_sees_nothing(locked: Browser) -> None:
    locked.look("#/b/math/groups")
    enter(locked, "worker")
    locked.waited("document.querySelector('main').innerText.includes('may not see this')")


def test_what_is_not_there_says_where_it_may_be(locked: Browser) -> None:
    locked.look("#/b/math/experience/no/such/0/0/x")
    enter(locked, "viewer")
    locked.waited("document.querySelector('main').innerText.includes(\"It isn't here\")")
    locked.shot("missing")
    assert "departures" in locked.text()
    locked.look("#/nonsense")
    assert "There is no such view" in locked.text()


def test_what_is_older_than_five_seconds_says_so(locked: Browser, guarded: Server) -> None:
    locked.look("#/b/math/groups")
    enter(locked, "viewer")
    locked.waited("document.querySelector('main').innerText.includes('0/1')")
    guarded.signal(signal.SIGSTOP)
    try:
        locked.waited("document.querySelector('.banner.mild') !== null")
        assert "the server answers slowly" in locked.text(".banner")
        locked.run("location.hash = '#/b/math/leases'")
        locked.waited(
            "document.querySelector('.banner')?.textContent.includes(\"hasn't answered\")"
        )
    finally:
        guarded.signal(signal.SIGCONT)
    locked.waited("document.querySelector('.banner') === null")


def test_a_lost_server_shows_what_was_and_comes_back(locked: Browser, guarded: Server) -> None:
    locked.look("#/b/math/groups")
    enter(locked, "viewer")
    locked.waited("document.querySelector('.live.on') !== null")
    locked.waited("document.querySelector('main').innerText.includes('0/1')")
    guarded.die()
    locked.waited("document.querySelector('.banner') !== null")
    assert "The server can't be reached since" in locked.text(".banner")
    assert "0/1" in locked.text()
    assert locked.value("document.querySelector('main').className") == "old"
    locked.shot("lost")
    guarded.start()
    locked.waited("document.querySelector('.live.on') !== null", seconds=30)
    locked.waited("document.querySelector('.banner') === null")
    assert locked.value("document.querySelector('main').className") == ""
