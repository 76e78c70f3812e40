"""Values that travel beside the document of a batch: which these are, and that they arrive whole."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experience_buffer_server.store.interface import Record
from experience_buffer_server.store.lmdb import writer_protocol
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.disk.seal import SEAL_BYTES, is_sound, seal, seal_in_place
from experience_buffer_server.store.lmdb.store import LmdbStore
from experience_buffer_server.store.lmdb.writer_protocol import LARGE_BYTES, PARTS, SentOperation
from experience_buffer_server.store.payload import Scattered
from tests.unit.store.conftest import MEBI, MakeRecord, OpenStore

SIZES = (0, 1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 7919, 129_083, 3 * MEBI + 7)


async def append(
    store: LmdbStore, records: list[Record], payloads: Sequence[bytes | Scattered]
) -> None:
    batch = store.batch()
    for record, payload in zip(records, payloads, strict=True):
        batch.append(1, record, payload)
    await store.commit(batch)


def in_pieces(payload: bytes) -> Scattered:
    """As the compiled reader has a payload: some bytes of its own, and views of the request."""
    view = memoryview(payload)
    return Scattered([payload[:7], view[7:7], view[7:9], view[9:]])


@pytest.mark.parametrize("view", [bytes, in_pieces])
async def test_values_of_all_sizes_are_read_back(
    open_store: OpenStore, make_record: MakeRecord, view: Callable[[bytes], bytes | Scattered]
) -> None:
    store = await open_store(initial_map_bytes=MEBI)
    payloads = [os.urandom(size) for size in SIZES]
    records = [make_record(seq) for seq in range(1, len(SIZES) + 1)]
    await append(store, records, [view(payload) for payload in payloads])
    assert store.payloads(1, [record.uid for record in records]) == payloads
    assert store.backlog.num_bytes == 0


async def test_batches_of_one_turn_keep_their_values(
    open_store: OpenStore, make_record: MakeRecord
) -> None:
    store = await open_store(initial_map_bytes=MEBI)
    records = [make_record(seq) for seq in range(1, 61)]
    payloads = [os.urandom(SIZES[seq % 7]) for seq in range(60)]
    commits = [
        append(store, records[start : start + 3], payloads[start : start + 3])
        for start in range(0, 60, 3)
    ]
    await asyncio.gather(*commits)
    assert store.payloads(1, [record.uid for record in records]) == payloads


async def test_a_value_is_replaced(open_store: OpenStore, make_record: MakeRecord) -> None:
    store = await open_store()
    record, payload = make_record(1), os.urandom(2 * LARGE_BYTES)
    await append(store, [record], [b"small"])
    batch = store.batch()
    batch.replace(1, record, payload)
    await store.commit(batch)
    assert store.payloads(1, [record.uid]) == [payload]


async def test_half_a_frame_is_not_written(
    open_store: OpenStore, make_record: MakeRecord, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All of it takes the socket.
    monkeypatch.delattr(os, "memfd_create")
    store = await open_store()
    pid = int((path / "writer.lock").read_text().split()[0])
    os.kill(pid, signal.SIGSTOP)
    pending = [
        asyncio.ensure_future(append(store, [make_record(seq)], [bytes(24 * MEBI)]))
        for seq in (1, 2)
    ]
    await asyncio.sleep(0)
    assert store._transport is not None
    # What the socket doesn't hold is lost with it.
    store._transport.abort()
    os.kill(pid, signal.SIGCONT)
    results = await asyncio.gather(*pending, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["StoreFailedError"] * 2
    await store.close()
    store = await open_store()
    assert store.payloads(1, [make_record(seq).uid for seq in (1, 2)]) == [None, None]


rows = st.lists(st.tuples(st.binary(max_size=9), st.none() | st.binary(max_size=40)), max_size=9)


@given(rows, st.integers(0, 50))
def test_frames_are_read_as_they_were_written(
    values: list[tuple[bytes, bytes | None]], least: int
) -> None:
    operations: list[SentOperation] = []
    large: list[bytes] = []
    for key, value in values:
        if value is None or len(value) < least:
            operations.append((3, key, value))
        else:
            operations.append((3, key, len(value)))
            large.append(value)
    pieces = writer_protocol.encode_request(
        7, 11, operations, large=[[value] for value in large], pack=msgpack.packb
    )
    document_bytes, large_bytes, _ = PARTS.unpack(pieces[0])
    body = memoryview(bytearray(b"".join(pieces[1:])))
    assert len(body) == document_bytes + large_bytes
    read = writer_protocol.decode_request(
        body[:document_bytes], body[document_bytes:], memoryview(b"")
    )
    assert (read.number, read.append_bytes) == (7, 11)
    found = [
        (key, bytes(value[:-SEAL_BYTES]) if isinstance(value, memoryview) else value)
        for _, key, value in read.operations
    ]
    assert found == values


@given(st.binary(max_size=9), st.binary(max_size=99))
def test_a_row_sealed_in_place_is_the_same(key: bytes, value: bytes) -> None:
    row = memoryview(bytearray(value + bytes(SEAL_BYTES)))
    for _ in range(2):  # As often as its transaction is tried.
        assert seal_in_place(Table.PAYLOADS, key, row) == seal(Table.PAYLOADS, key, value)
    assert is_sound(Table.PAYLOADS, key, row)
