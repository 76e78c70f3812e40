"""With durability "interval": what was answered gets to the disk, whoever dies."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import closing
from pathlib import Path

import msgpack

from experience_buffer_server.store.interface import LeaseRow
from experience_buffer_server.store.lmdb import writer_protocol
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.engine import Engine
from experience_buffer_server.store.lmdb.writer_inbox import Inbox
from experience_buffer_server.store.lmdb.writer_process import _Loop
from tests.faults.shim import Faults
from tests.unit.store.conftest import MEBI, MakeRecord, OpenStore

LONG_SECONDS = 1e6


class NotingEngine(Engine):
    """Counts its syncs."""

    num_syncs = 0

    def sync(self) -> None:
        super().sync()
        self.num_syncs += 1


def test_an_owner_that_dies_before_the_answer_takes_nothing_with_it(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    engine = NotingEngine(tmp_path, sync=False, initial_map_bytes=MEBI, max_map_bytes=64 * MEBI)
    with closing(engine), theirs, closing(Inbox(theirs)) as inbox:
        document = msgpack.packb((1, 0, [(int(Table.META), b"key", b"value")], (), ()))
        with ours:
            ours.sendall(writer_protocol.PARTS.pack(len(document), 0, 0) + document)
        assert _Loop(theirs, inbox, engine, LONG_SECONDS).run() == 0
        assert engine.num_syncs == 1


async def test_what_a_killed_writer_left_to_the_system_is_on_disk_after_the_next_start(
    open_store: OpenStore, path: Path, faults: Faults
) -> None:
    store = await open_store(durability="interval", interval_seconds=LONG_SECONDS)
    before = faults.num_syncs
    batch = store.batch()
    batch.put_lease(1, LeaseRow(id=1, consumer="c", units=[], deadline=1.0))
    await store.commit(batch)
    assert faults.num_syncs == before, "it was answered, and the disk doesn't have it"
    os.kill(int((path / "writer.lock").read_text().split()[0]), signal.SIGKILL)
    await store.failed.wait()
    await store.close()
    await open_store()
    assert faults.num_syncs > before


async def test_a_large_payload_that_a_killed_writer_left_is_on_disk_after_the_next_start(
    open_store: OpenStore, path: Path, make_record: MakeRecord, faults: Faults
) -> None:
    store = await open_store(durability="interval", interval_seconds=LONG_SECONDS)
    batch = store.batch()
    batch.append(1, make_record(1), bytes(MEBI))
    await store.commit(batch)
    assert faults.num_payload_writes > faults.num_payload_syncs == 0, "the disk doesn't have it"
    os.kill(int((path / "writer.lock").read_text().split()[0]), signal.SIGKILL)
    await store.failed.wait()
    await store.close()
    await open_store()
    assert faults.num_payload_syncs > 0
