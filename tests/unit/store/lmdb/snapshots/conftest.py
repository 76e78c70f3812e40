"""A store of which snapshots are taken, with large payloads whose places are known, and how they are taken."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from xxhash import xxh3_128_intdigest

from experience_buffer_server.runtime.memory_arena import BLOCK_BYTES
from experience_buffer_server.store.interface import (
    ConsumerRow,
    GroupRow,
    LeaseRow,
    ProgressRow,
    cut_of,
)
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import Extent, Table, seal
from experience_buffer_server.store.lmdb.large.payload_file import PayloadWriter
from experience_buffer_server.store.lmdb.snapshots.copy_process import Answer, take
from experience_buffer_server.store.payload import checksum
from tests.unit.store.conftest import MEBI, OpenStore, buffer_row, make_record
from tests.unit.store.lmdb.large_by_hand import changing, payloads

_bytes = random.Random(5).randbytes
LITTLE = bytes(range(256)) * 67
SMALL, OTHER, HUGE = _bytes(65_537), _bytes(100_000), _bytes(9 * MEBI + 5)
JUNK = _bytes(3 * MEBI)
HOLE_BYTES = 40 * MEBI
PLACES = {
    "3/small/5/7/a": (0, SMALL),
    "3/other/5/7/a": (69_632, OTHER),
    "3/huge/5/7/a": (HOLE_BYTES, HUGE),
}
"""By uid. The second begins behind the first one's last block; the third is larger than a piece."""
STORED_BYTES = 69_632 + 102_400 + 9 * MEBI + BLOCK_BYTES
NUM = 13
WANTED = {uid: payload for uid, (_, payload) in PLACES.items()} | {
    f"3/little{seq}/5/7/a": LITTLE for seq in range(len(PLACES) + 1, NUM + 1)
}
"""Payloads by uid; their seqs count from 1."""


@pytest.fixture
async def filled(path: Path, open_store: OpenStore) -> Path:
    """A closed store of two buffers: 3 has rows in every table and a trainer at step 17, 4 is empty.

    Between the large payloads is what is left of a removed one.
    """
    store = await open_store(initial_map_bytes=4 * MEBI)
    batch = store.batch()
    for buffer_id in (3, 4):
        batch.put_buffer(buffer_row(buffer_id))
    for seq, (uid, payload) in enumerate(WANTED.items(), start=1):
        one = make_record(
            seq,
            uid=uid,
            cut=cut_of("3", uid.split("/")[1]),
            digest_number=xxh3_128_intdigest(payload),
            payload_bytes=len(payload),
            fields=0,
        )
        if uid in PLACES:
            batch.put_record(3, one)
        else:
            batch.append(3, one, payload)
    batch.append(3, make_record(NUM + 1, tombstone=True, payload_bytes=0, group_id=0), b"")
    batch.put_last_seq(3, NUM + 1)
    batch.put_group(3, GroupRow(id=11, key="3/math", size=NUM, open_time=5.0, closed="whole"))
    batch.put_lease(3, LeaseRow(id=1, consumer="trainer", units=[], deadline=9.0, state="acked"))
    batch.put_lease(3, LeaseRow(id=2, consumer="trainer", units=[[1]], deadline=9.0))
    batch.put_progress(3, ProgressRow(seq=1, acked=["trainer"]))
    batch.put_consumer(3, ConsumerRow(name="trainer", last_step=17, safe_step=7))
    batch.remember(3, "uid", "x", b"digest", 5.0)
    await store.commit(batch)
    await store.close()
    removed = disk.freed_key(10**9, 20 * MEBI)
    rows = [(Table.FREED, removed, len(JUNK).to_bytes(8, "big"))]
    with closing(PayloadWriter(path)) as writer:
        writer.write([(20 * MEBI, memoryview(JUNK))])
        for uid, (offset, payload) in PLACES.items():
            writer.write([(offset, memoryview(payload))])
            extent = Extent(offset, len(payload), checksum(payload))
            rows.append((Table.EXTENTS, disk.payload_key(3, uid), disk.encode_extent(extent)))
        writer.sync()
    with changing(path, map_bytes=8 * MEBI) as (txn, tables):
        for table, key, value in rows:
            txn.put(key, seal(table, key, value), db=tables[table])
    return path


@pytest.fixture
def taken(filled: Path, tmp_path: Path) -> Path:
    """A snapshot of it."""
    return tmp_path / "to" / take(filled, tmp_path / "to").name


def payloads_of(path: Path) -> dict[str, bytes]:
    """By uid, what a store without a writer has: compared with its checksums."""
    return {key[4:].decode(): payload for key, payload in payloads(path).items()}


def names(folder: Path) -> list[str]:
    """What lies in a folder, but for the file that locks it."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def disk_bytes(path: Path) -> int:
    """What a file takes on the disk."""
    return path.stat().st_blocks * 512


def run_copy(data: Path, to: Path, *, max_file_bytes: int = 0) -> Answer:
    """Take a snapshot in a process of its own."""
    command = [sys.executable, "-m", "experience_buffer_server.store.lmdb.snapshots.copy_process"]
    command += ["--data", str(data), "--to", str(to), "--nice", "3"]
    if max_file_bytes:
        limit = f'ulimit -f {max_file_bytes // 512}; exec "$@"'
        command = ["/bin/sh", "-c", limit, "sh", *command]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        return Answer.model_validate_json(process.stdout.read())
