"""What waits for its commit: who waits before adding to it, and for what; and what rides with an append."""

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
from experience_buffer_server.store.lmdb.commit_backlog import Backlog, Load
from experience_buffer_server.store.lmdb.store import LmdbStore
from tests.unit.store.conftest import OpenStore, make_record

TOO_MUCH = commit_backlog._LEAST_AHEAD + 1


@pytest.fixture
def waiting() -> Backlog:
    return Backlog()


async def goes_on(waiting: Backlog) -> bool:
    """Whether an append may be submitted now."""
    task = asyncio.create_task(waiting.until_short())
    for _ in range(3):
        await asyncio.sleep(0)
    goes = task.done()
    task.cancel()
    return goes


@pytest.mark.parametrize(
    ("load", "most"),
    [
        (Load(TOO_MUCH), commit_backlog._MAX_WORK),
        (Load(TOO_MUCH, TOO_MUCH), commit_backlog._MAX_BYTES),
    ],
    ids=["page cache", "direct"],
)
async def test_appends_alone_wait_for_room(waiting: Backlog, load: Load, most: int) -> None:
    for _ in range(most // TOO_MUCH):
        waiting.add(load, is_small=False)
        assert await goes_on(waiting)
    waiting.add(load, is_small=False)
    assert not await goes_on(waiting)
    waiting.remove(load)
    assert await goes_on(waiting)


async def test_beside_small_batches_little_may_be_in_front(waiting: Backlog) -> None:
    waiting.add(Load(10), is_small=True)
    waiting.add(Load(TOO_MUCH - 11), is_small=False)
    assert await goes_on(waiting)
    waiting.add(Load(TOO_MUCH), is_small=False)
    assert not await goes_on(waiting)
    waiting.remove(Load(10))
    assert not await goes_on(waiting)
    waiting.remove(Load(TOO_MUCH))
    assert await goes_on(waiting)


async def test_beside_small_batches_more_may_be_in_front_of_what_goes_past_the_page_cache(
    waiting: Backlog,
) -> None:
    direct = Load(commit_backlog._MAX_DIRECT_AHEAD, commit_backlog._MAX_DIRECT_AHEAD)
    waiting.add(Load(0), is_small=True)
    waiting.add(direct, is_small=False)
    assert await goes_on(waiting)
    waiting.add(Load(1, 1), is_small=False)
    assert not await goes_on(waiting)
    waiting.remove(direct)
    waiting.remove(Load(1, 1))
    waiting.add(direct, is_small=False)
    assert await goes_on(waiting), "nothing of what has ended counts"
    waiting.add(Load(TOO_MUCH), is_small=False)
    assert not await goes_on(waiting)


@pytest.mark.parametrize(
    ("seconds", "most"),
    [
        (0.0, commit_backlog._LEAST_AHEAD),
        (
            0.5 * commit_backlog._LEAST_AHEAD / commit_backlog._AHEAD_PER_SECOND,
            commit_backlog._LEAST_AHEAD,
        ),
        (8e-3, 8e-3 * commit_backlog._AHEAD_PER_SECOND),
        (1.0, commit_backlog._MOST_AHEAD),
    ],
    ids=["memory", "fast disk", "slow disk", "stuck disk"],
)
async def test_the_longer_a_commit_waits_for_the_disk_the_more_may_be_in_front(
    waiting: Backlog, seconds: float, most: float
) -> None:
    for _ in range(200):
        waiting.committed(seconds)
    waiting.add(Load(0), is_small=True)
    waiting.add(Load(int(0.99 * most)), is_small=False)
    assert await goes_on(waiting)
    waiting.add(Load(int(0.02 * most)), is_small=False)
    assert not await goes_on(waiting)


async def test_one_slow_commit_changes_little(waiting: Backlog) -> None:
    waiting.committed(10.0)
    waiting.add(Load(2 * commit_backlog._LEAST_AHEAD), is_small=True)
    assert not await goes_on(waiting)


@pytest.mark.parametrize("end", ["remove", "clear"])
async def test_who_waits_is_woken(waiting: Backlog, end: str) -> None:
    waiting.add(Load(TOO_MUCH), is_small=True)
    task = asyncio.create_task(waiting.until_short())
    await asyncio.sleep(0)
    if end == "remove":
        waiting.remove(Load(TOO_MUCH))
    else:
        waiting.clear()
    await asyncio.wait_for(task, 5)
    assert waiting.num_bytes == 0


async def test_small_batches_of_long_ago_count_no_more(
    waiting: Backlog, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting.add(Load(TOO_MUCH), is_small=True)
    assert not await goes_on(waiting)
    monkeypatch.setattr(commit_backlog, "_SECONDS", 0.0)
    assert await goes_on(waiting)


# --- riders


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
