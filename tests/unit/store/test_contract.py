"""What every engine promises, asked of each: `store.interface.Store`, verb by verb."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol, cast

import pytest

from experience_buffer_server.store.interface import (
    LARGE_PAYLOAD_BYTES,
    AdvantageRow,
    BufferRow,
    ConsumerRow,
    Departed,
    DepartedRow,
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
from tests.unit.store.conftest import MEBI, append, buffer_row, committing, fill, make_record

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


async def put(store: Store, *rows: BufferRow) -> None:
    async with committing(store) as batch:
        for each in rows:
            batch.put_buffer(each)


def loaded(store: Store, buffer_id: int = 1) -> StoredBuffer:
    (found,) = store.load(buffer_id)
    return found


# --- what is stored, and read back


async def test_every_row_comes_back_after_a_restart(engine: Engine, store: Store) -> None:
    records = [
        make_record(1),
        make_record(2, reward=None, min_version=None, max_version=None, group_id=0),
        make_record(3, tombstone=True, note="timeout", payload_bytes=0),
    ]
    group = GroupRow(
        id=43,
        key="3/math",
        size=47,
        open_time=53.5,
        closed="sealed",
        note="n",
        quarantined=True,
        num_consumed=137,
    )
    lease = LeaseRow(
        id=59,
        consumer="actor",
        units=[[1, 2], [3]],
        deadline=61.5,
        state="acked",
        num_experiences=67,
        part_sizes=[1, 1],
        acked_parts={0: 97, 1: None},
        probabilities=[0.25, 0.75],
        stale=[False, True],
    )
    progress = ProgressRow(
        seq=2,
        acked=["actor", "critic"],
        num_deliveries={"actor": 71},
        times_sampled={"critic": 101},
        steps={"critic": [103, 107]},
        quarantined={"actor": "it keeps dying"},
        passed_over=["critic"],
        uncounted=["actor"],
    )
    consumers = [
        ConsumerRow(
            name="actor",
            safe_step=109,
            last_step=113,
            departed_inserts=127,
            departed_samples=131,
        ),
        ConsumerRow(name="critic"),
    ]
    advantage = AdvantageRow(
        seq=1, advantages=b"\0\1" * 4, returns=b"\2" * 8, details={"mean": 0.5, "sizes": {3: [1]}}
    )
    await fill(store, buffer_row(1), records)
    async with committing(store) as batch:
        batch.put_group(1, group)
        batch.put_lease(1, lease)
        batch.put_progress(1, progress)
        for consumer in reversed(consumers):
            batch.put_consumer(1, consumer)
        batch.put_advantages(1, advantage, magnitude=0.73)
        batch.remember(1, "uid", "gone", b"digest", 73.5)
    store = await reopened(engine, store)
    (state,) = store.load()
    assert state.row == buffer_row(1)
    assert state.records == records
    assert state.groups == [group]
    assert state.leases == [lease]
    assert state.progress == [progress]
    assert state.consumers == consumers
    assert state.computed == {1: 0.73}
    assert store.damaged == []
    assert store.advantages(1, [2, 1]) == [None, advantage]
    assert store.recall(1, "uid", ["gone", "never"]) == [b"digest", None]
    assert store.recall(1, "group", ["gone"]) == [None]
    payload = b"payload of " + records[0].uid.encode()
    assert store.payloads(1, [records[2].uid, records[0].uid]) == [None, payload]
    uids = [record.uid for record in records]
    with store.stored(1, [uids[2], uids[0]], [1, 2]) as (views, rows):
        assert (views[0], bytes(cast(memoryview, views[1]))) == (None, payload)
        assert rows == [advantage, None]
    assert set(store.payload_uids(1)) == {*uids[:2]}
    await store.close()


async def test_remove_takes_payload_record_advantages_and_progress(store: Store) -> None:
    gone, kept = make_record(1), make_record(2)
    await fill(store, buffer_row(1), [gone, kept])
    async with committing(store) as batch:
        for record in (gone, kept):
            batch.put_progress(1, ProgressRow(seq=record.seq))
            computed = AdvantageRow(seq=record.seq, advantages=b"", returns=b"", details={})
            batch.put_advantages(1, computed)
        batch.put_group(1, GroupRow(id=1, key="k", size=2, open_time=0.0))
        batch.put_lease(1, LeaseRow(id=1, consumer="c", units=[], deadline=0.0))
    async with committing(store) as batch:
        batch.remove(1, gone)
        batch.delete_group(1, 1)
        batch.delete_lease(1, 1)
    (state,) = store.load()
    assert state.records == [kept]
    assert state.computed == {2: 0.0}
    assert [one.seq for one in state.progress] == [2]
    assert (state.groups, state.leases) == ([], [])
    assert store.payloads(1, [gone.uid]) == [None]
    assert store.payloads(1, [kept.uid]) != [None]


async def test_put_advantages_again_replaces_them_and_their_magnitude(store: Store) -> None:
    await fill(store, buffer_row(1), [make_record(seq) for seq in (1, 2, 3)])
    for number in (0.31, 0.37):
        async with committing(store) as batch:
            for seq in (1, 2, 3):
                found_now = AdvantageRow(
                    seq=seq, advantages=b"\1" * 4, returns=b"", details={"n": number}
                )
                batch.put_advantages(1, found_now, magnitude=number * seq)
    async with committing(store) as batch:
        batch.delete_advantages(1, 2)
    (state,) = store.load()
    assert state.computed == {1: 0.37, 3: 0.37 * 3}
    rows = store.advantages(1, [1, 2, 3])
    found = [one.details if isinstance(one, AdvantageRow) else one for one in rows]
    assert found == [{"n": 0.37}, None, {"n": 0.37}]


async def test_delete_consumer_takes_it_alone(store: Store) -> None:
    for buffer_id in (1, 2):
        await fill(store, buffer_row(buffer_id))
        async with committing(store) as batch:
            for name in ("actor", "actor-2"):
                batch.put_consumer(buffer_id, ConsumerRow(name=name))
    async with committing(store) as batch:
        batch.delete_consumer(1, "actor")
    left = [[one.name for one in state.consumers] for state in store.load()]
    assert left == [["actor-2"], ["actor", "actor-2"]]


async def test_delete_buffer_takes_all_of_it_and_nothing_else(engine: Engine, store: Store) -> None:
    records = [make_record(seq) for seq in range(1, 500)]
    for buffer_id in (1, 2, 3):
        await fill(store, buffer_row(buffer_id), records)
        async with committing(store) as batch:
            batch.remember(buffer_id, "uid", "u", b"d", 5.0)
            batch.put_consumer(buffer_id, ConsumerRow(name="trainer"))
            batch.put_last_seq(buffer_id, 997)
    await store.claim(3)
    await append(store, make_record(501), buffer_id=3)
    async with committing(store) as batch:
        batch.delete_buffer(1)
        batch.delete_buffer(3)
    store = await reopened(engine, store)
    assert [(s.row.id, len(s.records)) for s in store.load()] == [(2, 499)]
    assert store.last_buffer_id == 3, "an id is never given again"
    assert store.payloads(3, [records[0].uid]) == [None]
    assert list(store.payload_uids(3)) == []
    assert [store.recall(b, "uid", ["u"]) for b in (1, 2, 3)] == [[None], [b"d"], [None]]
    assert None not in store.payloads(2, [r.uid for r in records])
    assert await store.last_number(3) == 0
    # The id's tables are empty, not only its row gone.
    await fill(store, buffer_row(3))
    again = loaded(store, 3)
    assert (again.records, again.consumers, again.last_seq) == ([], [], 0)
    assert await store.prune(3, 10.0) == 0
    await store.close()


async def test_changes_of_a_batch_apply_in_order(store: Store) -> None:
    record = make_record(1)
    async with committing(store) as batch:
        batch.put_buffer(buffer_row(1))
        batch.append(1, record, b"first")
        batch.remove(1, record)
        batch.append(1, record, b"second")
    assert store.payloads(1, [record.uid]) == [b"second"]


async def test_prune_forgets_the_oldest_up_to_its_limit(store: Store) -> None:
    async with committing(store) as batch:
        for number in range(10):
            batch.remember(1, "uid", f"u{number}", b"v", float(number))
            batch.remember(2, "uid", f"u{number}", b"v", float(number))
    keys = [f"u{number}" for number in range(10)]
    assert await store.prune(1, 7.0, limit=3) == 3
    assert store.recall(1, "uid", keys) == [None] * 3 + [b"v"] * 7
    assert await store.prune(1, 7.0) == 4
    assert await store.prune(1, 7.0) == 0
    assert store.recall(1, "uid", keys) == [None] * 7 + [b"v"] * 3
    assert store.recall(2, "uid", keys) == [b"v"] * 10


async def test_prune_spares_what_was_remembered_again(store: Store) -> None:
    for time, value in ((1.0, b"old"), (9.0, b"fresh")):
        async with committing(store) as batch:
            batch.remember(1, "uid", "again", value, time)
            batch.remember(1, "uid", f"once at {time}", value, time)
    assert await store.prune(1, 5.0) == 1
    assert store.recall(1, "uid", ["again", "once at 1.0"]) == [b"fresh", None]
    assert await store.prune(1, 10.0) == 2
    assert store.recall(1, "uid", ["again"]) == [None]


async def test_prune_does_not_wait_behind_a_clock_that_was_ahead(store: Store) -> None:
    async with committing(store) as batch:
        batch.remember(1, "uid", "from the future", b"", 1e10)
        batch.remember(1, "uid", "from now", b"", 1e9)
    assert await store.prune(1, 2e9) == 1
    assert store.recall(1, "uid", ["from the future", "from now"]) == [b"", None]


@pytest.mark.parametrize("num_bytes", [1, 20_000, 3 * MEBI])
async def test_a_payload_in_pieces_of_any_size_is_stored_joined(
    store: Store, num_bytes: int
) -> None:
    first, second = b"ab" * num_bytes, b"c" * 7
    record = make_record(1)
    async with committing(store) as batch:
        batch.append(1, record, Scattered([first, memoryview(second)]))
    async with store.fetched(1, [record.uid]):
        assert store.payloads(1, [record.uid]) == [first + second]
    expected = store.expect(1, [(record.uid, len(first) + len(second))])
    async with store.fetched(1, [record.uid, "nobody"]):
        with store.stored(1, [record.uid], []) as (views, _):
            assert bytes(cast(memoryview, views[0])) == first + second
    expected.close()
    expected.close()


@pytest.mark.parametrize("payload", [None, b"other" * 9000], ids=["put_record", "replace"])
async def test_a_changed_record_leaves_what_was_computed_and_done(
    store: Store, payload: bytes | None
) -> None:
    record, other = make_record(1), make_record(2)
    await fill(store, buffer_row(), [record, other])
    computed = AdvantageRow(seq=1, advantages=b"1234", returns=b"", details={})
    changed = make_record(1, note="changed", priority=0.0, version=151)
    async with committing(store) as batch:
        batch.put_advantages(1, computed)
        batch.put_progress(1, ProgressRow(seq=1, acked=["actor"]))
    async with committing(store) as batch:
        if payload is None:
            batch.put_record(1, changed)
        else:
            batch.replace(1, changed, payload)
    found = loaded(store)
    assert found.records == [changed, other]
    assert [one.acked for one in found.progress] == [["actor"]]
    assert store.advantages(1, [1]) == [computed]
    kept = b"payload of " + record.uid.encode()
    assert store.payloads(1, [record.uid]) == [kept if payload is None else payload]
    async with committing(store) as batch:
        batch.delete_progress(1, 1)
        batch.put_buffer(buffer_row(name="renamed"))
    assert (loaded(store).progress, loaded(store).row.name) == ([], "renamed")


# --- commits


async def test_commits_are_stored_in_the_order_of_submission(store: Store) -> None:
    await put(store, buffer_row())
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


async def test_nothing_is_read_before_its_commit_and_all_of_it_behind(store: Store) -> None:
    await put(store, buffer_row())
    batch = store.batch()
    batch.append(1, make_record(1), b"payload")
    assert loaded(store).records == []
    await store.commit(batch)
    assert loaded(store).records == [make_record(1)]


async def test_a_batch_whose_seq_is_taken_is_refused_whole_and_alone(store: Store) -> None:
    await put(store, buffer_row())
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


async def test_a_full_store_refuses_appends_and_takes_removals(store: Store) -> None:
    await put(store, buffer_row())
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
    async with committing(store) as batch:
        batch.put_lease(1, LeaseRow(id=1, consumer="c", units=[[1]], deadline=0.0))
        for record in stored[:4]:
            batch.remove(1, record)
    await append(store, make_record(100), payload=payload)
    assert [record.seq for record in loaded(store).records][-1] == 100


async def test_appends_do_not_ride(store: Store) -> None:
    batch = store.batch()
    batch.append(1, make_record(1), b"")
    with pytest.raises(TypeError, match="without appends"):
        store.ride(batch)


async def test_what_no_store_can_hold_is_refused_when_it_is_noted(store: Store) -> None:
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


async def test_what_is_at_hand_is_read_as_it_is_by_then(store: Store) -> None:
    await append(store, make_record(1))
    await store.at_hand(1, uids=[make_record(1).uid, "no uid"], seqs=[1], remembered=[("uid", "a")])
    async with committing(store) as batch:
        batch.remember(1, "uid", "a", b"since then", 1.0)
        batch.replace(1, make_record(1), b"replaced")
    assert store.recall(1, "uid", ["a"]) == [b"since then"]
    assert store.payloads(1, [make_record(1).uid]) == [b"replaced"]
    await store.at_hand(1, uids=["u" * 600])


# --- ownership


async def test_who_was_claimed_from_is_refused_whenever_its_commit_comes(
    engine: Engine, store: Store
) -> None:
    await put(store, buffer_row())
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
    await put(store, buffer_row(2))
    assert await store.claim(1) == 3
    await append(store, make_record(2))
    assert [record.seq for record in loaded(store).records] == [1, 2]


async def test_epochs_go_on_in_the_next_life(engine: Engine, store: Store) -> None:
    await put(store, buffer_row())
    assert await store.claim(1) == 1
    store = await reopened(engine, store)
    assert await store.claim(1) == 2
    await store.close()


async def test_of_a_commit_in_doubt_its_number_says_whether_it_is_stored(
    engine: Engine, store: Store
) -> None:
    await put(store, buffer_row(), buffer_row(2))
    await store.claim(1)
    assert await store.last_number(1) == 0
    batches = [store.batch() for _ in range(4)]
    for seq, batch in zip((1, 2, 2, 3), batches, strict=True):
        batch.append(1, make_record(seq, uid=f"3/math-{seq}/5/7/{id(batch)}"), b"")
    batches[3].put_buffer(buffer_row(2, name="not claimed: not numbered"))
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


async def test_a_batch_that_rides_is_numbered_in_its_place(store: Store) -> None:
    await put(store, buffer_row(), buffer_row(2))
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


async def test_buffers_and_rows_load_by_number_all_or_one_alone(store: Store) -> None:
    for buffer_id in (258, 1, 2):
        await fill(store, buffer_row(buffer_id), [make_record(seq) for seq in (257, 3, 256)])
        async with committing(store) as batch:
            batch.put_progress(buffer_id, ProgressRow(seq=3))
            computed = AdvantageRow(seq=257, advantages=b"", returns=b"", details={})
            batch.put_advantages(buffer_id, computed, magnitude=float(buffer_id))
    every = list(store.load())
    assert [found.row.id for found in every] == [1, 2, 258]
    for found in every:
        alone = loaded(store, found.row.id)
        assert [record.seq for record in found.records] == [3, 256, 257]
        assert (alone.row, alone.records) == (found.row, found.records)
        assert dict(alone.computed) == dict(found.computed) == {257: float(found.row.id)}
        assert alone.progress == found.progress == [ProgressRow(seq=3)]
    assert list(store.load(3)) == []


async def test_leases_are_remembered_by_number_of_one_buffer_alone(store: Store) -> None:
    rows = [
        LeaseRow(id=number, consumer="a", units=[[1, 2], [7]], deadline=2.5, state="acked")
        for number in (258, 3, 257)
    ]
    for buffer_id in (1, 2):
        await fill(store, buffer_row(buffer_id), [])
        async with committing(store) as batch:
            for row in rows[: 4 - buffer_id]:
                batch.put_lease(buffer_id, row)
    assert await store.remembered_leases(1) == sorted(rows, key=lambda row: row.id)
    assert await store.remembered_leases(2) == [rows[1], rows[0]]
    assert await store.remembered_leases(3) == []


# --- the end


async def test_closing_ends_what_was_submitted_and_refuses_what_comes_after(
    engine: Engine, store: Store
) -> None:
    await put(store, buffer_row())
    batch = store.batch()
    batch.append(1, make_record(1), b"payload")
    riding = store.batch()
    riding.put_last_seq(1, 7)
    submitted = [
        asyncio.ensure_future(store.commit(batch)),
        asyncio.ensure_future(store.ride(riding)),
    ]
    await store.close()
    await store.close()
    assert all(one.done() for one in submitted)
    await asyncio.gather(*submitted)
    with pytest.raises(StoreFailedError, match="closed"):
        await append(store, make_record(2))
    again = await engine.open()
    assert (loaded(again).records, loaded(again).last_seq) == ([make_record(1)], 7)
    await again.close()


async def test_it_says_how_full_it_is(store: Store) -> None:
    await append(store, make_record(1), payload=b"x" * MEBI)
    assert MEBI <= store.stats.live_bytes <= store.stats.file_bytes <= store.limit_bytes
    assert store.limit_bytes == LIMIT_BYTES
    assert (store.stats.num_batches, store.pending_bytes) == (1, 0)
    await store.until_short()


@pytest.mark.parametrize("num_bytes", [31, LARGE_PAYLOAD_BYTES + 37], ids=["small", "large"])
async def test_what_departs_is_kept_whole_until_it_is_archived(
    engine: Engine, store: Store, num_bytes: int
) -> None:
    """Nobody finds it as an experience; its payload, rows and note are there, also after a restart."""
    gone, kept = make_record(1), make_record(2)
    payload = b"a" * num_bytes
    progress = ProgressRow(seq=1, acked=["c"], trained=[["c", 5, 7.5]])
    computed = AdvantageRow(seq=1, advantages=b"1234", returns=b"1234", details={"estimator": "e"})
    async with committing(store) as batch:
        batch.put_buffer(buffer_row(1))
        batch.append(1, gone, payload)
        batch.append(1, kept, b"other")
        batch.put_advantages(1, computed, magnitude=0.5)
        batch.put_progress(1, progress)
    async with committing(store) as batch:
        batch.depart(1, gone, b"why")
        batch.put_last_seq(1, 2)
    await store.close()
    store = await engine.open()
    (state,) = store.load()
    assert (state.records, state.progress, state.last_seq) == ([kept], [], 2)
    wanted = DepartedRow(gone, progress, b"why", False)
    assert list(store.departed_rows(1)) == [(1, wanted)]
    assert store.departed(1, [2, 1, 3]) == [Departed(wanted, payload, computed)]
    async with committing(store) as batch:
        batch.archived(1, 1, gone.uid)
        batch.archived(1, 1, gone.uid)
        batch.archived(1, 3, "there is none")
    assert (list(store.departed_rows(1)), store.departed(1, [1])) == ([], [])
    assert store.payloads(1, [gone.uid, kept.uid]) == [None, b"other"]
    assert store.advantages(1, [1]) == [None]
    await store.close()


@pytest.mark.parametrize("num_bytes", [31, LARGE_PAYLOAD_BYTES + 37], ids=["small", "large"])
async def test_a_uid_is_used_again_before_what_had_it_is_archived(
    store: Store, num_bytes: int
) -> None:
    """Both payloads are kept; the end of the first one doesn't touch the second."""
    first, second = make_record(1), make_record(5)
    second.uid = first.uid
    old, new = b"a" * num_bytes, b"b" * (num_bytes + 1)
    await append(store, first, payload=old)
    async with committing(store) as batch:
        batch.depart(1, first, b"")
    async with committing(store) as batch:
        batch.free_uid(1, 1, first.uid)
        batch.append(1, second, new)
    (found,) = store.departed(1, [1])
    assert (found.payload, found.row.uid_freed) == (old, True)
    assert store.payloads(1, [second.uid]) == [new]
    async with committing(store) as batch:
        batch.depart(1, second, b"again")
    assert [one.payload for one in store.departed(1, [1, 5])] == [old, new]
    async with committing(store) as batch:
        batch.archived(1, 1, first.uid)
    assert store.payloads(1, [second.uid]) == [new]
    assert [one.payload for one in store.departed(1, [1, 5])] == [new]
    async with committing(store) as batch:
        batch.archived(1, 5, first.uid)
    assert list(store.payload_uids(1)) == []


async def test_a_uid_that_nobody_gives_up_is_not_freed_twice(store: Store) -> None:
    """Freed without effect where it was freed before: the payload under it is another's by then."""
    first, second = make_record(1), make_record(2)
    second.uid = first.uid
    await append(store, first, payload=b"old")
    async with committing(store) as batch:
        batch.depart(1, first, b"")
        batch.free_uid(1, 1, first.uid)
        batch.append(1, second, b"new")
    async with committing(store) as batch:
        batch.free_uid(1, 1, first.uid)
    assert store.departed(1, [1])[0].payload == b"old"
    assert store.payloads(1, [second.uid]) == [b"new"]


async def test_delete_buffer_takes_what_has_departed(engine: Engine, store: Store) -> None:
    await fill(store, buffer_row(1), [make_record(1), make_record(2)])
    async with committing(store) as batch:
        batch.depart(1, make_record(1), b"")
    async with committing(store) as batch:
        batch.delete_buffer(1)
    assert list(store.departed_rows(1)) == []
    assert list(store.payload_uids(1)) == []
