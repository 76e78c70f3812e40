"""Committed rows: views beside copies, damage, and who waits where they may not be in memory."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import lmdb
import pytest

from experience_buffer_server.runtime.loop_turns import Turns
from experience_buffer_server.store.interface import (
    AdvantageRow,
    DamagedRecordError,
    Found,
    StoreFailedError,
)
from experience_buffer_server.store.lmdb import reader as lmdb_reader
from experience_buffer_server.store.lmdb.disk.format import Table, payload_key
from experience_buffer_server.store.lmdb.reader import LmdbReader
from experience_buffer_server.store.lmdb.row_reading import major_faults
from tests.damaging import flip, flip_large
from tests.unit.builders import World, push, uid, want
from tests.unit.store.conftest import OpenStore, append, committing, make_record

NUM_READS = 16


def computed(seq: int) -> AdvantageRow:
    return AdvantageRow(seq=seq, advantages=b"1234", returns=b"5678", details={})


@pytest.fixture
async def uids(path: Path, open_store: OpenStore) -> list[str]:
    """Three experiences, the second without advantages."""
    store = await open_store()
    uids = [f"3/math/5/7/{seq}" for seq in (1, 2, 3)]
    async with committing(store) as batch:
        for seq, each in enumerate(uids, 1):
            batch.append(1, make_record(seq, uid=each), content(seq))
            if seq != 2:
                batch.put_advantages(1, computed(seq))
    await store.close()
    return uids


def content(seq: int) -> bytes:
    return f"payload {seq}".encode() * 999


def test_views_hold_what_payloads_returns(path: Path, uids: list[str]) -> None:
    with LmdbReader(path) as reader:
        asked = [uids[2], "not there", uids[1], uids[0]]
        with reader.stored(1, asked, [3, 4, 2, 1]) as (views, rows):
            assert copied(views) == reader_bytes(asked)
            assert all(view is None or isinstance(view, memoryview) for view in views)
        assert rows == [computed(3), None, None, computed(1)]
        assert reader.payloads(1, asked) == reader_bytes(asked)
        assert rows == reader.advantages(1, [3, 4, 2, 1])


def copied(views: list[Found[memoryview]]) -> list[bytes | None]:
    assert not any(isinstance(view, DamagedRecordError) for view in views)
    return [bytes(view) if isinstance(view, memoryview) else None for view in views]


def reader_bytes(asked: list[str]) -> list[bytes | None]:
    known = {f"3/math/5/7/{seq}": content(seq) for seq in (1, 2, 3)}
    return [known.get(uid) for uid in asked]


def test_a_changed_row_is_named_and_its_neighbours_are_read(path: Path, uids: list[str]) -> None:
    flip(path, Table.PAYLOADS, payload_key(1, uids[1]))
    with LmdbReader(path) as reader, reader.stored(1, uids, [1, 2, 3]) as (views, _):
        first, second, third = views
        assert (first, third) == tuple(reader_bytes([uids[0], uids[2]]))
        assert isinstance(second, DamagedRecordError)
        assert str(second) == str(reader.payloads(1, uids)[1])


async def test_a_changed_bit_of_a_large_payload_costs_no_other_one(
    path: Path, open_store: OpenStore
) -> None:
    store = await open_store()
    records, payload = list(map(make_record, (1, 2, 3))), bytes(300_001)
    await append(store, *records, payload=payload)
    await store.close()
    uids = [record.uid for record in records]
    flip_large(path, payload_key(1, uids[1]), place=0.99999)
    first, second, third = (await open_store()).payloads(1, uids)
    assert first == third == payload
    assert isinstance(second, DamagedRecordError)
    assert "payloads.bin" in str(second)


def test_a_page_that_cannot_be_read_ends_only_the_first_attempt(
    path: Path, uids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB ends the transaction with it: each row is read again by itself."""

    attempts = itertools.count()

    def refuse_first(value: memoryview) -> memoryview:
        if next(attempts) == 0:
            raise lmdb.CorruptedError("page 3 is damaged")
        return value

    monkeypatch.setattr(lmdb_reader, "as_it_lies", refuse_first)
    with LmdbReader(path) as reader, reader.stored(1, uids, [1, 2, 3]) as (views, rows):
        assert copied(views) == reader_bytes(uids)
        assert rows == [computed(1), None, computed(3)]


