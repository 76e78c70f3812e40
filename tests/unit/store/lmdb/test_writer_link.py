"""Payloads on their way to the writer process: joined in shared memory, or sent where there is none."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from experience_buffer_server.runtime import memory_arena
from experience_buffer_server.runtime.memory_arena import BLOCK_BYTES, Place, whole_blocks
from experience_buffer_server.store.batch import Kind
from experience_buffer_server.store.interface import LARGE_PAYLOAD_BYTES, Record, StoreFullError
from experience_buffer_server.store.lmdb import writer_protocol
from experience_buffer_server.store.lmdb.large.payload_file import Aligned
from experience_buffer_server.store.lmdb.large.writes import large_bytes
from experience_buffer_server.store.lmdb.store import LmdbStore
from experience_buffer_server.store.lmdb.writer_link import Outbox, start_writer
from experience_buffer_server.store.lmdb.writer_process import attach
from experience_buffer_server.store.lmdb.writer_protocol import LARGE_BYTES
from experience_buffer_server.store.payload import Scattered
from tests.unit.store.conftest import MEBI, OpenStore, committing, make_record

NUM_BLOCKS = 64


@pytest.fixture
def box() -> Iterator[Outbox]:
    box = Outbox(NUM_BLOCKS * BLOCK_BYTES)
    yield box
    box.close()
    box.close()


def theirs(box: Outbox) -> memoryview:
    """The memory as the writer process has it."""
    return attach(os.dup(box.descriptor))


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, 100_003])
def test_pieces_are_joined_with_zeros_up_to_the_block(box: Outbox, num_bytes: int) -> None:
    old = box.put([b"\xff" * NUM_BLOCKS * BLOCK_BYTES])
    assert old is not None
    box.take_out([old])
    payload = os.urandom(num_bytes)
    place = box.put([payload[:1], memoryview(payload)[1:1], memoryview(payload)[1:]])
    assert place is not None
    assert place.start % BLOCK_BYTES == 0
    assert place.end - place.start == whole_blocks(num_bytes)
    with theirs(box) as memory:
        found = bytes(memory[place.start : place.end])
    assert found == payload + bytes(whole_blocks(num_bytes) - num_bytes)


def test_places_never_overlap_and_what_is_taken_out_serves_again(box: Outbox) -> None:
    places = [box.put([bytes([number]) * BLOCK_BYTES]) for number in range(NUM_BLOCKS)]
    assert box.put([b"x"]) is None
    assert box.free_bytes == 0
    with theirs(box) as memory:
        for number, place in enumerate(places):
            assert place is not None
            assert bytes(memory[place.start : place.end]) == bytes([number]) * BLOCK_BYTES
    box.take_out([*places[10:13], None, *places[40:43]])
    assert box.put([bytes(4 * BLOCK_BYTES)]) is None
    again = box.put([bytes(2 * BLOCK_BYTES)])
    assert again is not None
    # The first that there is: so that few pages are ever used.
    assert (again.start, again.end) == (10 * BLOCK_BYTES, 12 * BLOCK_BYTES)
    assert box.free_bytes == 4 * BLOCK_BYTES


def test_a_closed_one_has_no_room_and_leaves_the_writer_its_memory(box: Outbox) -> None:
    place = box.put([b"payload"])
    assert place is not None
    memory = theirs(box)
    box.close()
    assert bytes(memory[place.start : place.start + 7]) == b"payload"
    assert box.put([b"x"]) is None
    assert box.descriptor < 0


@pytest.mark.parametrize("refusing", ["memfd_create", "ftruncate"])
def test_a_system_without_such_memory_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusing: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, refusing, refuse)
    num_open = len(os.listdir("/proc/self/fd"))
    with caplog.at_level(logging.WARNING):
        box = Outbox()
    assert "go to the writer process over its socket" in caplog.text
    assert "Cannot allocate memory" in caplog.text
    assert box.descriptor < 0
    assert box.put([b"x"]) is None
    box.close()
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert len(attach(-1)) == 0


def test_where_the_system_has_no_more_memory_there_is_no_room(
    box: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that promises too much ends whoever uses what it has promised."""
    real, room = os.posix_fallocate, box.free_bytes
    refused = [True]

    def allocate(descriptor: int, start: int, num_bytes: int) -> None:
        if refused[0]:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        real(descriptor, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(memory_arena, "_STEP_BYTES", 3 * BLOCK_BYTES)
    assert box.put([b"x"]) is None
    assert box.free_bytes == room
    refused[0] = False
    assert box.put([bytes(4 * BLOCK_BYTES)]) == Place(0, 4 * BLOCK_BYTES)
    assert os.fstat(box.descriptor).st_blocks * 512 == 6 * BLOCK_BYTES
    refused[0] = True
    assert box.put([bytes(2 * BLOCK_BYTES)]) is not None
    assert box.put([b"x"]) is None
    refused[0] = False
    assert box.put([bytes(room - 6 * BLOCK_BYTES)]) is not None
    assert box.free_bytes == 0


def test_what_can_t_be_joined_leaves_its_room(box: Outbox) -> None:
    room, large = box.free_bytes, bytes(LARGE_PAYLOAD_BYTES)
    with pytest.raises(ValueError, match="different structures"):
        box.put_all([[large], [b"small"], [large, memoryview(large).cast("I")]])
    assert box.free_bytes == room
    assert box.put_all([[large], [b"small"]]) == [Place(0, len(large)), None]


def test_what_a_payload_takes_in_the_file_is_whole_blocks() -> None:
    blocks = memoryview(bytes(25 * BLOCK_BYTES))
    assert large_bytes(Aligned(blocks[: 24 * BLOCK_BYTES + 1], blocks)) == len(blocks)


# --- beneath a store


def in_pieces(payload: bytes) -> Scattered:
    view = memoryview(payload)
    return Scattered([payload[:9], view[9:9], view[9:70_000], view[70_000:]])


async def append(store: LmdbStore, records: list[Record], payloads: list[bytes]) -> None:
    async with committing(store) as batch:
        for record, payload in zip(records, payloads, strict=True):
            batch.append(1, record, in_pieces(payload) if record.seq % 3 else payload)


async def stored(store: LmdbStore, records: list[Record]) -> list[object]:
    uids = [record.uid for record in records]
    async with store.fetched(1, uids):
        return list(store.payloads(1, uids))


@pytest.mark.parametrize("num_bytes", [0, MEBI, 3 * MEBI, 32 * MEBI])
async def test_payloads_take_what_room_there_is_and_the_socket(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """In one batch and in many at once, of all sizes, in the outbox and beside it."""
    real = Outbox.__init__
    if num_bytes:
        monkeypatch.setattr(Outbox, "__init__", lambda box: real(box, num_bytes))
    else:
        monkeypatch.delattr(os, "memfd_create")
    store = await open_store()
    sizes = [*(0, 1, 100, 20_000, 129_083, MEBI - 7, 3 * MEBI + 7)] * 5
    for size in (LARGE_BYTES, LARGE_PAYLOAD_BYTES):
        sizes += [size - 1, size, size + 1] * 5
    random.Random(num_bytes).shuffle(sizes)
    records = [make_record(seq) for seq in range(1, len(sizes) + 1)]
    payloads = [os.urandom(size) for size in sizes]
    commits = [
        append(store, records[start : start + 7], payloads[start : start + 7])
        for start in range(0, len(sizes), 7)
    ]
    committing = asyncio.gather(*commits)
    await asyncio.sleep(0)
    # Whoever waits for the backlog to become short waits for all of it.
    assert store.backlog.num_bytes > sum(sizes)
    await committing
    assert await stored(store, records) == payloads
    assert store._outbox.free_bytes == num_bytes
    assert store.backlog.num_bytes == 0


async def test_what_could_not_be_stored_leaves_its_room(open_store: OpenStore) -> None:
    store = await open_store(initial_map_bytes=8 * MEBI, max_map_bytes=8 * MEBI)
    room = store._outbox.free_bytes
    records = [make_record(seq) for seq in range(1, 21)]
    batches = [append(store, [record], [os.urandom(MEBI)]) for record in records]
    found = await asyncio.gather(*batches, return_exceptions=True)
    assert {type(one) for one in found} == {type(None), StoreFullError}
    assert store._outbox.free_bytes == room
    kept = [record for record, one in zip(records, found, strict=True) if one is None]
    assert all(isinstance(payload, bytes) for payload in await stored(store, kept))


async def test_a_batch_that_can_t_be_packed_leaves_its_room(open_store: OpenStore) -> None:
    store = await open_store()
    room = store._outbox.free_bytes
    batch = store.batch()
    batch.append(1, make_record(1), in_pieces(bytes(MEBI)))
    batch.operations.append((int(Kind.RECORD), 1, 2, object()))
    with pytest.raises(TypeError):
        store.commit(batch)
    assert store._outbox.free_bytes == room
    await append(store, [make_record(2)], [bytes(MEBI)])


def test_a_writer_that_can_t_have_the_memory_says_so(tmp_path: Path) -> None:
    unmappable = os.open(tmp_path, os.O_RDONLY)
    try:
        process, connection = start_writer(
            tmp_path / "store",
            initial_map_bytes=MEBI,
            max_map_bytes=MEBI,
            sync_interval_seconds=0.0,
            lock_timeout_seconds=1.0,
            outbox=unmappable,
        )
    finally:
        os.close(unmappable)
    with connection:
        connection.settimeout(30.0)
        said = connection.recv(MEBI)
    assert process.wait(30.0) == 1
    ready = writer_protocol.decode_ready(said[writer_protocol.LENGTH.size :])
    assert ready.status == writer_protocol.Status.FAILED
    assert "can't have the memory that large payloads come in: [Errno" in ready.message


async def test_the_writer_goes_on_with_what_a_dead_owner_has_sent(open_store: OpenStore) -> None:
    """It has the memory for itself then."""
    store = await open_store()
    payloads = [os.urandom(MEBI + number) for number in range(4)]
    records = [make_record(seq) for seq in range(1, 5)]
    process = store._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    commits = [
        asyncio.ensure_future(append(store, [record], [payload]))
        for record, payload in zip(records, payloads, strict=True)
    ]
    await asyncio.sleep(0)
    assert store._transport is not None
    assert store._transport.get_write_buffer_size() == 0
    store._transport.close()
    store._outbox.close()
    os.kill(process.pid, signal.SIGCONT)
    await asyncio.gather(*commits, return_exceptions=True)
    await store.close()
    store = await open_store()
    assert await stored(store, records) == payloads
