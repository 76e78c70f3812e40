"""`list` and `show` of a store that no server serves."""

from __future__ import annotations

from pathlib import Path

from experience_buffer import Client
from tests.integration.buffers import create
from tests.integration.command_line import CommandLine, rollouts
from tests.integration.server import MakeServer


def test_what_a_store_holds_is_listed_and_shown_as_by_its_server(make_server: MakeServer) -> None:
    server = make_server()
    with Client(server.address) as client:
        create(client, "math", 2, advantage="grpo")
        pushed = rollouts(task=1) + rollouts(task=2)[:1]
        client.push(pushed, buffer="math")
        client.sample(1, buffer="math", timeout=30.0).nack()
        uid = pushed[1].eid.uid
        shown = CommandLine(server.address)("show", uid, "-b", "math").out
        summary = client.get(uid, buffer="math").summary.to_dict()
    server.stop()
    before = sorted(server.data.rglob("*"))

    run = CommandLine("127.0.0.1:1", "--data", str(server.data), "-b", "math")
    listed = run("list", "--json")
    assert (listed.status, listed.err) == (0, "")
    assert [each["uid"] for each in listed.values] == [each.eid.uid for each in pushed]
    same = {
        name: listed.values[1][name] for name in ("uid", "reward", "response_tokens", "push_time")
    }
    assert same == {name: summary[name] for name in same}
    assert run("list", "--reward", "1:").out.count("\n") == 2
    found = run("show", "0/1/1")
    assert (found.status, found.err) == (0, "")
    line = "grpo: (1 - mean 0.50) / (std 0.71 + 1e-06) = 0.71; 2 votes"
    assert line in shown
    assert line in found.out
    assert found.out[found.out.index("prompt") :].split("history")[0] in shown
    several = run("show", "0/1")
    assert several.status == 2
    assert "several begin so" in several.err
    assert run("show", "0/9", "--json").error["type"] == "ExperienceNotFoundError"
    assert sorted(server.data.rglob("*")) == before, "nothing is written"


def test_where_there_is_no_store_it_says_so(tmp_path: Path) -> None:
    run = CommandLine("127.0.0.1:1", "--data", str(tmp_path / "none"))
    assert run("list").status == 2
    plain = run("list", "--json")
    assert plain.status == 2
    assert "none" in plain.error["message"]
    assert run("list", "--newest").status == 2
