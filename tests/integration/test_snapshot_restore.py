"""Servers that go on from a snapshot: with other settings, and with the trainer's step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from experience_buffer import BufferConfig, Client, ConsumerConfig, Limiter
from experience_buffer_server.store.lmdb.snapshots.manifest import read_manifest
from experience_buffer_server.store.lmdb.snapshots.restore import restore
from tests.integration.plain import experience
from tests.integration.server import MakeServer, Server, command
from tests.integration.test_snapshot import SNAPSHOTS


def snapshot_of(server: Server, to: Path) -> Path:
    """Take one, and destroy everything else that the server had."""
    with Client(server.address) as client:
        taken = client.snapshot()
    shutil.copytree(server.folder / "snapshots" / taken.name, to / taken.name)
    server.kill()
    shutil.rmtree(server.folder)
    return to / taken.name


def test_a_limiter_that_blocks_is_overridden(make_server: MakeServer, tmp_path: Path) -> None:
    """Otherwise a restored store waits for what its old limiter asks for, without end."""
    server = make_server(toml=SNAPSHOTS)
    with Client(server.address) as client:
        trainer = ConsumerConfig("trainer", limiter=Limiter(min_size=100))
        client.create_buffer(BufferConfig("math", group_by="none", consumers=(trainer,)))
        client.push([experience(1, run) for run in range(5)], buffer="math")
        assert "100" in client.sample(1, buffer="math", timeout=0.1).shortfall
    snapshot = snapshot_of(server, tmp_path)
    restore(snapshot, server.data)
    other = '[buffers.math]\nconsumers = ["trainer"]\nmax_items = 7919\n'
    server.toml = other
    server.start()
    kept = [line for line in server.log if "keeps its stored settings" in line]
    assert len(kept) == 1
    assert "differ in consumers, max_items" in kept[0]
    with Client(server.address) as client:
        assert not client.sample(1, buffer="math", timeout=0.1), "without the flag nothing changes"
    server.stop()
    server.toml = other + "[server]\nupdate_buffers = true\n"
    server.start()
    with Client(server.address) as client:
        config = client.get_buffer("math").config
        assert (config.group_by, config.max_items) == ("none", 7919), "what isn't given stays"
        batch = client.sample(5, buffer="math", timeout=5)
        assert len(batch) == 5
        batch.ack()
        client.push([experience(2, run) for run in range(3)], buffer="math")
        assert len(client.sample(3, buffer="math", timeout=5)) == 3


def test_a_trainer_goes_on_from_the_snapshot(make_server: MakeServer, tmp_path: Path) -> None:
    """It skips nothing and repeats nothing, as the snapshot and its own checkpoint say."""
    server = make_server(toml=SNAPSHOTS)
    learned: list[str] = []

    def train(client: Client, steps: range) -> list[str]:
        seen: list[str] = []
        for step in steps:
            batch = client.sample(2, timeout=5)
            seen += batch.uids
            batch.ack(step=step)
        return seen

    with Client(server.address) as client:
        client.push([experience(task, 0) for task in range(20)])
        learned += train(client, range(4))
        checkpoint = json.dumps(client.state_dict(3))
        client.sample(2, timeout=5)  # Leased while the snapshot is taken, to a trainer that dies.
        taken = client.snapshot()
        train(client, range(4, 7))
        client.push([experience(97, 0)])
    manifest = read_manifest(server.folder / "snapshots" / taken.name)
    (buffer,) = manifest.buffers
    assert [(one.name, one.last_step) for one in buffer.consumers] == [("trainer", 3)]
    assert buffer.num_open_leases == 1
    shutil.copytree(server.folder / "snapshots" / taken.name, tmp_path / taken.name)
    server.kill()
    shutil.rmtree(server.folder)
    done = command("restore", tmp_path / taken.name, "--data", server.data, "--verify")
    assert done.returncode == 0, done.stderr
    assert "default/trainer 3" in done.stdout
    server.start()
    with Client(server.address) as client:
        client.load_state_dict(json.loads(checkpoint))
        learned += train(client, range(4, 10))
        assert not client.sample(1, timeout=0)
    assert sorted(learned) == sorted(experience(task, 0).eid.uid for task in range(20))


def test_an_interrupted_restore_is_not_served(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(toml=SNAPSHOTS)
    with Client(server.address) as client:
        client.push([experience(1, run, info={"x": "y" * 65536}) for run in range(31)])
    snapshot = snapshot_of(server, tmp_path)
    # As SIGKILL leaves it.
    (server.data / ".partial-restore").mkdir(parents=True)
    (server.data / ".partial-restore" / "data.mdb").write_bytes(b"half of it")
    refused = command("serve", "--data", server.data, "--port", 0, "--metrics-port", -1)
    assert (refused.returncode, "was interrupted" in refused.stderr) == (2, True)
    restore(snapshot, server.data)
    server.start()
    with Client(server.address) as client:
        assert len(list(client.list())) == 31


def test_a_store_without_a_server_and_one_beside_it(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server()
    with Client(server.address) as client:
        client.push([experience(1, run) for run in range(3)])
        for number in (1, 2):
            done = command(
                "snapshot", "--data", server.data, "--to", tmp_path / "to", "--label", f"n{number}"
            )
            assert done.returncode == 0, done.stderr
            assert "3 experiences" in done.stdout
            if number == 1:
                server.stop()
    nothing = command("snapshot", "--data", tmp_path, "--to", tmp_path / "to")
    assert (nothing.returncode, "holds no store" in nothing.stderr) == (1, True)
    half = command("snapshot", "--data", server.data)
    assert (half.returncode, "belong together" in half.stderr) == (2, True)
    asked = command("snapshot", "--keep", "1")
    assert (asked.returncode, "snapshots.keep" in asked.stderr) == (2, True)
    both = command("snapshot", "--data", server.data, "--to", tmp_path / "to", "--server-name", "x")
    assert (both.returncode, "--server-name would be" in both.stderr) == (2, True)
    path = command("snapshot", "--data", server.data, "--to", tmp_path / "to", "--label", "../x")
    assert path.returncode == 2


def test_names_are_no_markup(tmp_path: Path) -> None:
    (tmp_path / "snapshot-[bold]x").mkdir()
    listed = command("snapshots", tmp_path)
    assert (listed.returncode, "snapshot-[bold]x" in listed.stdout) == (0, True)


@pytest.mark.parametrize("name", ["snapshots", "restore"])
def test_what_is_not_there_is_said(tmp_path: Path, name: str) -> None:
    rest = ["--data", tmp_path / "new"] if name == "restore" else []
    done = command(name, tmp_path / "nowhere", *rest)
    assert done.returncode == 1
    assert "nowhere" in done.stderr
