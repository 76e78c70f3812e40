"""A store of some of everything, small and large, for the tests of its check."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import xxhash

from experience_buffer_server.store.interface import (
    AdvantageRow,
    ConsumerRow,
    GroupRow,
    LeaseRow,
    ProgressRow,
    Record,
)
from experience_buffer_server.store.lmdb.disk.format import payload_key
from tests.unit.store.conftest import OpenStore, buffer_row, make_record
from tests.unit.store.lmdb.large_by_hand import move_out

NUM: Final = 23
"""A tombstone; those before it are small and computed."""
LARGE: Final = {24: 65_536, 25: 65_537, 26: 300_000, 27: 5 << 20}
"""Bytes of those behind it."""


def uid(seq: int) -> str:
    return f"3/math-{seq}/5/7/é"


def key_of(seq: int) -> bytes:
    return payload_key(1, uid(seq))


def payload(seq: int) -> bytes:
    text = f"payload {seq};".encode()
    return (text * (5 << 17))[: LARGE[seq]] if seq in LARGE else text * (seq * 37)


def append(batch: Any, seq: int, /, **changes: Any) -> Record:
    """An experience that fits its payload; two of them are a group."""
    given = {
        "digest_number": xxhash.xxh3_128_intdigest(payload(seq)),
        "payload_bytes": len(payload(seq)),
        "group_id": (seq + 1) // 2,
        "fields": 0,
    }
    record = make_record(**({"seq": seq} | given | changes))
    batch.append(1, record, payload(seq))
    return record


@pytest.fixture
async def filled(open_store: OpenStore, path: Path) -> Path:
    """A closed store with some of everything."""
    store = await open_store()
    batch = store.batch()
    batch.put_buffer(buffer_row(1))
    for seq in (*range(1, NUM), *LARGE):
        append(batch, seq)
        group = GroupRow(id=(seq + 1) // 2, key=str(seq), size=2, open_time=0.0, closed="whole")
        batch.put_group(1, group)
        if seq < NUM:
            row = AdvantageRow(
                seq=seq,
                advantages=b"\1\2\3\4" * seq,
                returns=b"\2" * 4 * seq,
                details={"mean_magnitude": seq / 7},
            )
            batch.put_advantages(1, row, magnitude=seq / 7)
    batch.append(1, make_record(NUM, tombstone=True, group_id=0, payload_bytes=0), b"")
    batch.put_lease(1, LeaseRow(id=1, consumer="trainer", units=[[3, 4]], deadline=9e9))
    batch.put_progress(1, ProgressRow(seq=5, acked=["trainer"]))
    batch.put_consumer(1, ConsumerRow(name="trainer", last_step=3))
    batch.put_last_seq(1, max(LARGE))
    batch.remember(1, "uid", "gone", b"digest", 73.5)
    await store.commit(batch)
    await store.close()
    move_out(path)
    return path
