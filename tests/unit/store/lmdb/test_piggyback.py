"""Small batches that commit together with appends: when they go, in which order, and with whom."""

from __future__ import annotations

import asyncio
import time

import pytest

from experience_buffer_server.store.interface import (
    AdvantageRow,
    DamagedRecordError,
    WriteBatch,
)
from experience_buffer_server.store.lmdb import commit_backlog
from experience_buffer_server.store.lmdb.store import LmdbStore
from tests.unit.store.conftest import OpenStore, make_record


@pytest.fixture
async def store(open_store: OpenStore) -> LmdbStore:
    return await open_store()


def appending(store: LmdbStore, seq: int) -> WriteBatch:
    batch = store.batch()
    batch.append(1, make_record(seq), b"payload")
    return batch


def advantages(store: LmdbStore, seq: int, content: bytes = b"1234") -> WriteBatch:
    batch = store.batch()
    batch.put_advantages(1, AdvantageRow(seq=seq, advantages=content, returns=content, details={}))
    return batch


def stored(store: LmdbStore, seq: int) -> bytes | None:
    (row,) = store.advantages(1, [seq])
    assert not isinstance(row, DamagedRecordError)
    return None if row is None else row.advantages


async def test_without_appends_it_goes_at_once(store: LmdbStore) -> None:
    await store.ride(advantages(store, 1))
    assert stored(store, 1) == b"1234"


async def test_it_shares_the_next_append(store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    # However long a busy machine takes between the two appends.
    monkeypatch.setattr(commit_backlog, "_RIDE_SECONDS", 60.0)
    await store.commit(appending(store, 1))
    before = store.stats.num_batches
    riding = asyncio.ensure_future(store.ride(advantages(store, 1)))
    await asyncio.sleep(0)
    assert not riding.done()
    await asyncio.gather(store.commit(appending(store, 2)), riding)
    assert stored(store, 1) == b"1234"
    assert store.stats.num_batches == before + 1


async def test_it_waits_only_for_a_moment(store: LmdbStore) -> None:
    await store.commit(appending(store, 1))
    started = time.monotonic()
    await store.ride(advantages(store, 1))
    assert time.monotonic() - started < 10
    assert stored(store, 1) == b"1234"
