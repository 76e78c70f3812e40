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


def test_what_has_left_is_shown_with_how_it_left_and_who_trained_on_it(
    run: CommandLine, client: Client, name: str
) -> None:
    archive = {"segment_seconds": 0.1}
    create(client, name, 2, advantage="grpo", archive=archive)
    pushed = rollouts(task=3)
    client.push(pushed, buffer=name)
    uid = pushed[1].eid.uid
    client.sample(1, buffer=name, timeout=30.0).ack(41)
    stored = run("show", uid, "-b", name)
    past = stored.out[stored.out.index("history") :]
    for word in ("pushed", "completed", "computed", "acknowledged"):
        assert word in past
    assert "step 41" in past
    client.declare_safe(41, buffer=name)
    while not run("list", "-b", name, "--archived", "--json").values:
        pass
    left = run("show", "0/3/1", "-b", name)
    assert (left.status, left.err) == (0, "")
    assert left.out.startswith(f"{uid}\n{name} · archived · reward 1")
    assert "ago, consumed" in left.out
    assert "trainer has trained on it at step 41" in left.out
    assert "It is 4." in left.out
    assert "grpo: (1 - mean 0.50) / (std 0.71 + 1e-06) = 0.71; 2 votes" in left.out
    listed = run("list", "-b", name, "--archived", "--reason", "consumed")
    assert "ago: consumed" in listed.out
    assert run("list", "-b", name, "--archived", "--reason", "evicted").out == "nothing that fits\n"
