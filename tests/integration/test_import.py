"""`experience-buffer import`: byte for byte, again and again, and one bad row costs no other."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experience_buffer import EID, Client, Experience, PushRefusedError, Tombstone, tables, trxp
from tests.integration.buffers import create, trainer
from tests.integration.server import MakeServer, command, eventually
from tests.integration.test_export import export
from tests.integration.test_scan import filled, rollout

DATA = Path(__file__).parents[1] / "data" / "trxp"


def run(*arguments: object, status: int = 0) -> dict[str, Any]:
    """Run the command; what it says as JSON."""
    done = command("import", *arguments, "--json")
    assert done.returncode == status, done.stderr or done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def digests(client: Client, buffer: str) -> dict[str, str]:
    """Of each payload, by uid, in the order of arrival."""
    return {
        each.summary.uid: hashlib.sha256(each.payload).hexdigest()
        for each in client.scan(buffer=buffer)
    }


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl", "jsonl.gz"])
def test_what_is_imported_elsewhere_is_what_was_exported(
    make_server: MakeServer, tmp_path: Path, ending: str
) -> None:
    out = tmp_path / f"x.{ending}"
    server = make_server()
    with Client(server.address) as client:
        filled(client, "math", 5)
        client.push(
            [], tombstones=[Tombstone(EID("b/1", 77, 0, 0, "t"), "no memory")], buffer="math"
        )
        client.push(
            [
                rollout(
                    90, 0, info={"model_version": 1, "odd": {"sets": {1, 2}, "bytes": b"\0\xff"}}
                )
            ],
            buffer="math",
        )
        before = digests(client, "math")
        advantages = [each.advantages for each in client.scan(buffer="math")]
    export(out, "-b", "math", "--address", server.address)
    other = make_server()
    where = ("--address", other.address)
    with Client(other.address) as client:
        if "jsonl" in ending:
            done = command("import", out, "-b", "math", "--create", *where)
            assert done.returncode == 2
            assert "create it first" in done.stderr
            create(client, "math", 2, advantage="grpo")
        said = run(out, "-b", "math", "--create", *where)
        assert (said["num_stored"], said["num_duplicates"], said["num_refused"]) == (12, 0, 0)
        assert digests(client, "math") == before
        order = [uid for uid in before if uid != "b/1/77/0/0/t"]
        assert [uid for uid in digests(client, "math") if uid != "b/1/77/0/0/t"] == order
        eventually(lambda: trainer(client, "math").num_ready_units == 5, "all are computed")
        assert [each.advantages for each in client.scan(buffer="math")] == advantages
        again = run(out, "-b", "math", *where)
        assert (again["num_stored"], again["num_duplicates"]) == (0, 12)
        assert digests(client, "math") == before


def test_all_that_trinity_writes_goes_through_a_file_and_comes_back(
    client: Client, name: str, shared_server: Any, tmp_path: Path
) -> None:
    create(client, name)
    for path in sorted(DATA.glob("*.bin")):
        try:
            payloads = trxp.split(path.read_bytes())
        except trxp.TrxpError:
            continue
        client.push(payloads, buffer=name, raise_on_refused=False)
    before = digests(client, name)
    assert len(before) > 20
    out = tmp_path / "x.parquet"
    export(out, "-b", name, "--address", shared_server.address)
    copy = f"{name}-copy"
    said = run(out, "-b", copy, "--create", "--address", shared_server.address)
    assert said["num_stored"] == len(before)
    assert digests(client, copy) == before


def test_bad_rows_are_listed_and_their_neighbours_stored(
    client: Client, name: str, shared_server: Any, tmp_path: Path
) -> None:
    create(client, name)
    client.push([rollout(1, 0, reward=9.0)], buffer=name)
    rows = [rollout(0, run) for run in range(5)] + [rollout(1, 0)]
    table = tables.to_table(rows)
    payloads = table.column("payload").to_pylist()
    payloads[1] = payloads[1][:-2]
    payloads[3] = payloads[0]
    place = table.column_names.index("payload")
    out = tmp_path / "x.parquet"
    pq.write_table(table.set_column(place, "payload", pa.array(payloads, pa.binary())), out)
    where = ("-b", name, "--address", shared_server.address)
    checked = run(out, "--dry-run", *where, status=1)
    assert [each["row"] for each in checked["problems"]] == [1, 3]
    assert len(digests(client, name)) == 1
    said = run(out, *where, status=1)
    assert (said["num_stored"], said["num_refused"]) == (3, 3)
    reasons = {each["row"]: each["reason"] for each in said["problems"]}
    assert "frame" in reasons[1]
    assert "the row says uid" in reasons[3]
    assert "conflict" in reasons[5]
    assert said["problems"][0]["uid"] == rows[1].eid.uid
    done = command("import", out, *where)
    assert done.returncode == 1
    assert "3 there already, 3 refused" in done.stdout
    assert "row 1 b/1/0/1/0/s: " in done.stdout


def test_rows_that_somebody_made_go_in(
    client: Client, name: str, shared_server: Any, tmp_path: Path
) -> None:
    create(client, name)
    out = tmp_path / "x.jsonl"
    lines = [
        {"batch": "0", "task": "7", "run": run, "prompt_ids": [1, 2], "completion_ids": [3, run],
         "reward": 0.5, "completion": "\x1b[2Jboo"}
        for run in range(3)
    ]  # fmt: skip
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    where = ("-b", name, "--address", shared_server.address)
    assert run(out, *where)["num_stored"] == 3
    assert run(out, *where)["num_duplicates"] == 3
    found = [each.experience for each in client.scan(buffer=name)]
    assert [each.tokens.tolist() for each in found if each] == [[1, 2, 3, run] for run in range(3)]


def test_what_cant_be_says_so(
    client: Client, name: str, shared_server: Any, tmp_path: Path
) -> None:
    where = ("--address", shared_server.address)
    out = tmp_path / "x.parquet"
    pq.write_table(tables.to_table([rollout(0, 0)]), out)
    (tmp_path / "y.parquet").write_bytes(b"PAR1 nonsense")
    for arguments, wanted in (
        ((out, "-b", "nope", *where), "--create makes it"),
        ((out, "-b", "nope", "--create", *where), "doesn't say the settings"),
        ((tmp_path / "no.parquet", "-b", "math", *where), "No such file"),
        ((tmp_path / "y.parquet", "-b", "math", *where), "isn't a whole parquet file"),
    ):
        done = command("import", *arguments)
        assert done.returncode == 2, done.stdout
        assert wanted in done.stderr
        assert "Traceback" not in done.stderr


def test_payloads_are_pushed_as_they_are(client: Client, name: str) -> None:
    create(client, name, 20)
    payloads = [rollout(0, run, 200_000).serialize() for run in range(12)]
    dead = [Tombstone(EID("b", 1, 0, 0, "x"))]
    result = client.push(payloads, buffer=name, tombstones=dead)
    assert [each.status for each in result.outcomes] == ["stored"] * 13
    assert [each.index for each in result.outcomes] == list(range(13))
    assert [each.payload for each in client.scan(buffer=name)] == [*payloads, b""]
    assert client.push(payloads, buffer=name).num_duplicates == 12
    with pytest.raises(PushRefusedError):
        client.push([rollout(0, 3).serialize(), payloads[0]], buffer=name)
    with pytest.raises(ValueError, match=r"experiences\[1\]"):
        client.push([payloads[0], rollout(0, 0)], buffer=name)  # type: ignore[arg-type]
    assert not client.push([], buffer=name).outcomes
    with pytest.raises(PushRefusedError, match="too few for a frame"):
        client.push([b"TRXP"], buffer=name)
    assert isinstance(Experience.deserialize(payloads[0]), Experience)
