"""With durability "interval": what was answered gets to the disk, whoever dies."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import closing
from pathlib import Path

import msgpack
import pytest

from experience_buffer_server.store.interface import LeaseRow
from experience_buffer_server.store.lmdb import writer_protocol
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.engine import Engine
from experience_buffer_server.store.lmdb.writer_inbox import Inbox
from experience_buffer_server.store.lmdb.writer_process import _Loop
from tests.faults.shim import Faults
from tests.unit.store.conftest import (
    MEBI,
    OpenStore,
    buffer_row,
    committing,
    make_record,
    writer_pid,
)

LONG_SECONDS = 1e6


def test_an_owner_that_dies_before_the_answer_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []
    ours, theirs = socket.socketpair()
    engine = Engine(tmp_path, sync=False, initial_map_bytes=MEBI, max_map_bytes=64 * MEBI)
    monkeypatch.setattr(engine, "sync", lambda: synced.append(True))
    with closing(engine), theirs, closing(Inbox(theirs)) as inbox:
        document = msgpack.packb((1, 0, [(int(Table.META), b"key", b"value")], (), ()))
        with ours:
            ours.sendall(writer_protocol.PARTS.pack(len(document), 0, 0) + document)
        assert _Loop(theirs, inbox, engine, LONG_SECONDS).run() == 0
        assert synced == [True]


@pytest.mark.parametrize("num_bytes", [0, 100, MEBI], ids=["lease", "payload", "large payload"])
async def test_what_a_killed_writer_left_to_the_system_is_on_disk_after_the_next_start(
    open_store: OpenStore, path: Path, faults: Faults, num_bytes: int
) -> None:
    store = await open_store(durability="interval", interval_seconds=LONG_SECONDS)
    async with committing(store) as batch:
        batch.put_buffer(buffer_row(1))
    before = faults.num_syncs
    async with committing(store) as batch:
        if num_bytes:
            batch.append(1, make_record(1), bytes(num_bytes))
        else:
            batch.put_lease(1, LeaseRow(id=1, consumer="c", units=[], deadline=1.0))
    assert faults.num_syncs == before, "it was answered, and the disk doesn't have it"
    is_large = num_bytes == MEBI
    assert (faults.num_payload_writes > 0, faults.num_payload_syncs) == (is_large, 0)
    os.kill(writer_pid(path), signal.SIGKILL)
    await store.failed.wait()
    await store.close()
    store = await open_store(durability="interval", interval_seconds=LONG_SECONDS)
    assert faults.num_syncs > before
    assert (faults.num_payload_syncs > 0) == is_large
    (state,) = store.load()
    assert (len(state.records), len(state.leases)) == ((1, 0) if num_bytes else (0, 1))


async def test_an_interval_is_longer_than_nothing(open_store: OpenStore) -> None:
    with pytest.raises(ValueError, match="interval_seconds"):
        await open_store(durability="interval", interval_seconds=0.0)
