"""Values that travel beside the document of a batch: which these are, and that they arrive whole."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experience_buffer_server.store.lmdb import writer_protocol
from experience_buffer_server.store.lmdb.disk.format import (
    SEAL_BYTES,
    Table,
    is_sound,
    seal,
    seal_in_place,
)
from experience_buffer_server.store.lmdb.writer_protocol import PARTS, SentOperation
from tests.unit.store.conftest import MEBI, OpenStore, append, make_record, writer_pid


async def test_half_a_frame_is_not_written(
    open_store: OpenStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All of it takes the socket.
    monkeypatch.delattr(os, "memfd_create")
    store = await open_store()
    pid = writer_pid(path)
    os.kill(pid, signal.SIGSTOP)
    pending = [
        asyncio.ensure_future(append(store, make_record(seq), payload=bytes(24 * MEBI)))
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
