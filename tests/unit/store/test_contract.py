"""What every engine promises, asked of each: `store.interface.Store`, verb by verb."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, cast

import pytest

from experience_buffer_server.store.interface import (
    AdvantageRow,
    BufferRow,
    ConsumerRow,
    GroupRow,
    LeaseRow,
    ProgressRow,
    Record,
    Scattered,
    Store,
    StoredBuffer,
    StoreError,
    StoreFailedError,
    StoreFencedError,
    StoreFullError,
)
from experience_buffer_server.store.lmdb.store import LmdbStore
from experience_buffer_server.store.memory import MemoryData, MemoryStore

MakeRecord = Callable[..., Record]
MEBI = 1 << 20
LIMIT_BYTES = 16 * MEBI


class Engine(Protocol):
    """How a kind of store is opened, and taken away from its owner."""

    async def open(self) -> Store:
        """Open it; what it held before is there."""

    def rival(self, store: Store) -> Callable[[int], Awaitable[int]]:
        """Claims a buffer for another owner, while `store` is open."""


class LmdbEngine:
    def __init__(self, path: Path) -> None:
        self._path = path

    async def open(self) -> Store:
        return await LmdbStore.open(
            self._path,
            durability="commit",
            initial_map_bytes=LIMIT_BYTES,
            max_map_bytes=LIMIT_BYTES,
        )

    def rival(self, store: Store) -> Callable[[int], Awaitable[int]]:
        # A second engine waits for the folder's lock: only the writer can hear of another owner.
        return cast(LmdbStore, store)._raise_epoch


class MemoryEngine:
    def __init__(self, path: Path) -> None:
        self._data = MemoryData()

    async def open(self) -> Store:
        return MemoryStore(self._data, max_bytes=LIMIT_BYTES)

    def rival(self, store: Store) -> Callable[[int], Awaitable[int]]:
        return MemoryStore(self._data).claim


@pytest.fixture(params=[LmdbEngine, MemoryEngine], ids=["lmdb", "memory"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    made: Engine = request.param(tmp_path / "store")
    return made


@pytest.fixture
async def store(engine: Engine) -> AsyncIterator[Store]:
    opened = await engine.open()
    yield opened
    await opened.close()


async def reopened(engine: Engine, store: Store) -> Store:
    await store.close()
    return await engine.open()


def row(buffer_id: int = 1, **changes: Any) -> BufferRow:
    values: dict[str, Any] = {
        "id": buffer_id,
        "name": f"buffer-{buffer_id}",
        "config": "{}",
        "policy_version": 37,
        "create_time": 41.25,
        "moments": "moments",
    }
    return BufferRow(**(values | changes))


async def put(store: Store, *rows: BufferRow) -> None:
    batch = store.batch()
    for each in rows:
        batch.put_buffer(each)
    await store.commit(batch)


async def append(store: Store, *records: Record, payload: bytes = b"payload") -> None:
    batch = store.batch()
    for record in records:
        batch.append(1, record, payload)
    await store.commit(batch)


def loaded(store: Store, buffer_id: int = 1) -> StoredBuffer:
    (found,) = store.load(buffer_id)
    return found


# --- what is stored, and read back


async def test_all_rows_come_back_as_they_were_after_a_restart(
    engine: Engine, store: Store, make_record: MakeRecord
) -> None:
    records = [make_record(1), make_record(2, tombstone=True, payload_bytes=0), make_record(5)]
    groups = [GroupRow(id=3, key="3/math-1", size=7, open_time=11.5, note="why", num_consumed=2)]
    lease = LeaseRow(
        id=13, consumer="trainer", units=[[1], [5, 1]], deadline=17.5, part_sizes=[1, 1],
        num_experiences=3, acked_parts={0: 19, 1: None},
    )  # fmt: skip
    progress = ProgressRow(seq=5, acked=["a"], num_deliveries={"b": 2}, steps={"a": [3, 5]})
    consumer = ConsumerRow(name="trainer", safe_step=23, last_step=29, departed_inserts=31)
    computed = AdvantageRow(seq=5, advantages=b"1234", returns=b"5678", details={"a": [1, None]})
    batch = store.batch()
    batch.put_buffer(row())
    for record in records:
        batch.append(1, record, b"of " + record.uid.encode())
    batch.put_group(1, groups[0])
    batch.put_lease(1, lease)
    batch.put_progress(1, progress)
    batch.put_consumer(1, consumer)
    batch.put_advantages(1, computed, magnitude=0.7)
    batch.put_last_seq(1, 43)
    await store.commit(batch)
    store = await reopened(engine, store)
    found = loaded(store)
    assert found == StoredBuffer(
        row=row(), records=records, groups=groups, leases=[lease], progress=[progress],
        consumers=[consumer], computed=found.computed, last_seq=43,
    )  # fmt: skip
    assert dict(found.computed) == {5: 0.7}
    uids = [record.uid for record in records]
    payloads = [f"of {uid}".encode() for uid in uids]
    assert store.payloads(1, [*uids, "nobody"]) == [payloads[0], None, payloads[2], None]
    assert store.advantages(1, [5, 1]) == [computed, None]
    with store.stored(1, uids[:2], [1, 5]) as (views, advantages):
        assert [view if view is None else bytes(cast(memoryview, view)) for view in views] == [
            payloads[0], None,
        ]  # fmt: skip
        assert advantages == [None, computed]
    assert set(store.payload_uids(1)) == {uids[0], uids[2]}
    assert not store.damaged
    await store.close()


@pytest.mark.parametrize("num_bytes", [1, 20_000, 3 * MEBI])
async def test_a_payload_in_pieces_of_any_size_is_stored_joined(
    store: Store, make_record: MakeRecord, num_bytes: int
) -> None:
    first, second = b"ab" * num_bytes, b"c" * 7
    record = make_record(1)
    batch = store.batch()
    batch.append(1, record, Scattered([first, memoryview(second)]))
    await store.commit(batch)
    async with store.fetched(1, [record.uid]):
        assert store.payloads(1, [record.uid]) == [first + second]
    expected = store.expect(1, [(record.uid, len(first) + len(second))])
    async with store.fetched(1, [record.uid, "nobody"]):
        with store.stored(1, [record.uid], []) as (views, _):
            assert bytes(cast(memoryview, views[0])) == first + second
    expected.close()
    expected.close()


async def test_rows_are_replaced_and_removed(store: Store, make_record: MakeRecord) -> None:
    await put(store, row())
    await append(store, make_record(1), make_record(2))
    batch = store.batch()
    batch.put_group(1, GroupRow(id=3, key="k", size=1, open_time=0.0))
    batch.put_lease(1, LeaseRow(id=3, consumer="c", units=[], deadline=0.0))
    batch.put_consumer(1, ConsumerRow(name="c"))
    for seq in (1, 2):
        batch.put_progress(1, ProgressRow(seq=seq))
        batch.put_advantages(1, AdvantageRow(seq=seq, advantages=b"", returns=b"", details={}))
    await store.commit(batch)
    batch = store.batch()
    batch.put_record(1, make_record(2, note="changed"))
    batch.replace(1, make_record(2, note="replaced"), b"other")
    batch.remove(1, make_record(1))
    batch.delete_group(1, 3)
    batch.delete_lease(1, 3)
    batch.delete_consumer(1, "c")
    batch.put_buffer(row(name="renamed"))
    await store.commit(batch)
    found = loaded(store)
    assert found == StoredBuffer(
        row=row(name="renamed"), records=[make_record(2, note="replaced")], groups=[], leases=[],
        progress=[ProgressRow(seq=2)], consumers=[], computed=found.computed, last_seq=2,
    )  # fmt: skip
    assert store.payloads(1, [make_record(1).uid, make_record(2).uid]) == [None, b"other"]
    assert store.advantages(1, [1]) == [None]
    batch = store.batch()
    batch.delete_progress(1, 2)
    batch.delete_advantages(1, 2)
    await store.commit(batch)
    found = loaded(store)
    assert (found.progress, dict(found.computed), store.advantages(1, [2])) == ([], {}, [None])


# --- commits


async def test_commits_are_stored_in_the_order_of_submission(
    store: Store, make_record: MakeRecord
) -> None:
    await put(store, row())
    commits = []
    for number in range(20):
        batch = store.batch()
        if number % 3:
            batch.put_record(1, make_record(1, note=str(number)))
            commits.append(store.ride(batch) if number % 3 == 1 else store.commit(batch))
        else:
            batch.append(1, make_record(number + 2), b"")
            batch.put_record(1, make_record(1, note=str(number)))
            commits.append(store.commit(batch))
    await asyncio.gather(*commits)
    assert loaded(store).records[0].note == "19"


async def test_nothing_is_read_before_its_commit_and_all_of_it_behind(
    store: Store, make_record: MakeRecord
) -> None:
    await put(store, row())
    batch = store.batch()
    batch.append(1, make_record(1), b"payload")
    assert loaded(store).records == []
    await store.commit(batch)
    assert loaded(store).records == [make_record(1)]


async def test_a_batch_whose_seq_is_taken_is_refused_whole_and_alone(
    store: Store, make_record: MakeRecord
) -> None:
    await put(store, row())
    batches = [store.batch() for _ in range(3)]
    batches[0].append(1, make_record(1), b"first")
    batches[1].put_group(1, GroupRow(id=1, key="k", size=1, open_time=0.0))
    batches[1].append(1, make_record(1, uid="3/math-1/5/8/"), b"its seq is taken")
    batches[2].append(1, make_record(2), b"third")
    commits = [store.commit(batch) for batch in batches]
    first, second, third = await asyncio.gather(*commits, return_exceptions=True)
    assert (first, third) == (None, None)
    assert isinstance(second, StoreError)
    assert not isinstance(second, StoreFailedError | StoreFencedError | StoreFullError)
    found = loaded(store)
    assert ([record.seq for record in found.records], found.groups) == ([1, 2], [])
    assert not store.failed.is_set()


async def test_a_full_store_refuses_appends_and_takes_removals(
    store: Store, make_record: MakeRecord
) -> None:
    await put(store, row())
    payload = b"x" * MEBI
    stored: list[Record] = []
    for seq in range(1, LIMIT_BYTES // MEBI - 2):
        await append(store, make_record(seq), payload=payload)
        stored.append(make_record(seq))
    with pytest.raises(StoreFullError, match="max_map_bytes"):
        await append(store, *(make_record(seq) for seq in range(90, 95)), payload=payload)
    assert store.stats.num_full == 1
    found = loaded(store)
    assert found.records == stored, "nothing of the refused batch is there"
    batch = store.batch()
    batch.put_lease(1, LeaseRow(id=1, consumer="c", units=[[1]], deadline=0.0))
    for record in stored[:4]:
        batch.remove(1, record)
    await store.commit(batch)
    await append(store, make_record(100), payload=payload)
    assert [record.seq for record in loaded(store).records][-1] == 100


async def test_appends_do_not_ride(store: Store, make_record: MakeRecord) -> None:
    batch = store.batch()
    batch.append(1, make_record(1), b"")
    with pytest.raises(TypeError, match="without appends"):
        store.ride(batch)


async def test_what_no_store_can_hold_is_refused_when_it_is_noted(
    store: Store, make_record: MakeRecord
) -> None:
    batch = store.batch()
    longest = make_record(1, uid="3/math-1/5/7/".ljust(500, "u"))
    with pytest.raises(ValueError, match="501 bytes"):
        batch.append(1, make_record(1, uid=longest.uid + "u"), b"")
    with pytest.raises(ValueError, match="501 bytes"):
        batch.put_consumer(1, ConsumerRow(name="é" * 250 + "c"))
    with pytest.raises(ValueError, match="NUL"):
        batch.remember(1, "a\0b", "key", b"", 1.0)
    with pytest.raises(ValueError, match="507 bytes"):
        batch.remember(1, "uid", "k" * 504, b"", 1.0)
    with pytest.raises(ValueError, match="epoch"):
        batch.remember(1, "uid", "key", b"", float("nan"))
    assert batch.operations == []
    batch.append(1, longest, b"fits")
    batch.remember(1, "group", "k" * 500, b"fits", 1.0)
    await store.commit(batch)
    assert store.payloads(1, [longest.uid]) == [b"fits"]
    assert store.recall(1, "group", ["k" * 500]) == [b"fits"]


# --- what is remembered


async def test_values_are_remembered_by_kind_and_forgotten_by_age(
    engine: Engine, store: Store
) -> None:
    batch = store.batch()
    for number in range(5):
        batch.remember(1, "uid", str(number), b"%d" % number, 10.0 + number)
    batch.remember(1, "group", "0", b"whole", 10.0)
    batch.remember(2, "uid", "0", b"another's", 10.0)
    batch.remember(1, "uid", "1", b"again", 30.0)
    await store.commit(batch)
    store = await reopened(engine, store)
    assert store.recall(1, "uid", ["0", "1", "nobody"]) == [b"0", b"again", None]
    assert await store.prune(1, 12.0, limit=1) == 1
    assert await store.prune(1, 13.0) == 2, "what was remembered again is as old as the last time"
    assert store.recall(1, "uid", [*"01234"]) == [None, b"again", None, b"3", b"4"]
    assert store.recall(1, "group", ["0"]) == [None]
    assert store.recall(2, "uid", ["0"]) == [b"another's"]
    await store.close()


async def test_what_is_at_hand_is_read_as_it_is_by_then(
    store: Store, make_record: MakeRecord
) -> None:
    await append(store, make_record(1))
    await store.at_hand(1, uids=[make_record(1).uid, "no uid"], seqs=[1], remembered=[("uid", "a")])
    batch = store.batch()
    batch.remember(1, "uid", "a", b"since then", 1.0)
    batch.replace(1, make_record(1), b"replaced")
    await store.commit(batch)
    assert store.recall(1, "uid", ["a"]) == [b"since then"]
    assert store.payloads(1, [make_record(1).uid]) == [b"replaced"]
    await store.at_hand(1, uids=["u" * 600])


# --- ownership


async def test_who_was_claimed_from_is_refused_whenever_its_commit_comes(
    engine: Engine, store: Store, make_record: MakeRecord
) -> None:
    await put(store, row())
    assert await store.claim(1) == 1
    await append(store, make_record(1))
    assert await engine.rival(store)(1) == 2
    batch = store.batch()
    batch.put_record(1, make_record(1, note="of the old owner"))
    with pytest.raises(StoreFencedError, match="claimed by another owner"):
        await store.commit(batch)
    with pytest.raises(StoreFencedError):
        await append(store, make_record(2))
    assert loaded(store).records == [make_record(1)]
    assert not store.failed.is_set(), "other buffers go on"
    await put(store, row(2))
    assert await store.claim(1) == 3
    await append(store, make_record(2))
    assert [record.seq for record in loaded(store).records] == [1, 2]


async def test_epochs_go_on_in_the_next_life(engine: Engine, store: Store) -> None:
    await put(store, row())
    assert await store.claim(1) == 1
    store = await reopened(engine, store)
    assert await store.claim(1) == 2
    await store.close()


async def test_of_a_commit_in_doubt_its_number_says_whether_it_is_stored(
    engine: Engine, store: Store, make_record: MakeRecord
) -> None:
    await put(store, row(), row(2))
    await store.claim(1)
    assert await store.last_number(1) == 0
    batches = [store.batch() for _ in range(4)]
    for seq, batch in zip((1, 2, 2, 3), batches, strict=True):
        batch.append(1, make_record(seq, uid=f"3/math-{seq}/5/7/{id(batch)}"), b"")
    batches[3].put_buffer(row(2, name="not claimed: not numbered"))
    commits = [store.commit(batch) for batch in batches]
    assert [batch.numbers for batch in batches] == [{1: 1}, {1: 2}, {1: 3}, {1: 4}]
    results = await asyncio.gather(*commits, return_exceptions=True)
    assert [result is None for result in results] == [True, True, False, True]
    assert await store.last_number(1) == 4
    refused = store.batch()
    refused.append(1, make_record(3), b"")
    with pytest.raises(StoreError):
        await store.commit(refused)
    assert refused.numbers == {1: 5}
    assert await store.last_number(1) == 4
    store = await reopened(engine, store)
    assert await store.last_number(1) == 4
    await store.claim(1)
    await append(store, make_record(7))
    assert await store.last_number(1) == 5
    await store.close()


async def test_a_batch_that_rides_is_numbered_in_its_place(
    store: Store, make_record: MakeRecord
) -> None:
    await put(store, row(), row(2))
    for buffer_id in (1, 2):
        await store.claim(buffer_id)
    await append(store, make_record(1))
    riding = [store.batch(), store.batch()]
    riding[0].put_last_seq(1, 11)
    riding[1].put_last_seq(2, 13)
    waits = [store.ride(batch) for batch in riding]
    await append(store, make_record(2))
    await asyncio.gather(*waits)
    assert [batch.numbers for batch in riding] == [{1: 2}, {2: 1}]
    assert [await store.last_number(1), await store.last_number(2)] == [3, 1]
    assert [loaded(store).last_seq, loaded(store, 2).last_seq] == [11, 13]


# --- buffers


async def test_one_buffer_is_loaded_alone_or_all_by_id(
    store: Store, make_record: MakeRecord
) -> None:
    await put(store, row(2), row(1), row(258))
    batch = store.batch()
    for buffer_id in (1, 2, 258):
        batch.append(buffer_id, make_record(buffer_id), b"")
        batch.put_progress(buffer_id, ProgressRow(seq=buffer_id))
        batch.put_advantages(
            buffer_id, AdvantageRow(seq=buffer_id, advantages=b"", returns=b"", details={})
        )
    await store.commit(batch)
    every = list(store.load())
    assert [found.row.id for found in every] == [1, 2, 258]
    for found in every:
        alone = loaded(store, found.row.id)
        assert dict(alone.computed) == dict(found.computed) == {found.row.id: 0.0}
        assert [record.seq for record in alone.records] == [found.row.id]
        assert alone == found or dict(alone.computed) == dict(found.computed)
        assert (alone.row, alone.progress) == (found.row, found.progress)
    assert list(store.load(3)) == []


async def test_a_deleted_buffer_leaves_nothing_and_its_id_is_never_given_again(
    engine: Engine, store: Store, make_record: MakeRecord
) -> None:
    await put(store, row(1), row(7))
    await store.claim(1)
    await append(store, make_record(1))
    batch = store.batch()
    batch.remember(1, "uid", "gone", b"digest", 1.0)
    batch.put_last_seq(7, 11)
    await store.commit(batch)
    batch = store.batch()
    batch.delete_buffer(1)
    batch.delete_buffer(7)
    await store.commit(batch)
    store = await reopened(engine, store)
    assert list(store.load()) == []
    assert store.last_buffer_id == 7
    assert store.payloads(1, [make_record(1).uid]) == [None]
    assert list(store.payload_uids(1)) == []
    assert store.recall(1, "uid", ["gone"]) == [None]
    assert await store.last_number(1) == 0
    await store.close()


# --- the end


async def test_closing_ends_what_was_submitted_and_refuses_what_comes_after(
    engine: Engine, store: Store, make_record: MakeRecord
) -> None:
    await put(store, row())
    batch = store.batch()
    batch.append(1, make_record(1), b"payload")
    submitted = asyncio.ensure_future(store.commit(batch))
    await store.close()
    await store.close()
    assert submitted.done()
    await submitted
    with pytest.raises(StoreFailedError, match="closed"):
        await append(store, make_record(2))
    again = await engine.open()
    assert loaded(again).records == [make_record(1)]
    await again.close()


async def test_it_says_how_full_it_is(store: Store, make_record: MakeRecord) -> None:
    await append(store, make_record(1), payload=b"x" * MEBI)
    assert MEBI <= store.stats.live_bytes <= store.stats.file_bytes <= store.limit_bytes
    assert store.limit_bytes == LIMIT_BYTES
    assert (store.stats.num_batches, store.pending_bytes) == (1, 0)
    await store.until_short()
