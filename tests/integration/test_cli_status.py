"""`status`, `why` and `buffers` against real servers, and how every command fails."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from experience_buffer import Client
from tests.integration import credentials
from tests.integration.buffers import create
from tests.integration.command_line import CommandLine, rollouts
from tests.integration.server import MakeServer, Server
from tests.ports import unused_ports


@pytest.fixture
def run(shared_server: Server) -> CommandLine:
    return CommandLine(shared_server.address)


def test_why_says_who_waits_for_what_and_what_to_do(
    run: CommandLine, client: Client, name: str
) -> None:
    create(client, name, 2)
    nobody = run("why", "-b", name)
    assert (nobody.status, nobody.err) == (0, "")
    assert f"consumer trainer of {name} waits for nothing" in nobody.out

    client.push(rollouts(task=3)[:1], buffer=name)
    assert "a batch of 1 group would wait: 0 ready of 1 groups" in run("why", "-b", name).out
    with client.stream(1, buffer=name):
        while not client.get_stats(name).buffers[0].consumers[0].num_waiting:
            pass
        said = run("why", "-b", name)
        plain = run("why", "-b", name, "--json")
    assert said.status == plain.status == 1
    assert f"consumer trainer of {name} (" in said.out
    assert ") has waited 0 s: 0 ready of 1 groups; 1 group incomplete" in said.out
    assert "'0/3' has 1 of 2" in said.out
    assert f"$ experience-buffer groups -b {name}" in said.out
    assert (plain.value["kind"], plain.value["waits"]) == ("sample_waits", True)


def test_status_shows_buffers_and_consumers_and_its_json_is_the_statistics(
    run: CommandLine, client: Client, name: str
) -> None:
    create(client, name, 2)
    client.push(rollouts(), buffer=name)
    said = run("status")
    assert said.status == 0
    assert f"{run.options[1]}: server " in said.out
    assert f"{name} 2 " in said.words
    plain = run("status", "--json").value
    expected = client.get_stats().to_dict()
    assert plain.keys() == expected.keys()
    assert [each["name"] for each in plain["buffers"]] == [
        each["name"] for each in expected["buffers"]
    ]


def test_buffers_are_listed_and_one_is_shown_with_its_settings(
    run: CommandLine, client: Client, name: str
) -> None:
    create(client, name, 2, advantage="grpo")
    assert f"{name} 0 0 B task of 2 grpo trainer" in run("buffers").words
    one = run("buffers", name)
    assert "group_size 2" in one.words
    assert "consumers[trainer].unit group" in one.words
    assert "advantage.estimator grpo" in one.words
    plain = run("buffers", name, "--json").value
    assert plain == json.loads(json.dumps(client.get_buffer(name).to_dict()))
    assert plain in run("buffers", "--json").values


@pytest.mark.parametrize("command", ["status", "why", "buffers"])
def test_without_a_server_it_ends_at_once_with_2_and_says_where_it_looked(command: str) -> None:
    (port,) = unused_ports(1)
    run = CommandLine(f"127.0.0.1:{port}")
    done = run(command)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("experience-buffer: ")
    assert f"127.0.0.1:{port}" in done.err
    assert "Traceback" not in done.err
    plain = run(command, "--json")
    assert (plain.status, plain.out) == (2, "")
    assert plain.error["type"] == "UnavailableError"
    assert plain.error["status"] == "UNAVAILABLE"


def test_something_else_that_listens_there_is_told_from_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        run = CommandLine(f"127.0.0.1:{other.getsockname()[1]}", "--timeout", "0.5")
        assert run("status").status == 2


def test_an_unknown_buffer_is_wrong_use(run: CommandLine) -> None:
    done = run("why", "-b", "no-such")
    assert done.status == 2
    assert "no-such" in done.err
    assert run("buffers", "no-such", "--json").error["type"] == "BufferNotFoundError"


def test_who_may_not_is_told_so(make_server: MakeServer, tmp_path: Path) -> None:
    access = tmp_path / "access.toml"
    credentials.write(access, credentials.entry("root", "operate", "push"))
    server = make_server(toml=f'[access]\nfile = "{access}"\n')
    for token, kind in {"root": "", "nobody": "UnauthenticatedError"}.items():
        file = tmp_path / token
        file.write_text(token, encoding="ascii")
        file.chmod(0o600)
        done = CommandLine(server.address, "--token-file", str(file))("status", "--json")
        assert done.status == (2 if kind else 0)
        if kind:
            assert done.error["type"] == kind
    # Options may come from the environment, too.
    variables = {
        "EXPERIENCE_BUFFER_ADDRESS": server.address,
        "EXPERIENCE_BUFFER_TOKEN_FILE": str(tmp_path / "root"),
    }
    run = CommandLine(server.address)
    run.options = ()
    assert run("status", environment=variables).status == 0
