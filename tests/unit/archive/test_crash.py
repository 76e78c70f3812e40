"""Killed at whatever it does to the disk, the writer has archived everything once when it goes on."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from experience_buffer_server.archive.folder import MERGED
from experience_buffer_server.archive.search import Wanted
from experience_buffer_server.buffer.buffer import Buffer
from tests.unit.archive import crash_driver
from tests.unit.archive.conftest import Archive, consume
from tests.unit.builders import push, uid

_DRIVER = Path(crash_driver.__file__)


@pytest.mark.on_disk
@pytest.mark.timeout(180)
async def test_nothing_is_lost_or_doubled_wherever_the_writer_is_killed(archive: Archive) -> None:
    """While it writes one more segment, merges it with the seven before, and removes those."""
    buffer = await archive.create()
    for run in range(MERGED - 1):
        await buffer.push(push((1, run)))
        await consume(buffer, 1)
        await archive.write(buffer)
    await buffer.push(push((1, MERGED - 1), (1, MERGED)))
    await consume(buffer, 2)
    seqs = buffer.state.outbox.take(9, 1 << 30)
    buffer.state.outbox.not_written(seqs)
    shutil.copytree(archive.root, archive.root.with_name("before"))
    command = [sys.executable, str(_DRIVER), str(archive.root), str(archive.world.path)]
    command += [str(buffer.id), ",".join(map(str, seqs))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        number = try_all(archive, buffer, seqs, driver)
    assert number > 2 * MERGED, "as many stages as were killed"


def try_all(
    archive: Archive, buffer: Buffer, seqs: list[int], driver: subprocess.Popen[str]
) -> int:
    """Kill it at its first thing, its second, ...; how many there were."""
    before = archive.root.with_name("before")
    everything = sorted(uid(1, run) for run in range(MERGED + 1))
    assert driver.stdin is not None
    assert driver.stdout is not None
    for number in range(1, 99):
        shutil.rmtree(archive.root)
        shutil.copytree(before, archive.root)
        driver.stdin.write(f"{number}\n")
        driver.stdin.flush()
        status = int(driver.stdout.readline())
        assert status in (0, -signal.SIGKILL)
        # Whoever looks before it goes on finds everything, too: what isn't in a file waits.
        rows, _ = archive.lookup(buffer).page(Wanted(), 99)
        assert sorted(row["uid"] for row in rows) == everything, number
        fresh = Archive(archive.world, archive.root)
        answer = fresh.writer.handle(
            {"kind": "write", "buffer": buffer.id, "name": buffer.name, "seqs": seqs}
            | {"refused": [], "max_age_seconds": 0.0, "max_bytes": 1 << 40, "now": 2.0}
        )
        assert answer["files"]["num_rows"] == MERGED + 1, number
        found = [
            name
            for file in archive.root.rglob("*.parquet")
            for name in pq.read_table(file, columns=["uid"]).column("uid").to_pylist()
        ]
        assert sorted(found) == everything, number
        assert not list(archive.root.rglob("*.partial")), number
        if status == 0:
            driver.stdin.close()
            return number
    raise AssertionError
