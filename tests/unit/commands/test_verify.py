"""`experience-buffer verify`: what it prints, and what it exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from experience_buffer_server.commands.cli import application
from experience_buffer_server.store.lmdb.disk.format import Table, payload_key
from tests.damaging import flip
from tests.unit.builders import World, push, uid

pytestmark = pytest.mark.on_disk


def verify(path: Path, *more: str) -> Result:
    return CliRunner().invoke(application(), ["verify", "--data", str(path), *more])


@pytest.fixture
async def stopped(world: World) -> Path:
    """The closed store of a buffer with two groups, one whole and one of a tombstone and a run."""
    buffer = await world.create(group_size=2)
    await buffer.push(push((1, 0), (1, 1)))
    await buffer.push(push((2, 0), dead=[(2, 1)]))
    await buffer.drain()
    await world.store.close()
    return world.path


def test_a_sound_store_exits_with_0(stopped: Path) -> None:
    result = verify(stopped)
    assert result.exit_code == 0
    assert "buffer buffer-1: 3 experiences of " in result.stdout
    assert "2 groups, 0 open leases\n" in result.stdout
    assert result.stdout.rstrip().endswith("s: clean")
    assert json.loads(verify(stopped, "--json").stdout)["is_clean"] is True


def test_findings_exit_with_1_and_are_named(stopped: Path) -> None:
    flip(stopped, Table.PAYLOADS, payload_key(1, uid(1, 0)))
    result = verify(stopped)
    assert result.exit_code == 1
    assert f"damaged_row: payloads, buffer 1 {uid(1, 0)}: its " in result.stdout
    assert result.stdout.rstrip().endswith("s: 1 damaged_row")


async def test_a_store_in_use_is_checked(world: World) -> None:
    buffer = await world.create()
    await buffer.push(push((1, 0)))
    (record,) = [entry.record for entry in buffer.state.contents]
    batch = world.store.batch()
    batch.remove(buffer.id, record)
    batch.put_record(buffer.id, record)
    await world.store.commit(batch)
    result = verify(world.path)
    assert (result.exit_code, "missing_payload: payloads" in result.stdout) == (1, True)


@pytest.mark.parametrize("kind", ["nothing", "no store", "cut short"])
async def test_what_cannot_be_opened_exits_with_2(world: World, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "other"
    if kind == "no store":
        path.mkdir()
        (path / "data.mdb").write_bytes(b"something else" * 1000)
    if kind == "cut short":
        await world.create()
        await world.store.close()
        path = world.path
        with open(path / "data.mdb", "r+b") as file:
            file.truncate(20480)
    result = verify(path)
    assert result.exit_code == 2
    text = {
        "nothing": "there is no store at",
        "no store": "is not an LMDB database of this kind",
        "cut short": "is cut short: it has 20480 bytes",
    }
    assert text[kind] in result.stderr
