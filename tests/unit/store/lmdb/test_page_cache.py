"""Who reads small rows: the event loop where they are in memory, a thread where they may not be."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experience_buffer_server.runtime.loop_turns import Turns
from experience_buffer_server.store.lmdb import owner_reads, page_cache
from experience_buffer_server.store.lmdb.page_cache import PageCache
from experience_buffer_server.store.lmdb.reader import LmdbReader
from tests.unit.builders import World, push, uid, want
from tests.unit.store.conftest import OpenStore

NUM_READS = 16


def test_it_is_cold_until_enough_reads_did_not_wait() -> None:
    cache = PageCache()
    for _ in range(NUM_READS):
        assert cache.is_cold
        cache.note(0)
    assert not cache.is_cold
    cache.note(2)
    assert cache.is_cold
    for _ in range(NUM_READS):
        cache.note(0)
    assert not cache.is_cold


async def test_a_thread_touches_what_may_wait_and_nobody_what_does_not(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store()
    batch = store.batch()
    batch.remember(1, "uid", "a", b"digest", 1.0)
    await store.commit(batch)
    threads: list[int] = []
    touch = store.reader.touch

    def noted(*args: Any, **named: Any) -> int:
        threads.append(threading.get_ident())
        return touch(*args, **named)

    monkeypatch.setattr(store.reader, "touch", noted)
    monkeypatch.setattr(page_cache, "major_faults", lambda: 0)
    monkeypatch.setattr("experience_buffer_server.store.lmdb.reader.major_faults", lambda: 0)
    for _ in range(NUM_READS + 3):
        await store.at_hand(1, remembered=[("uid", "a")])
    assert len(threads) == NUM_READS
    assert threading.get_ident() not in threads
    assert not store.reads_wait
    faults = iter(range(100))
    monkeypatch.setattr(owner_reads, "major_faults", lambda: next(faults))
    reads: tuple[Callable[[], object], ...] = (
        lambda: store.recall(1, "uid", ["a"]),
        lambda: store.payloads(1, ["no uid"]),
        lambda: store.stored(1, ["no uid"], [1]).__enter__(),
    )
    for read in reads:
        store._cache = PageCache()
        for _ in range(NUM_READS):
            store._cache.note(0)
        read()
        assert store.reads_wait, "the event loop has waited for the disk"


async def test_what_was_touched_is_read_without_waiting_for_the_disk(
    open_store: OpenStore, path: Path
) -> None:
    store = await open_store(durability="interval")
    keys = [f"3/math-{number}/5/7/x" for number in range(8000)]
    batch = store.batch()
    for key in keys:
        batch.remember(1, "uid", key, bytes(1000), 1.0)
    await store.commit(batch)
    await store.close()
    file = os.open(path / "data.mdb", os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    some = keys[::800]
    with LmdbReader(path) as reader:
        num_waits = reader.touch(1, [], seqs=[], remembered=[("uid", key) for key in some])
        before = page_cache.major_faults()
        assert all(reader.recall(1, "uid", some))
        assert page_cache.major_faults() == before
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
