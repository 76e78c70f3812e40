"""Stores with large payloads whose places are known: made without a server."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from xxhash import xxh3_128_digest

from experience_buffer_server.runtime.memory_arena import BLOCK_BYTES
from experience_buffer_server.store.interface import Record, cut_of
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import Extent, Table
from experience_buffer_server.store.lmdb.disk.seal import seal
from experience_buffer_server.store.lmdb.large.payload_file import PayloadWriter
from experience_buffer_server.store.payload import checksum
from tests.unit.store.conftest import MEBI, MakeBuffer, OpenStore, record
from tests.unit.store.lmdb import large_by_hand
from tests.unit.store.lmdb.large_by_hand import changing

_bytes = random.Random(5).randbytes
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
WANTED = {uid: payload for uid, (_, payload) in PLACES.items()}


async def fill(path: Path, open_store: OpenStore, buffer_row: MakeBuffer) -> Path:
    """A closed store with large payloads, and what is left of removed ones between them."""
    store = await open_store(initial_map_bytes=4 * MEBI)
    batch = store.batch()
    batch.put_buffer(buffer_row(3))
    for seq, (uid, payload) in enumerate(WANTED.items(), start=1):
        batch.put_record(3, _record(seq, uid, payload))
    await store.commit(batch)
    await store.close()
    _write(path, PLACES | {"removed": (20 * MEBI, JUNK)})
    _store(path, PLACES)
    return path


def _record(seq: int, uid: str, payload: bytes) -> Record:
    return record(
        seq,
        uid=uid,
        cut=cut_of("3", uid.split("/")[1]),
        digest_number=int.from_bytes(xxh3_128_digest(payload), "big"),
        group_id=0,
        payload_bytes=len(payload),
        fields=0,
    )


def _write(path: Path, payloads: Mapping[str, tuple[int, bytes]]) -> None:
    writer = PayloadWriter(path)
    writer.write([(offset, memoryview(payload)) for offset, payload in payloads.values()])
    writer.sync()
    writer.close()


def _store(path: Path, payloads: Mapping[str, tuple[int, bytes]]) -> None:
    """Say in a closed store where its large payloads lie."""
    freed = disk.freed_key(10**9, 20 * MEBI)
    rows = [(Table.FREED, freed, len(JUNK).to_bytes(8, "big"))]
    for uid, (offset, payload) in payloads.items():
        extent = Extent(offset, len(payload), checksum(payload))
        rows.append((Table.EXTENTS, disk.payload_key(3, uid), disk.encode_extent(extent)))
    with changing(path, map_bytes=8 * MEBI) as (txn, tables):
        for table, key, value in rows:
            txn.put(key, seal(table, key, value), db=tables[table])


def payloads_of(path: Path) -> dict[str, bytes]:
    """By uid, what a store without a writer has: compared with its checksums."""
    return {key[4:].decode(): payload for key, payload in large_by_hand.payloads(path).items()}


def names(folder: Path) -> list[str]:
    """What lies in a folder, but for the file that locks it."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def disk_bytes(path: Path) -> int:
    """What a file takes on the disk."""
    return path.stat().st_blocks * 512