def test_what_is_closed_reads_nothing(path: Path, uids: list[str]) -> None:
    with LmdbReader(path) as reader:
        assert None not in reader.payloads(1, uids)
    reader.close()
    with pytest.raises(StoreFailedError, match="closed"):
        reader.payloads(1, uids)


def test_an_error_of_the_block_is_its_own(path: Path, uids: list[str]) -> None:
    with LmdbReader(path) as reader:
        with pytest.raises(ZeroDivisionError), reader.stored(1, uids, [1, 2, 3]):
            raise ZeroDivisionError
        with pytest.raises(ValueError, match="bytes"), reader.stored(1, ["x" * 600], [1]):
            pass


# --- where reads may wait for the disk


async def test_a_thread_touches_what_may_wait_and_nobody_what_does_not(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store()
    async with committing(store) as batch:
        batch.remember(1, "uid", "a", b"digest", 1.0)
    threads: list[int] = []
    touch = store._touch

    def noted(*args: Any) -> None:
        threads.append(threading.get_ident())
        touch(*args)

    monkeypatch.setattr(store, "_touch", noted)
    monkeypatch.setattr(lmdb_reader, "major_faults", lambda: 0)
    for _ in range(NUM_READS + 3):
        await store.at_hand(1, remembered=[("uid", "a")])
    assert len(threads) == NUM_READS
    assert threading.get_ident() not in threads
    assert not store.reads_wait
    faults = iter(range(100))
    monkeypatch.setattr(lmdb_reader, "major_faults", lambda: next(faults))
    store.recall(1, "uid", ["a"])
    assert store.reads_wait, "the event loop has waited for the disk"


async def test_what_was_touched_is_read_without_waiting_for_the_disk(
    open_store: OpenStore, path: Path
) -> None:
    store = await open_store(durability="interval")
    keys = [f"3/math-{number}/5/7/x" for number in range(8000)]
    async with committing(store) as batch:
        for key in keys:
            batch.remember(1, "uid", key, bytes(1000), 1.0)
    await store.close()
    file = os.open(path / "data.mdb", os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    some = keys[::800]
    with LmdbReader(path) as reader:
        start = major_faults()
        reader._touch(1, [], [], [("uid", key) for key in some])
        touched = major_faults()
        assert all(reader.recall(1, "uid", some))
        assert major_faults() == touched
        num_waits = touched - start
    if not num_waits:
        pytest.skip("this file system keeps what it is told to let go")


class AtHand:
    """What a world's store was asked to have at hand, while it says that reads wait."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        monkeypatch.setattr(world.store, "at_hand", self._note)
        monkeypatch.setattr(type(world.store), "reads_wait", True)

    async def _note(self, buffer_id: int, **asked: Any) -> None:
        self.calls.append({name: list(values) for name, values in asked.items()})


async def test_a_push_has_at_hand_what_it_will_look_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await world.create(group_size=2)
    at_hand = AtHand(world, monkeypatch)
    await buffer.admit(push((3, 0), (3, 1)), await Turns().take(""))
    assert at_hand.calls == [
        {"remembered": [("uid", uid(3, 0)), ("group", "2/3"), ("uid", uid(3, 1))]}
    ]


async def test_a_batch_has_its_small_rows_at_hand(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await world.create(group_by="none")
    await buffer.push(push((3, 0), (3, 1)))
    lease, _ = await buffer.sample("trainer", want(2), asyncio.Event())
    assert lease is not None
    at_hand = AtHand(world, monkeypatch)
    async with buffer.fetched(lease.units):
        pass
    assert at_hand.calls == [{"uids": [uid(3, 0), uid(3, 1)], "seqs": [1, 2]}]
