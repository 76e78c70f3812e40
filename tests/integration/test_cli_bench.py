"""`bench` writes into a buffer of its own, and leaves nothing of it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from experience_buffer import Client
from experience_buffer_server.commands.bench_load import summed
from tests.integration.command_line import CommandLine
from tests.integration.pseudo_terminal import Program
from tests.integration.server import Server

SHORT = ("--seconds", "0.3", "--tokens", "8", "--batch", "2")


def names(client: Client) -> set[str]:
    return {each.config.name for each in client.list_buffers()}


def test_it_measures_and_removes_its_buffer(shared_server: Server, client: Client) -> None:
    run = CommandLine(shared_server.address)
    before = names(client)
    asked = run("bench", *SHORT)
    assert asked.status == 2
    assert "into a buffer of its own" in " ".join(asked.err.replace("│", " ").split())
    done = run("bench", *SHORT, "--yes")
    assert done.status == 0, done.err
    assert [line.split()[0] for line in done.out.splitlines()] == [
        *("what", "push", "sample", "ack", "2"),
    ]
    measured = run("bench", *SHORT, "--yes", "--json").value
    push = next(each for each in measured["calls"] if each["what"] == "push")
    assert push["calls"] > 0
    assert 0 < push["milliseconds"]["p50"] <= push["milliseconds"]["max"]
    assert names(client) == before


def test_ctrl_c_ends_it_and_removes_its_buffer(shared_server: Server, client: Client) -> None:
    command = [sys.executable, "-m", "experience_buffer_server", "bench", "--seconds", "60", "-y"]
    before = names(client)
    with Program([*command, "--address", shared_server.address]) as program:
        while names(client) == before:
            pass
        program.signal(signal.SIGINT)
        assert program.ended() != 0
    assert names(client) == before


def test_a_temporary_server_goes_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    done = CommandLine("127.0.0.1:1")("bench", *SHORT, "--temporary")
    assert done.status == 0, done.err
    assert "push" in done.out
    assert not list(tmp_path.iterdir())


def test_percentiles_are_of_what_was_measured() -> None:
    calls = summed("push", [each / 1000 for each in range(1, 101)], 2.0, 10, 1000)
    assert calls.milliseconds == pytest.approx({"p50": 50, "p90": 90, "p99": 99, "max": 100})
    assert calls.experiences_per_second == 500
    assert calls.bytes_per_second == 50_000
    assert summed("ack", [], 1.0, 10, 10).milliseconds["max"] == 0.0
