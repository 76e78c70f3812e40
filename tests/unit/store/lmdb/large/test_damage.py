"""A large payload that a disk has changed is told of, and no other one is affected."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from experience_buffer_server.store.interface import DamagedRecordError, Record
from experience_buffer_server.store.lmdb.disk.format import payload_key
from experience_buffer_server.store.lmdb.store import LmdbStore
from tests.damaging import flip_large, large

NUM_BYTES = 300_001


async def test_one_bit_of_a_large_payload(
    path: Path, open_store: Callable[..., Awaitable[LmdbStore]], make_record: Callable[..., Record]
) -> None:
    store = await open_store()
    records = [make_record(number) for number in range(1, 4)]
    batch = store.batch()
    for record in records:
        batch.append(1, record, bytes([record.seq]) * NUM_BYTES)
    await store.commit(batch)
    await store.close()
    uids = [record.uid for record in records]
    key = payload_key(1, uids[1])
    assert large(path, key).num_bytes == NUM_BYTES
    flip_large(path, key, place=0.99999)
    first, second, third = (await open_store()).payloads(1, uids)
    assert (first, third) == (b"\x01" * NUM_BYTES, b"\x03" * NUM_BYTES)
    assert isinstance(second, DamagedRecordError)
    assert "payloads.bin" in str(second)
