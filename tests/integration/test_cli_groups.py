"""`groups` and `leases` against a real server: what is stuck on what, and who holds what."""

from __future__ import annotations

import json

import pytest

from experience_buffer import Client, Tombstone
from tests.integration.buffers import create
from tests.integration.command_line import CommandLine, rollouts
from tests.integration.server import Server


@pytest.fixture
def run(shared_server: Server) -> CommandLine:
    return CommandLine(shared_server.address)


def test_groups_tell_who_is_missing_and_why_they_wait(
    run: CommandLine, client: Client, name: str
) -> None:
    create(client, name, 3, group_deadline_seconds=600.0)
    assert run("groups", "-b", name).out == "no groups\n"
    whole, stuck = rollouts(task=1, rewards=(0.0, 1.0, 1.0)), rollouts(task=2, rewards=(0.5,))
    failed = Tombstone(rollouts(task=2, first_run=2)[0].eid, "it crashed \x1b[2J")
    client.push([*whole, *stuck], tombstones=[failed], buffer=name)
    shown = run("groups", "-b", name)
    assert (shown.status, shown.err) == (0, "")
    heading, first, second = (line.split() for line in shown.out.splitlines())
    assert heading[:2] == ["group", "state"]
    assert first[:6] == ["0/2", "open", "■x·", "2/3", "run", "1"], "what is stuck comes first"
    assert "in 9 min" in shown.out or "in 10 min" in shown.out
    assert second[:4] == ["0/1", "ready", "■■■", "3/3"]
    assert run("groups", "-b", name, "--state", "ready").out.count("\n") == 2
    assert run("groups", "-b", name, "--state", "redy").status == 2
    assert run("groups", "-b", name, "--order", "odd").status == 2
    plain = run("groups", "-b", name, "--json").values
    assert [each["group"] for each in plain] == ["0/2", "0/1"]
    assert plain[0].keys() == client.get_group("0/2", buffer=name).to_dict().keys()


def test_one_group_has_its_members_side_by_side_with_how_they_were_computed(
    run: CommandLine, client: Client, name: str
) -> None:
    create(client, name, 2, advantage="grpo")
    client.push(rollouts(task=4), buffer=name)
    client.sample(1, buffer=name, timeout=30.0).nack()
    shown = run("groups", "0/4", "-b", name)
    assert shown.status == 0
    assert shown.out.startswith("0/4\nready · 2 of 2 members")
    assert "grpo: (0 - mean 0.50) / (std 0.71 + 1e-06) = -0.71; 2 votes, 0 masked" in shown.out
    assert " █████│     " in shown.out
    assert "      │█████" in shown.out
    plain = run("groups", "0/4", "-b", name, "--json").value
    assert plain["computation"] == client.get_group("0/4", buffer=name).to_dict()["computation"]
    unknown = run("groups", "0/5", "-b", name, "--json")
    assert unknown.status == 1
    assert unknown.error["type"] == "GroupNotFoundError"


def test_leases_tell_who_holds_what_until_when(run: CommandLine, client: Client, name: str) -> None:
    create(client, name, 2)
    assert run("leases", "-b", name).out == "nobody holds a lease\n"
    client.push(rollouts(task=1), buffer=name)
    batch = client.sample(1, buffer=name)
    shown = run("leases", "-b", name)
    assert shown.status == 0
    assert f"{batch.lease_id} trainer 1 " in shown.words
    assert "127.0.0.1" in shown.out
    one = run("leases", str(batch.lease_id), "-b", name)
    assert one.out.startswith(f"lease {batch.lease_id} of consumer trainer\nheld by ")
    assert "0/1 2 1" in one.words
    (plain,) = run("leases", "-b", name, "--json").values
    (held,) = client.list_leases(buffer=name)
    passes = {"age_seconds", "expires_in_seconds"}
    assert {key: value for key, value in plain.items() if key not in passes} == {
        key: value
        for key, value in json.loads(json.dumps(held.to_dict())).items()
        if key not in passes
    }
    assert run("leases", "7", "-b", name).status == 1
