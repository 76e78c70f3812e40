"""`top` in a real terminal: it draws, follows the window's size, survives its server, and leaves no trace."""

from __future__ import annotations

import signal
import sys

import pytest

from experience_buffer import Client
from tests.integration.buffers import create
from tests.integration.command_line import CommandLine, rollouts
from tests.integration.pseudo_terminal import Program
from tests.integration.server import MakeServer


def top(address: str, *, width: int = 100, height: int = 30) -> Program:
    command = [sys.executable, "-m", "experience_buffer_server", "top", "--every", "0.5"]
    return Program([*command, "--address", address], width=width, height=height)


def test_it_shows_what_waits_follows_the_server_and_leaves_the_terminal_as_it_was(
    make_server: MakeServer,
) -> None:
    server = make_server()
    with Client(server.address) as client, top(server.address) as program:
        create(client, "math", 2)
        client.push(rollouts(task=3)[:1], buffer="math")
        program.until(lambda text: "math" in text, "a buffer")
        assert program.screen.is_alternate
        with client.stream(1, buffer="math"):
            shown = program.until(lambda text: "trainer of math" in text, "who waits")
        assert "'0/3' has 1 of 2" in " ".join(shown.split())
        assert f"{server.address}  server " in shown
        program.until(lambda text: "Nothing waits." in text, "that nobody waits")
        client.push(rollouts(task=4), buffer="math")
        program.until(lambda text: "math" in text and " 3 " in text, "what is stored now")

        for width, height in ((40, 12), (160, 50), (20, 5)):

            def fits(text: str, most: int = width) -> bool:
                return "127.0.0.1" in text and max(map(len, text.split("\n"))) <= most

            program.resize(width, height)
            program.until(fits, "it in its new size")
            assert len(program.screen.text.split("\n")) <= height
        program.type("q")
        assert program.ended() == 0
        assert program.is_as_before()
        assert not program.screen.odd


@pytest.mark.parametrize("end", ["\x03", signal.SIGTERM, signal.SIGHUP])
def test_however_it_ends_the_terminal_is_as_it_was(
    make_server: MakeServer, end: str | signal.Signals
) -> None:
    server = make_server()
    with top(server.address) as program:
        program.until(lambda text: "default" in text, "a buffer")
        if isinstance(end, str):
            program.type(end)
        else:
            program.signal(end)
        assert program.ended() == 0
        assert program.is_as_before()


def test_a_lost_server_shows_its_last_state_with_since_when_and_comes_back(
    make_server: MakeServer,
) -> None:
    server = make_server()
    with top(server.address) as program:
        program.until(lambda text: "default" in text, "a buffer")
        server.kill()
        shown = program.until(lambda text: "lost since" in text, "that it is lost")
        assert "default" in shown
        server.start()
        program.until(lambda text: "default" in text and "lost" not in text, "it again")
        program.type("q")
        assert program.ended() == 0


def test_without_a_terminal_it_says_what_to_use(make_server: MakeServer) -> None:
    run = CommandLine("127.0.0.1:1")
    done = run("top")
    assert done.status == 2
    assert "needs a terminal" in " ".join(done.err.replace("│", " ").split())
