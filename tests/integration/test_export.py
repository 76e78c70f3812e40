"""`experience-buffer export`: from a server, from a store at rest, and what can be read of a damaged one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experience_buffer import Client, Tombstone, tables
from experience_buffer.eid import EID
from experience_buffer_server.store.lmdb.disk.format import Table, numbered_key, payload_key
from experience_buffer_server.store.lmdb.reader import LmdbReader
from tests.damaging import flip
from tests.integration.buffers import create, trainer
from tests.integration.server import MakeServer, Server, command, eventually
from tests.integration.test_scan import filled, rollout


def export(*arguments: object, status: int = 0) -> dict[str, Any]:
    """Run the command; what it says as JSON."""
    done = command("export", *arguments, "--json")
    assert done.returncode == status, done.stderr or done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rows(path: Path) -> list[tables.TableRow]:
    with tables.TableReader(path) as reader:
        return list(reader)


def about(path: Path) -> dict[str, Any]:
    with tables.TableReader(path) as reader:
        return reader.about


@pytest.fixture
def stored(make_server: MakeServer) -> tuple[Server, list[bytes]]:
    """A server that has stopped, and what was pushed to it; half of it trained on at step 3."""
    server = make_server()
    with Client(server.address) as client:
        payloads = filled(client, "math", 8)
        client.push(
            [], tombstones=[Tombstone(EID("b/1", 77, 0, 0, "t"), "no memory")], buffer="math"
        )
        client.sample(4, buffer="math").ack(step=3)
    server.stop()
    return server, payloads


def test_a_servers_buffer_becomes_a_file(
    shared_server: Server, client: Client, name: str, tmp_path: Path
) -> None:
    payloads = filled(client, name)
    out = tmp_path / "x.parquet"
    said = export(out, "-b", name, "--address", shared_server.address)
    assert (said["num_rows"], said["num_problems"], said["is_complete"]) == (12, 0, True)
    assert [each.payload for each in rows(out)] == payloads
    assert about(out)["config"]["advantage"]["estimator"] == "grpo"
    assert about(out)["cursor"] == said["cursor"]
    done = command("export", out, "-b", name, "--address", shared_server.address)
    assert done.returncode == 2
    assert "is there already" in done.stderr
    client.push([rollout(50, 0)], buffer=name)
    more = tmp_path / "more.jsonl.zst"
    said = export(more, "-b", name, "--address", shared_server.address, "--cursor", said["cursor"])
    assert [each.uid for each in rows(more)] == [rollout(50, 0).eid.uid]
    some = tmp_path / "some.arrow"
    export(some, "-b", name, "--address", shared_server.address, "--task", rollout(3, 0).eid.tid)
    assert len(rows(some)) == 2
    done = command("export", out, "-b", name, "--address", shared_server.address, "--force")
    assert done.returncode == 0
    assert f"13 experiences of buffer {name}" in done.stdout


def test_a_store_at_rest_gives_the_same_file(
    stored: tuple[Server, list[bytes]], tmp_path: Path
) -> None:
    server, payloads = stored
    out = tmp_path / "rest.parquet"
    before = sorted(os.listdir(server.data))
    said = export(out, "-b", "math", "--data", server.data)
    assert said["num_rows"] == 17
    assert sorted(os.listdir(server.data)) == before
    assert [each.payload for each in rows(out)][:-1] == payloads
    server.start()
    served = tmp_path / "served.parquet"
    again = export(served, "-b", "math", "--address", server.address)
    assert again["cursor"] == said["cursor"]
    import pyarrow.parquet as pq

    ours, theirs = (pq.read_table(path).to_pylist() for path in (out, served))
    for one, other in zip(ours, theirs, strict=True):
        # Where it is for its consumers only a server knows.
        assert {**one, "state": ""} == {**other, "state": ""}
    assert [row["times_sampled"] for row in ours] == [1] * 8 + [0] * 9
    # While a server uses it.
    export(out, "-b", "math", "--data", server.data, "--force")
    assert len(rows(out)) == 17


def test_filters_hold_at_rest_too(stored: tuple[Server, list[bytes]], tmp_path: Path) -> None:
    server, _ = stored
    out = tmp_path / "x.jsonl"
    ask = (out, "-b", "math", "--data", server.data, "--force")

    def uids(*arguments: str) -> list[str]:
        export(*ask, *arguments)
        return [each.uid for each in rows(out)]

    assert len(uids("--step", "3")) == 8
    assert len(uids("--step", "3", "-c", "trainer", "--reward", "1")) == 4
    assert uids("--task", rollout(5, 0).eid.tid) == [rollout(5, run).eid.uid for run in range(2)]
    assert uids("--version", "7:") == [rollout(7, run).eid.uid for run in range(2)]
    assert uids("--state", "tombstone") == ["b/1/77/0/0/t"]
    assert uids("--prefix", "b/1/2/", "--response-tokens", ":3") == [
        rollout(2, run).eid.uid for run in range(2)
    ]
    assert uids("--flag", "zero_variance") == []
    done = command("export", *ask, "--state", "leased")
    assert done.returncode == 2
    assert "only its server knows" in done.stderr


def test_what_is_asked_for_wrongly_says_so(
    stored: tuple[Server, list[bytes]], tmp_path: Path
) -> None:
    server, _ = stored
    out = tmp_path / "x.parquet"
    for arguments, wanted in (
        ((out, "-b", "nope", "--data", server.data), "there are"),
        ((out, "--data", tmp_path), "no store"),
        ((tmp_path / "x.csv", "-b", "math", "--data", server.data), "doesn't say its format"),
        ((out, "-b", "math", "--data", server.data, "--cursor", "7"), "not one that a scan gave"),
        ((tmp_path / "no" / "x.parquet", "-b", "math", "--data", server.data), "No such file"),
        ((out, "-b", "math", "--address", "127.0.0.1:1"), ""),
    ):
        done = command("export", *arguments)
        assert done.returncode == 2, done.stderr
        assert wanted in done.stderr
        assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path / "x") if (tmp_path / "x").exists() else not out.exists()


def test_of_a_damaged_store_all_that_can_be_read_is_exported_and_the_rest_listed(
    stored: tuple[Server, list[bytes]], tmp_path: Path
) -> None:
    server, payloads = stored
    with LmdbReader(server.data) as reader:
        (state,) = [each for each in reader.load() if each.row.name == "math"]
        seqs = {record.uid: record.seq for record in state.records}
    buffer_id = state.row.id
    payload, record, computed = (rollout(task, 1).eid.uid for task in (1, 3, 5))
    flip(server.data, Table.PAYLOADS, payload_key(buffer_id, payload))
    flip(server.data, Table.RECORDS, numbered_key(buffer_id, seqs[record]))
    flip(server.data, Table.ADVANTAGES, numbered_key(buffer_id, seqs[computed]))
    flip(server.data, Table.BUFFERS, state.row.id.to_bytes(4, "big"))
    out = tmp_path / "x.parquet"
    said = export(out, "-b", "math", "--data", server.data, status=1)
    assert said["is_complete"]
    reasons = {each["what"]: each["reason"] for each in said["problems"]}
    assert "checksum" in reasons[payload] or "can't be read back" in reasons[payload]
    assert f"record {seqs[record]}" in reasons
    assert computed in reasons
    found = {each.uid: each.payload for each in rows(out)}
    # Of the lost record the payload is left; of the damaged payload nothing is.
    assert payload not in found
    assert len(found) == 16
    assert {*found.values()} - {b""} == {*payloads} - {rollout(1, 1).serialize()}
    done = command("export", out, "-b", "math", "--data", server.data, "--force")
    assert done.returncode == 1
    assert "3 problems:" in done.stdout


def overwrite_pages(path: Path, marker: bytes, filler: bytes) -> int:
    """Overwrite every page that holds a text; how many."""
    file = path / "data.mdb"
    content, count = bytearray(file.read_bytes()), 0
    for start in range(2 * 4096, len(content), 4096):
        if marker in content[start : start + 4096]:
            content[start : start + 4096] = (filler * 4096)[:4096]
            count += 1
    file.write_bytes(content)
    return count


@pytest.mark.parametrize(
    "filler", [b"\0", b"\xff", b"\x01\x7f\xa5"], ids=["zeros", "ones", "noise"]
)
def test_damaged_pages_cost_what_was_on_them(
    make_server: MakeServer, tmp_path: Path, filler: bytes
) -> None:
    server = make_server()
    with Client(server.address) as client:
        create(client, "math")
        payloads = [rollout(task, 0).serialize() for task in range(400)]
        for start in range(0, 400, 100):
            for payload in payloads[start : start + 100]:
                client.push(payload, buffer="math")
    server.stop()
    copy = tmp_path / "copy"
    shutil.copytree(server.data, copy)
    assert overwrite_pages(copy, b"b/1/200/0/0/s", filler)
    out = tmp_path / "x.parquet"
    said = export(out, "-b", "math", "--data", copy, status=1)
    found = [each.payload for each in rows(out)]
    assert said["num_problems"] >= 1
    assert {*found} <= {*payloads}
    assert len(found) == len({*found})
    # Pages have some 20 records or 5 payloads: far from all is lost.
    assert len(found) >= 300, said


def test_an_export_that_is_interrupted_keeps_what_came_before_and_can_go_on(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server()
    out, rest = tmp_path / "x.parquet", tmp_path / "rest.parquet"
    with Client(server.address) as client:
        create(client, "math")
        for run in range(60):
            client.push([rollout(0, run, 300_000)], buffer="math")
    arguments = ["export", str(out), "-b", "math", "--address", server.address, "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "experience_buffer_server", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    eventually(lambda: list(tmp_path.glob(".x.parquet*")) or None, "it has begun")
    eventually(
        lambda: sum(each.stat().st_size for each in tmp_path.glob(".x*")) > 10_000_000 or None,
        "it has written a part",
    )
    process.send_signal(signal.SIGINT)
    said = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == (3 if not said["is_complete"] else 0)
    export(rest, "-b", "math", "--address", server.address, "--cursor", said["cursor"])
    uids = [each.uid for path in (out, rest) for each in rows(path)]
    assert uids == [rollout(0, run).eid.uid for run in range(60)]
    assert about(out)["is_complete"] is said["is_complete"]
    assert not list(tmp_path.glob(".x*"))
    assert trainer(Client(server.address), "math").num_ready_units == 60
