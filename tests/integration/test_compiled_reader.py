"""A server compiles its reader of payloads beside its work, the next one loads it, and both read the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from experience_buffer import EID, BufferConfig, Client, Experience, trxp
from tests.integration.server import MakeServer, Server, eventually

MODULE = "experience_buffer_server.buffer.intake.compiled"
READ = "experience_buffer_read_payloads_total"
COMPILE_SECONDS = 200.0

pytestmark = pytest.mark.timeout(400)


def group(number: int, size: int = 4) -> list[Experience]:
    """A group that the compiled reader knows."""
    return [
        Experience(
            eid=EID("batch", number, run, 0, "first"),
            tokens=torch.arange(6, dtype=torch.int32),
            prompt_length=2,
            logprobs=torch.full((4,), -0.5),
            reward=float(run),
            info={"model_version": 3},
            response_text=f"run {run}",
        )
        for run in range(size)
    ]


def num_read(server: Server) -> dict[str, float]:
    """Payloads read by reader."""
    lines = server.metrics().splitlines()
    counts = [line.rsplit(" ", 1) for line in lines if line.startswith(READ + "{")]
    return {labels.split('"')[1]: float(count) for labels, count in counts}


def check_stored(client: Client, numbers: Sequence[int]) -> None:
    """What was pushed can be read back, byte for byte as its producer would write it."""
    for number in numbers:
        for experience in group(number):
            stored = client.get(experience.eid.uid, buffer="runs")
            assert stored.payload == trxp.encode([experience])


def test_it_is_compiled_beside_a_server_and_loaded_by_the_next(
    make_server: MakeServer, tmp_path: Path
) -> None:
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    server = make_server(compiled_reader=True, environment=environment)
    with Client(server.address) as client:
        client.create_buffer(BufferConfig(name="runs", group_size=4))
        client.push(group(0), buffer="runs")
        assert num_read(server) == {"checked": 1}
        eventually(
            lambda: "read by compiled code now" in server.tail(),
            "the compiled reader",
            seconds=COMPILE_SECONDS,
        )
        client.push(group(1), buffer="runs")
        assert num_read(server) == {"checked": 1, "compiled": 1}
        repeated = client.push(group(0), buffer="runs")
        assert repeated.num_duplicates == 4
        check_stored(client, [0, 1])
    assert server.stop() == 0
    server.start()
    with Client(server.address) as client:
        client.push(group(2), buffer="runs")
        assert num_read(server) == {"compiled": 1}
        check_stored(client, [0, 1, 2])
    assert server.tail().count("being compiled") == 1
    assert server.stop() == 0
    for index in (tmp_path / "cache").rglob("*.nbi"):
        index.write_bytes(index.read_bytes()[:-20])
    server.start()
    assert "can't be loaded; delete it (UnpicklingError" in server.tail()
    with Client(server.address) as client:
        client.push(group(3), buffer="runs")
        assert num_read(server) == {"checked": 1}
        check_stored(client, [2, 3])


def test_a_server_that_stops_compiles_no_longer(make_server: MakeServer, tmp_path: Path) -> None:
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    server = make_server(compiled_reader=True, environment=environment)
    (compiling,) = eventually(lambda: server.children(MODULE), "its process")
    assert server.stop() == 0
    assert not Path(f"/proc/{compiling}").exists()


def test_where_it_can_be_kept_nowhere_it_says_so() -> None:
    # Whoever runs the tests may be able to write everywhere.
    nowhere = (
        "import numba.core.caching as caching, runpy;"
        "caching.CacheImpl._locator_classes = [];"
        f"runpy.run_module('{MODULE}', run_name='__main__')"
    )
    ended = subprocess.run([sys.executable, "-c", nowhere], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "set NUMBA_CACHE_DIR to a folder that can be written" in ended.stderr.splitlines()[-1]
