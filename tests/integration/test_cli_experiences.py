"""`list`, `show`, `tail`, and what operators do by command: `drop`, `delete`, `release`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experience_buffer import Client
from experience_buffer.trxp import decode
from tests.integration.buffers import create, states
from tests.integration.command_line import CommandLine, rollouts
from tests.integration.pseudo_terminal import Program
from tests.integration.server import Server

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e\u2066[bold red]<script>alert(1)</script>"


@pytest.fixture
def run(shared_server: Server) -> CommandLine:
    return CommandLine(shared_server.address)


def computed(client: Client, name: str) -> list[str]:
    """Push a group, and wait until its advantages are there; the uids."""
    create(client, name, 2, advantage="grpo")
    pushed = rollouts(action_mask=[1, 1, 0, 1])
    client.push(pushed, buffer=name)
    client.sample(1, buffer=name, timeout=30.0).nack()
    return [each.eid.uid for each in pushed]


def test_list_finds_by_what_is_in_them_and_its_json_is_the_summaries(
    run: CommandLine, client: Client, name: str
) -> None:
    create(client, name, 2)
    client.push(rollouts(rewards=(0.0, 1.0)) + rollouts(task=8, rewards=(0.5, 2.0)), buffer=name)
    everything = run("list", "-b", name, "--json")
    assert everything.values == [
        json.loads(json.dumps(each.to_dict())) for each in client.list(buffer=name)
    ]
    found = run("list", "-b", name, "--task", "0/8", "--json").values
    assert [each["reward"] for each in found] == [0.5, 2.0]
    shown = run("list", "-b", name, "-n", "3")
    assert len(shown.out.splitlines()) == 1 + 3 + 1
    assert "... and more" in shown.out
    assert run("list", "-b", name, "--state", "quarantined").out == "nothing that fits\n"


@pytest.mark.parametrize("text", ["low", "1:x", ":"])
def test_a_range_that_is_none_is_wrong_use(run: CommandLine, text: str) -> None:
    done = run("list", "-b", "default", "--reward", text, "--json")
    assert done.status == 2
    assert done.error["type"] == "UsageError"


def test_a_state_that_there_isnt_is_wrong_use(run: CommandLine) -> None:
    done = run("list", "-b", "default", "--state", "redy")
    assert done.status == 2
    assert "ready" in done.err


def test_show_has_texts_tokens_and_the_computation_with_its_numbers(
    run: CommandLine, client: Client, name: str
) -> None:
    uids = computed(client, name)
    shown = run("show", uids[1], "-b", name)
    assert shown.status == 0
    assert shown.out.startswith(f"{uids[1]}\n{name} · ready · reward 1 · 4 response tokens")
    assert "grpo: (1 - mean 0.50) / (std 0.71 + 1e-06) = 0.71; 2 votes" in shown.out
    assert "2 + 2?" in shown.out
    assert "It is 4." in shown.out
    assert "8 9 10 11" in shown.out
    assert "1 of 4 are masked" in shown.out
    assert max(map(len, shown.out.splitlines())) < 100, "no line is filled up in a file"
    plain = run("show", uids[1], "-b", name, "--json").value
    assert plain == json.loads(json.dumps(client.get(uids[1], buffer=name).to_dict()))


def test_each_token_has_the_colour_of_its_value(
    shared_server: Server, client: Client, name: str
) -> None:
    uids = computed(client, name)
    shown = {}
    for color_by in ("advantage", "logprob", "mask"):
        command = [sys.executable, "-m", "experience_buffer_server", "show", uids[0], "-b", name]
        command += ["--color-by", color_by, "--address", shared_server.address]
        with Program(command, environment={"COLORTERM": "truecolor"}) as program:
            assert program.ended() == 0
            shown[color_by] = program.output
            assert "8 9 10 11" in program.screen.text
            assert not program.screen.odd
    # Blue: the advantage is below zero. The third is masked: struck, in every colouring.
    background = shown["advantage"].partition("m8 \x1b")[0].rpartition("\x1b[")[2]
    red, _, blue = background.split(";")[-3:]
    assert int(blue) > int(red)
    assert all("\x1b[9;38;5;244m10 " in text for text in shown.values())
    assert len(set(shown.values())) == 3


def test_a_tokenizer_makes_texts_of_ids(
    run: CommandLine, client: Client, name: str, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{number}": number for number in range(11)} | {HOSTILE: 11}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="w0")
    file = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(model).save(str(file))
    uids = computed(client, name)
    shown = run("show", uids[0], "-b", name, "--tokenizer", str(file))
    assert "w8 w9 w10 \\x1b]0;owned" in shown.words
    assert "\x1b" not in shown.out
    file.write_text("{", encoding="utf-8")
    assert run("show", uids[0], "-b", name, "--tokenizer", str(file)).status == 2


def test_hostile_texts_do_nothing_to_a_terminal(
    shared_server: Server, client: Client, name: str
) -> None:
    create(client, name, 2)
    messages = [{"role": HOSTILE, "content": HOSTILE, "tool_calls": [HOSTILE]}]
    pushed = rollouts(
        rewards=(1.0,), messages=messages, response_text=HOSTILE * 10_000, prompt_text=HOSTILE
    )
    client.push(pushed, buffer=name)
    assert decode(client.get(pushed[0].eid.uid, buffer=name).payload)[0].prompt_text == HOSTILE
    for command in (["show", pushed[0].eid.uid], ["list"]):
        whole = [sys.executable, "-m", "experience_buffer_server", *command, "-b", name]
        with Program([*whole, "--address", shared_server.address], height=1000) as program:
            assert program.ended() == 0, program.output
            assert not program.screen.odd, "a sequence of ours only"
            assert "\u202e" not in program.output
            assert "\x9b" not in program.output
            assert len(program.output) < 60_000


def test_the_beginning_of_a_uid_is_enough_where_it_is_one(
    run: CommandLine, client: Client, name: str
) -> None:
    create(client, name, 2)
    pushed = rollouts(rewards=(0.0, 1.0))
    client.push(pushed, buffer=name)
    assert run("show", "0/7/1", "-b", name).out.startswith(pushed[1].eid.uid)
    several = run("show", "0/7", "-b", name)
    assert several.status == 2
    assert "several begin so" in several.err
    unknown = run("show", "0/9", "-b", name)
    assert unknown.status == 1
    assert run("show", "0/9", "-b", name, "--json").error["type"] == "ExperienceNotFoundError"


def test_tail_shows_what_comes_and_ends_with_ctrl_c(
    shared_server: Server, client: Client, name: str
) -> None:
    create(client, name, 2)
    client.push(rollouts(task=1), buffer=name)
    command = [sys.executable, "-m", "experience_buffer_server", "tail", "-b", name, "-n", "1"]
    with Program([*command, "--every", "0.2", "--address", shared_server.address]) as program:
        program.until(lambda text: "0/1/1/" in text, "what was there")
        assert "0/1/0/" not in program.screen.text
        client.push(rollouts(task=2), buffer=name)
        shown = program.until(lambda text: "0/2/1/" in text, "what is new")
        assert shown.index("0/2/0/") < shown.index("0/2/1/")
        assert shown.count("0/1/1/") == 1
        program.type("\x03")
        assert program.ended() == 0
        assert program.is_as_before()


def test_tail_as_json_is_a_line_for_each(shared_server: Server, client: Client, name: str) -> None:
    create(client, name, 2)
    client.push(rollouts(task=1), buffer=name)
    command = [sys.executable, "-m", "experience_buffer_server", "tail", "-b", name, "--json"]
    process = subprocess.Popen(
        [*command, "--address", shared_server.address], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert [each["rid"] for each in lines] == ["0/1/0", "0/1/1"]


def test_delete_counts_first_and_says_what_it_left(
    run: CommandLine, client: Client, name: str
) -> None:
    create(client, name, 2)
    client.push(rollouts(task=1) + rollouts(task=2)[:1] + rollouts(task=3)[:1], buffer=name)
    asked = run("delete", "-b", name, "--task", "0/2")
    assert asked.status == 2
    assert "This deletes 1 experiences" in " ".join(asked.err.replace("│", " ").split())
    assert len(states(client, name)) == 4, "nobody said yes"
    assert run("delete", "-b", name, "--task", "0/2", "--yes").out == "deleted 1\n"
    with_lease = client.sample(1, buffer=name)
    left = run("delete", "-b", name, with_lease.experiences[0].eid.uid, "nobody", "-y", "--json")
    assert left.status == 1
    assert left.value == {
        "num_deleted": 0,
        "leased_uids": [with_lease.experiences[0].eid.uid],
        "unknown_uids": ["nobody"],
    }
    assert run("delete", "-b", name, "-y").status == 2
    assert run("delete", "-b", name, "x", "--task", "0/1", "-y").status == 2


def test_a_person_is_asked_and_may_say_no(shared_server: Server, client: Client, name: str) -> None:
    create(client, name, 2)
    client.push(rollouts(task=5)[:1], buffer=name)
    command = [sys.executable, "-m", "experience_buffer_server", "drop", "0/5", "-b", name]
    for answer, status, left in (("n\n", 1, 1), ("y\n", 0, 0)):
        with Program([*command, "--address", shared_server.address]) as program:
            program.until(lambda text: "Go on?" in text, "the question")
            assert f"This drops group 0/5 of {name}" in " ".join(program.screen.text.split())
            program.type(answer)
            assert program.ended() == status
        assert len(states(client, name)) == left


def test_seal_delivers_a_group_with_those_that_are_there(
    run: CommandLine, client: Client, name: str
) -> None:
    create(client, name, 3)
    client.push(rollouts(task=5), buffer=name)
    assert run("seal", "0/5", "-b", name, "-y").out == "sealed 0/5: 2 of 2 members\n"
    assert len(client.sample(1, buffer=name).experiences) == 2
    unknown = run("seal", "0/6", "-b", name, "-y", "--json")
    assert unknown.status == 1
    assert unknown.error["type"] == "GroupNotFoundError"


def test_drop_and_release_by_yes(run: CommandLine, client: Client, name: str) -> None:
    create(client, name, 2, max_deliveries=1)
    client.push(rollouts(task=5)[:1] + rollouts(task=6), buffer=name)
    assert run("drop", "0/5", "-b", name, "-y", "--json").value == {"num_dropped": 1}
    client.sample(1, buffer=name).nack()
    assert "trainer" in run("status").out
    assert run("release", "--all", "-b", name, "-y").out == "offered again: 1 unit\n"
    assert run("release", "-b", name, "-y").status == 2
    unknown = run("release", "nobody", "-b", name, "-y")
    assert unknown.status == 1
