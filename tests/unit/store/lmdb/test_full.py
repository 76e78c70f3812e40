"""A full map and a full disk: appends are refused, everything else goes on."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from experience_buffer_server.store.interface import LeaseRow, Record, StoreFullError
from experience_buffer_server.store.lmdb.store import LmdbStore
from tests.unit.store.conftest import MEBI, OpenStore, append, committing, make_record

PAYLOAD = os.urandom(6211)


async def remove(store: LmdbStore, records: list[Record]) -> None:
    async with committing(store) as batch:
        for record in records:
            batch.remove(1, record)
            batch.remember(1, "uid", record.uid, record.digest, 1.0)


async def fill(store: LmdbStore, first: int = 1) -> list[Record]:
    """Append until it is full; what was stored."""
    stored: list[Record] = []
    while True:
        records = [make_record(first + len(stored) + index) for index in range(8)]
        try:
            await append(store, *records, payload=PAYLOAD)
        except StoreFullError:
            return stored
        stored += records


async def drain_and_refill(store: LmdbStore, stored: list[Record]) -> list[Record]:
    """Lease and remove everything in small steps, then fill again."""
    for start in range(0, len(stored), 8):
        async with committing(store) as batch:
            batch.put_lease(1, LeaseRow(id=start, consumer="c", units=[[start]], deadline=1.0))
        await remove(store, stored[start : start + 8])
    await store.prune(1, 2.0, limit=10**6)
    return await fill(store, stored[-1].seq + 1000)


async def test_a_full_map_refuses_appends_and_lets_removals_pass(open_store: OpenStore) -> None:
    store = await open_store(initial_map_bytes=MEBI, max_map_bytes=16 * MEBI)
    stored = await fill(store)
    num_stored = len(stored)
    assert num_stored * 8192 > 12 * MEBI
    for _ in range(3):
        stored = await drain_and_refill(store, stored)
        assert len(stored) > 0.9 * num_stored
    assert store.stats.num_full > 0
    assert store.stats.map_bytes <= 17 * MEBI
    assert store.payloads(1, [record.uid for record in stored]) == [PAYLOAD] * len(stored)


async def test_a_push_too_large_fails_alone(open_store: OpenStore) -> None:
    store = await open_store(initial_map_bytes=MEBI, max_map_bytes=16 * MEBI)
    outcomes = await asyncio.gather(
        append(store, make_record(1), payload=PAYLOAD),
        append(store, make_record(2), payload=bytes(20 * MEBI)),
        append(store, make_record(3), payload=PAYLOAD),
        return_exceptions=True,
    )
    assert outcomes[0] is None
    assert isinstance(outcomes[1], StoreFullError)
    assert outcomes[2] is None
    uids = [make_record(seq).uid for seq in (1, 2, 3)]
    assert store.payloads(1, uids) == [PAYLOAD, None, PAYLOAD]


async def test_one_removal_may_free_a_full_map_at_once(open_store: OpenStore) -> None:
    store = await open_store(initial_map_bytes=MEBI, max_map_bytes=16 * MEBI)
    stored = await fill(store)
    await remove(store, stored)
    # The pages that it freed are not reusable in the very next transaction.
    await append(store, *map(make_record, range(10_000, 10_100)), payload=PAYLOAD)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount_point)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield mount_point
    subprocess.run(["umount", "--lazy", str(mount_point)], check=True)


async def test_a_full_disk_refuses_appends_and_goes_on_when_there_is_space(
    open_store: OpenStore, small_disk: Path
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2 * MEBI))
    store = await open_store(at=small_disk / "store", initial_map_bytes=MEBI)
    stored = await fill(store)
    num_stored = len(stored)
    assert num_stored > 100
    stored = await drain_and_refill(store, stored)
    assert len(stored) > 0.8 * num_stored
    ballast.unlink()
    more = await fill(store, 100_000)
    assert len(more) * 8192 > MEBI
    assert not store.failed.is_set()
    uids = [record.uid for record in stored + more]
    assert store.payloads(1, uids) == [PAYLOAD] * len(uids)
    await store.close()
    store = await open_store(at=small_disk / "store")
    assert store.payloads(1, uids) == [PAYLOAD] * len(uids)


async def test_a_disk_filled_by_others_is_no_reason_to_fail(
    open_store: OpenStore, small_disk: Path
) -> None:
    # The map's file is not ahead of its use here: what LMDB writes itself meets the full disk.
    store = await open_store(at=small_disk / "store")
    stored = list(map(make_record, range(1, 9)))
    await append(store, *stored, payload=PAYLOAD)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    batch = store.batch()
    for number in range(4000):
        batch.put_lease(1, LeaseRow(id=number, consumer="c" * 1000, units=[], deadline=1.0))
    with pytest.raises(StoreFullError, match="disk is full"):
        await store.commit(batch)
    assert not store.failed.is_set()
    await remove(store, stored)
    ballast.unlink()
    await append(store, *stored, payload=PAYLOAD)
    assert store.payloads(1, [record.uid for record in stored]) == [PAYLOAD] * 8
