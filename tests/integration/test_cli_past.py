"""`steps` and `departures` against a real server."""

from __future__ import annotations

import json

import pytest

from experience_buffer import Client
from tests.integration.buffers import create
from tests.integration.command_line import CommandLine, rollouts
from tests.integration.server import Server


@pytest.fixture
def run(shared_server: Server) -> CommandLine:
    return CommandLine(shared_server.address)


def trained(client: Client, name: str) -> None:
    """Two steps are trained, and one group is dropped."""
    create(client, name, 2, advantage="grpo")
    for step, rewards in ((41, (0.0, 1.0)), (42, (1.0, 1.0))):
        client.push(rollouts(task=step, rewards=rewards), buffer=name)
        client.sample(1, buffer=name, timeout=30.0).ack(step)
    client.push(rollouts(task=9)[:1], buffer=name)
    client.drop_group("0/9", buffer=name, reason="the worker said so \x1b[2J")


def test_steps_say_how_much_how_good_and_how_stale(
    run: CommandLine, client: Client, name: str
) -> None:
    trained(client, name)
    listed = run("steps", "-b", name)
    assert listed.status == 0
    heading, newest, older = listed.out.splitlines()
    assert heading.split()[:2] == ["step", "consumer"]
    assert newest.split()[:5] == ["42", "trainer", "2", "1", "1"]
    assert older.split()[:5] == ["41", "trainer", "2", "1", "0.5"]
    assert "100%" in newest, "all of its groups are without variance"
    assert "0%" in older
    one = run("steps", "41", "-b", name)
    assert one.out.startswith("step 41 of consumer trainer\n2 experiences · 1 group · 1 lease")
    assert "rewards: mean 0.5, std 0.5, 0 █" in one.out
    assert "groups: 0/41" in one.out
    plain = run("steps", "-b", name, "--json").values
    assert plain == [
        json.loads(json.dumps(each.to_dict())) for each in client.list_steps(buffer=name)
    ]
    assert run("steps", "7", "-b", name).status == 1
    assert run("steps", "7", "-b", name, "--json").status == 1


def test_departures_say_why_and_how_many(run: CommandLine, client: Client, name: str) -> None:
    assert run("departures", "-b", "default").out == "nothing has left\n"
    trained(client, name)
    shown = run("departures", "-b", name)
    assert shown.status == 0
    assert "group_dropped 1" in shown.words
    assert "group dropped" in shown.words
    assert "the worker said so \\x1b[2J" in shown.out
    only = run("departures", "-b", name, "--reason", "group_dropped", "--json").value
    assert [each["reason"] for each in only["departures"]] == ["group_dropped"]
    assert run("departures", "-b", name, "--unused", "--json").value["departures"]
