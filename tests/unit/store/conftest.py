"""Rows and stores for the tests of the store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from experience_buffer_server.store.interface import BufferRow, Record, Store, WriteBatch, cut_of
from experience_buffer_server.store.lmdb.store import LmdbStore
from tests.faults.shim import Faults, build

OpenStore = Callable[..., Awaitable[LmdbStore]]

MEBI = 1 << 20


def make_record(seq: int, **changes: Any) -> Record:
    values: dict[str, Any] = {
        "seq": seq,
        "uid": f"3/math-{seq}/5/7/é",
        "cut": cut_of("3", f"math-{seq}"),
        "digest_number": int.from_bytes(range(16), "big"),
        "group_id": 11,
        "tombstone": False,
        "reward": 0.13,
        "response_tokens": 17,
        "payload_bytes": 19,
        "min_version": 23,
        "max_version": 29,
        "push_time": 31.5,
        "note": "",
        "fields": 79,
        "priority": 8.3,
        "version": 89,
    }
    return Record(**(values | changes))


def buffer_row(buffer_id: int = 1, **changes: Any) -> BufferRow:
    values: dict[str, Any] = {
        "id": buffer_id,
        "name": f"buffer-{buffer_id}",
        "config": '{"group_size": 8}',
        "policy_version": 37,
        "create_time": 41.25,
        "moments": "moments",
    }
    return BufferRow(**(values | changes))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nested" / "store"


@pytest.fixture
async def open_store(path: Path) -> AsyncIterator[OpenStore]:
    """Opens stores at `path` and closes them at the end."""
    opened: list[LmdbStore] = []

    async def open_(**options: Any) -> LmdbStore:
        store = await LmdbStore.open(options.pop("at", path), **options)
        opened.append(store)
        return store

    yield open_
    for store in opened:
        await store.close()


@pytest.fixture
def faults(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """The disk under the stores at `path`, whose writes are noted and may fail."""
    made = Faults(build(tmp_path), path, tmp_path / "faults")
    for name, value in made.environment(notes_writes=True).items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()


@asynccontextmanager
async def committing(store: Store) -> AsyncIterator[WriteBatch]:
    """A batch that is committed at the end of the block."""
    batch = store.batch()
    yield batch
    await store.commit(batch)


async def append(
    store: Store, *records: Record, payload: bytes = b"payload", buffer_id: int = 1
) -> None:
    """Append records in one batch, and wait for it."""
    async with committing(store) as batch:
        for each in records:
            batch.append(buffer_id, each, payload)


def writer_pid(path: Path) -> int:
    """Of the writer process that has the store at `path`."""
    return int((path / "writer.lock").read_text().split()[0])


async def fill(store: Store, buffer: BufferRow, records: Iterable[Record] = ()) -> None:
    """Store a buffer with records, each with a payload of its own."""
    async with committing(store) as batch:
        batch.put_buffer(buffer)
        for record in records:
            batch.append(buffer.id, record, b"payload of " + record.uid.encode())
