"""`replay-bundle` and `replay`: what a training step consumed comes again, bit by bit, in its order."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from experience_buffer import Client, ConsumerNotFoundError
from tests.integration.buffers import create
from tests.integration.server import MakeServer, Server, command, eventually
from tests.integration.test_scan import rollout

SELECTOR = {"kind": "uniform", "seed": 7}


def run(verb: str, *arguments: object, status: int = 0) -> dict[str, Any]:
    """Run a command; what it says as JSON."""
    done = command(verb, *arguments, "--json")
    assert done.returncode == status, done.stderr or done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def steps(client: Client, *, num_steps: int = 4, **options: Any) -> dict[int, list[Any]]:
    """Groups of several sizes in a random order, trained on in batches of several sizes; by step, batches."""
    create(client, "math", 4, advantage="grpo", selector=SELECTOR, **options)
    for task in range(30):
        size = 2 + task % 3
        members = [
            rollout(task, run, 5 + run, reward=float((task + run) % 3)) for run in range(size)
        ]
        client.push(members, buffer="math", group_size=size)
    eventually(
        lambda: client.get_stats("math").buffers[0].consumers[0].num_ready_units == 30, "are ready"
    )
    taken: dict[int, list[Any]] = {}
    for step in range(num_steps):
        taken[step] = [client.sample(units, buffer="math") for units in (1, 3, 2)]
        for batch in reversed(taken[step]):
            batch.ack(step)
    return taken


def manifest_of(bundle: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((bundle / "manifest.json").read_text("utf-8"))
    return found


@pytest.mark.parametrize("way", ["server", "rest", "beside a server", "zip"])
def test_a_step_comes_again_bit_by_bit(make_server: MakeServer, tmp_path: Path, way: str) -> None:
    server = make_server()
    with Client(server.address) as client:
        delivered = [(b.lease_id, b.payloads, b.uids) for b in steps(client)[2]]
        scanned = [each.delivered for each in client.scan_step(2, buffer="math")]
        assert scanned == [payload for _, payloads, _ in delivered for payload in payloads]
        with pytest.raises(ConsumerNotFoundError):
            list(client.scan_step(2, "nobody", buffer="math"))
    bundle = tmp_path / ("step.zip" if way == "zip" else "step")
    where: tuple[object, ...] = ("--address", server.address)
    if way in ("rest", "beside a server"):
        if way == "rest":
            server.stop()
        where = ("--data", server.data)
    said = run("replay-bundle", bundle, "-b", "math", "--step", 2, *where)
    assert (said["num_batches"], said["problems"]) == (3, [])
    hashed = hashlib.sha256()
    for _, payloads, _ in delivered:
        for payload in payloads:
            hashed.update(hashlib.sha256(payload).digest())
    assert said["digest"] == hashed.hexdigest()

    other = make_server()
    answer = run("replay", bundle, "--address", other.address)
    assert answer["buffer"] == "math-step-2"
    assert answer["batches"] == [1, 3, 2]
    with Client(other.address) as client:
        packed = []
        for units, (_, payloads, uids) in zip((1, 3, 2), delivered, strict=True):
            batch = client.sample(units, buffer="math-step-2", timeout=5.0)
            assert batch.payloads == payloads
            assert batch.uids == uids
            batch.nack()
            packed.append(client.sample(units, buffer="math-step-2", format="packed").packed)
            assert [packed[-1].payload(i) for i in range(len(payloads))] == list(payloads)
        assert not client.sample(1, buffer="math-step-2", timeout=0)


def test_a_manifest_says_what_was_consumed_and_how(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server()
    with Client(server.address) as client:
        batches = steps(client)[1]
    bundle = tmp_path / "step"
    done = command("replay-bundle", bundle, "--step", 1, "-b", "math", "--address", server.address)
    assert done.returncode == 0, done.stderr
    assert "step 1 of trainer of buffer math" in done.stdout
    manifest = manifest_of(bundle)
    assert (manifest["buffer"], manifest["consumer"], manifest["step"]) == ("math", "trainer", 1)
    assert manifest["estimator"]["estimator"] == "grpo"
    assert manifest["config"]["group_size"] == 4
    assert [batch["lease_id"] for batch in manifest["batches"]] == [b.lease_id for b in batches]
    assert [batch["num_units"] for batch in manifest["batches"]] == [1, 3, 2]
    told = [each["uid"] for batch in manifest["batches"] for each in batch["experiences"]]
    assert told == [uid for batch in batches for uid in batch.uids]
    rewards = [float(e.reward) for batch in batches for e in batch.experiences]
    statistics = manifest["statistics"]
    assert statistics["num_experiences"] == len(rewards)
    assert statistics["num_groups"] == 6
    assert statistics["reward"]["mean"] == pytest.approx(sum(rewards) / len(rewards))
    whole = (bundle / "experiences.parquet").read_bytes()
    assert manifest["files"]["experiences.parquet"] == {
        "num_bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest(),
    }  # fmt: skip


def test_after_a_rewind_it_is_what_was_trained_on_in_the_end(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server()
    with Client(server.address) as client:
        steps(client)
        client.rewind(1, buffer="math")
        batches = [client.sample(units, buffer="math") for units in (4, 2)]
        for batch in batches:
            batch.ack(2)
        payloads = [payload for batch in batches for payload in batch.payloads]
        assert [each.delivered for each in client.scan_step(2, buffer="math")] == payloads
        assert not list(client.scan_step(3, buffer="math"))
        # What is remembered outlives the server.
        server.kill()
        server.start()
        again = list(client.scan_step(2, buffer="math"))
        assert [each.delivered for each in again] == payloads
        assert [each.lease_id for each in again][:: len(again) - 1] == [
            batches[0].lease_id, batches[1].lease_id,
        ]  # fmt: skip
        done = command(
            "replay-bundle", tmp_path / "x", "--step", 3, "-b", "math", "--address", server.address
        )
        assert done.returncode == 2
        assert "nothing is kept" in done.stderr
        assert not (tmp_path / "x").exists()
        client.declare_safe(2, buffer="math")
        assert not list(client.scan_step(2, buffer="math"))


def test_what_is_archived_is_a_part_of_the_step(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server()
    with Client(server.address) as client:
        batches = steps(client, archive={}, num_steps=3)
        payloads = {n: [p for b in found for p in b.payloads] for n, found in batches.items()}
        client.declare_safe(0, buffer="math")
        uids = batches[0][0].uids
        eventually(
            lambda: client.get(uids[0], buffer="math").summary.state == "archived", "it is archived"
        )
        found = list(client.scan_step(0, buffer="math"))
        assert [each.delivered for each in found] == payloads[0]
        assert [each.lease_id for each in found] == [
            batch.lease_id for batch in batches[0] for _ in batch.uids
        ]
        assert {each.summary.state for each in found} == {"archived"}
        assert [each.delivered for each in client.scan_step(1, buffer="math")] == payloads[1]
    said = run(
        "replay-bundle", tmp_path / "x", "-b", "math", "--step", 0, "--address", server.address
    )
    assert (said["num_batches"], said["problems"]) == (3, [])
    run("replay", tmp_path / "x", "-b", "again", "--address", server.address)
    with Client(server.address) as client:
        again = [client.sample(units, buffer="again") for units in (1, 3, 2)]
        assert [p for batch in again for p in batch.payloads] == payloads[0]


def test_ranks_are_told_apart(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server()
    with Client(server.address) as client, Client(server.address) as second:
        create(client, "math", 2)
        for task in range(6):
            client.push([rollout(task, run) for run in range(2)], buffer="math")
        parts = [
            each.sample(4, buffer="math", rank=rank, world_size=2)
            for rank, each in enumerate((client, second))
        ]
        for part in parts:
            part.ack(5)
        found = list(client.scan_step(5, buffer="math"))
    for rank, part in enumerate(parts):
        assert tuple(each.payload for each in found if each.rank == rank) == part.payloads


@pytest.fixture
def made(make_server: MakeServer, tmp_path: Path) -> tuple[Server, Path]:
    """A server, and a bundle of its."""
    server, bundle = make_server(), tmp_path / "step"
    with Client(server.address) as client:
        steps(client, num_steps=1)
    run("replay-bundle", bundle, "-b", "math", "--step", 0, "--address", server.address)
    return server, bundle


def test_a_bundle_that_isnt_as_it_was_written_is_refused(
    made: tuple[Server, Path], tmp_path: Path
) -> None:
    server, bundle = made
    where = ("--address", server.address)

    def refused(path: Path, wanted: str) -> None:
        done = command("replay", path, "-b", "x", *where)
        assert done.returncode == 2, done.stdout
        assert wanted in done.stderr
        assert "Traceback" not in done.stderr

    changed = tmp_path / "changed"
    shutil.copytree(bundle, changed)
    content = bytearray((changed / "experiences.parquet").read_bytes())
    content[200] ^= 1
    (changed / "experiences.parquet").write_bytes(content)
    refused(changed, "isn't as it was written")
    (changed / "manifest.json").write_text("[" * 100_000)
    refused(changed, "isn't JSON")
    (changed / "manifest.json").write_text("{}")
    refused(changed, "of something else")
    (changed / "manifest.json").unlink()
    refused(changed, "No such file")
    refused(tmp_path / "nothing", "No such file")
    evil = tmp_path / "evil.zip"
    with zipfile.ZipFile(evil, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../manifest.json", "x")
        archive.writestr("manifest.json", (bundle / "manifest.json").read_text())
        archive.writestr("experiences.parquet", bytes(200_000_000))
    refused(evil, "far larger than the file")
    done = command("replay-bundle", bundle, "-b", "math", "--step", 0, *where)
    assert done.returncode == 2
    assert "is there already" in done.stderr
    assert run("replay-bundle", bundle, "-b", "math", "--step", 0, "--force", *where)["digest"]


def test_a_bundles_rows_are_a_table_as_any(made: tuple[Server, Path]) -> None:
    server, bundle = made
    rows = bundle / "experiences.parquet"
    said = run("import", rows, "-b", "copy", "--create", "--address", server.address)
    assert said["num_stored"] == manifest_of(bundle)["statistics"]["num_experiences"]
