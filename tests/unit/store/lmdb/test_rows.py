from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import lmdb
import msgpack
import pytest

from experience_buffer_server.store import (
    AdvantageRow,
    BufferRow,
    ConsumerRow,
    DamagedRecordError,
    DamagedRows,
    GroupRow,
    LeaseRow,
    ProgressRow,
    Record,
    StoreError,
    row_codec,
)
from experience_buffer_server.store.lmdb.disk.commit_number import sign_commit
from experience_buffer_server.store.lmdb.disk.format import (
    LAST_BUFFER_KEY,
    buffer_key,
    memory_key,
    memory_log_key,
    named_key,
    numbered_key,
    payload_key,
)
from experience_buffer_server.store.lmdb.store import LmdbStore

MakeRecord = Callable[..., Record]
OpenStore = Callable[..., "asyncio.Future[LmdbStore]"]
MakeBuffer = Callable[[int], BufferRow]


async def fill(store: LmdbStore, buffer: BufferRow, records: list[Record]) -> None:
    batch = store.batch()
    batch.put_buffer(buffer)
    for record in records:
        batch.append(buffer.id, record, b"payload of " + record.uid.encode())
    await store.commit(batch)


async def test_every_row_comes_back_after_a_restart(
    open_store: OpenStore, make_record: MakeRecord, buffer_row: MakeBuffer
) -> None:
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
    store = await open_store()
    await fill(store, buffer_row(1), records)
    batch = store.batch()
    batch.put_group(1, group)
    batch.put_lease(1, lease)
    batch.put_progress(1, progress)
    for consumer in reversed(consumers):
        batch.put_consumer(1, consumer)
    batch.put_advantages(1, advantage, magnitude=0.73)
    batch.remember(1, "uid", "gone", b"digest", 73.5)
    await store.commit(batch)
    await store.close()

    store = await open_store()
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


async def test_buffers_and_rows_load_in_the_order_of_their_numbers(
    open_store: OpenStore, make_record: MakeRecord, buffer_row: MakeBuffer
) -> None:
    store = await open_store()
    for buffer_id in (256, 1, 2):
        await fill(store, buffer_row(buffer_id), [make_record(seq) for seq in (257, 3, 256)])
    states = list(store.load())
    assert [state.row.id for state in states] == [1, 2, 256]
    assert all([r.seq for r in state.records] == [3, 256, 257] for state in states)


async def test_remove_takes_payload_record_advantages_and_progress(
    open_store: OpenStore, make_record: MakeRecord, buffer_row: MakeBuffer
) -> None:
    store = await open_store()
    gone, kept = make_record(1), make_record(2)
    await fill(store, buffer_row(1), [gone, kept])
    batch = store.batch()
    for record in (gone, kept):
        batch.put_progress(1, ProgressRow(seq=record.seq))
        row = AdvantageRow(seq=record.seq, advantages=b"", returns=b"", details={})
        batch.put_advantages(1, row)
    batch.put_group(1, GroupRow(id=1, key="k", size=2, open_time=0.0))
    batch.put_lease(1, LeaseRow(id=1, consumer="c", units=[], deadline=0.0))
    await store.commit(batch)
    batch = store.batch()
    batch.remove(1, gone)
    batch.delete_group(1, 1)
    batch.delete_lease(1, 1)
    await store.commit(batch)
    (state,) = store.load()
    assert state.records == [kept]
    assert state.computed == {2: 0.0}
    assert [row.seq for row in state.progress] == [2]
    assert (state.groups, state.leases) == ([], [])
    assert store.payloads(1, [gone.uid]) == [None]
    assert store.payloads(1, [kept.uid]) != [None]


async def test_put_record_keeps_payload_advantages_and_progress(
    open_store: OpenStore, make_record: MakeRecord, buffer_row: MakeBuffer
) -> None:
    store = await open_store()
    record, other = make_record(1), make_record(2)
    await fill(store, buffer_row(1), [record, other])
    advantage = AdvantageRow(seq=1, advantages=b"\1" * 4, returns=b"\2" * 4, details={})
    batch = store.batch()
    batch.put_advantages(1, advantage)
    batch.put_progress(1, ProgressRow(seq=1, acked=["actor"]))
    await store.commit(batch)
    batch = store.batch()
    changed = make_record(1, priority=0.0, version=151)
    batch.put_record(1, changed)
    await store.commit(batch)
    (state,) = store.load()
    assert state.records == [changed, other]
    assert [row.acked for row in state.progress] == [["actor"]]
    assert store.payloads(1, [record.uid]) == [b"payload of " + record.uid.encode()]
    assert store.advantages(1, [1]) == [advantage]


async def test_put_advantages_again_replaces_them_and_their_magnitude(
    open_store: OpenStore, make_record: MakeRecord, buffer_row: MakeBuffer
) -> None:
    store = await open_store()
    await fill(store, buffer_row(1), [make_record(seq) for seq in (1, 2, 3)])
    for number in (0.31, 0.37):
        batch = store.batch()
        for seq in (1, 2, 3):
            row = AdvantageRow(seq=seq, advantages=b"\1" * 4, returns=b"", details={"n": number})
            batch.put_advantages(1, row, magnitude=number * seq)
        await store.commit(batch)
    batch = store.batch()
    batch.delete_advantages(1, 2)
    await store.commit(batch)
    (state,) = store.load()
    assert state.computed == {1: 0.37, 3: 0.37 * 3}
    rows = store.advantages(1, [1, 2, 3])
    found = [row.details if isinstance(row, AdvantageRow) else row for row in rows]
    assert found == [{"n": 0.37}, None, {"n": 0.37}]


async def test_delete_consumer_takes_it_alone(
    open_store: OpenStore, buffer_row: MakeBuffer
) -> None:
    store = await open_store()
    for buffer_id in (1, 2):
        await fill(store, buffer_row(buffer_id), [])
        batch = store.batch()
        for name in ("actor", "actor-2"):
            batch.put_consumer(buffer_id, ConsumerRow(name=name))
        await store.commit(batch)
    batch = store.batch()
    batch.delete_consumer(1, "actor")
    await store.commit(batch)
    left = [[row.name for row in state.consumers] for state in store.load()]
    assert left == [["actor-2"], ["actor", "actor-2"]]


async def test_delete_buffer_takes_all_of_it_and_nothing_else(
    open_store: OpenStore, make_record: MakeRecord, buffer_row: MakeBuffer
) -> None:
    store = await open_store()
    records = [make_record(seq) for seq in range(1, 500)]
    for buffer_id in (1, 2, 3):
        await fill(store, buffer_row(buffer_id), records)
        batch = store.batch()
        batch.remember(buffer_id, "uid", "u", b"d", 5.0)
        batch.put_consumer(buffer_id, ConsumerRow(name="trainer"))
        await store.commit(batch)
    batch = store.batch()
    batch.delete_buffer(2)
    await store.commit(batch)
    assert [(s.row.id, len(s.records)) for s in store.load()] == [(1, 499), (3, 499)]
    assert store.payloads(2, [records[0].uid]) == [None]
    assert [store.recall(b, "uid", ["u"]) for b in (1, 2, 3)] == [[b"d"], [None], [b"d"]]
    assert None not in store.payloads(3, [r.uid for r in records])
    # The id's tables are empty, not only its row gone.
    await fill(store, buffer_row(2), [])
    again = next(s for s in store.load() if s.row.id == 2)
    assert (again.records, again.consumers) == ([], [])
    assert await store.prune(2, 10.0) == 0


async def test_changes_of_a_batch_apply_in_order(
    open_store: OpenStore, make_record: MakeRecord, buffer_row: MakeBuffer
) -> None:
    store = await open_store()
    record = make_record(1)
    batch = store.batch()
    batch.put_buffer(buffer_row(1))
    batch.append(1, record, b"first")
    batch.remove(1, record)
    batch.append(1, record, b"second")
    await store.commit(batch)
    assert store.payloads(1, [record.uid]) == [b"second"]


async def test_prune_forgets_the_oldest_up_to_its_limit(open_store: OpenStore) -> None:
    store = await open_store()
    batch = store.batch()
    for number in range(10):
        batch.remember(1, "uid", f"u{number}", b"v", float(number))
        batch.remember(2, "uid", f"u{number}", b"v", float(number))
    await store.commit(batch)
    keys = [f"u{number}" for number in range(10)]
    assert await store.prune(1, 7.0, limit=3) == 3
    assert store.recall(1, "uid", keys) == [None] * 3 + [b"v"] * 7
    assert await store.prune(1, 7.0) == 4
    assert await store.prune(1, 7.0) == 0
    assert store.recall(1, "uid", keys) == [None] * 7 + [b"v"] * 3
    assert store.recall(2, "uid", keys) == [b"v"] * 10


async def test_prune_spares_what_was_remembered_again(open_store: OpenStore) -> None:
    store = await open_store()
    for time, value in ((1.0, b"old"), (9.0, b"fresh")):
        batch = store.batch()
        batch.remember(1, "uid", "again", value, time)
        batch.remember(1, "uid", f"once at {time}", value, time)
        await store.commit(batch)
    assert await store.prune(1, 5.0) == 1
    assert store.recall(1, "uid", ["again", "once at 1.0"]) == [b"fresh", None]
    assert await store.prune(1, 10.0) == 2
    assert store.recall(1, "uid", ["again"]) == [None]


async def test_prune_does_not_wait_behind_a_clock_that_was_ahead(open_store: OpenStore) -> None:
    store = await open_store()
    batch = store.batch()
    batch.remember(1, "uid", "from the future", b"", 1e10)
    batch.remember(1, "uid", "from now", b"", 1e9)
    await store.commit(batch)
    assert await store.prune(1, 2e9) == 1
    assert store.recall(1, "uid", ["from the future", "from now"]) == [b"", None]


async def test_what_the_store_cannot_hold_is_refused_when_it_is_noted(
    open_store: OpenStore, make_record: MakeRecord
) -> None:
    store = await open_store()
    batch = store.batch()
    with pytest.raises(ValueError, match="509 bytes"):
        batch.append(1, make_record(1, uid="3/math-1/5/7/".ljust(509, "u")), b"")
    with pytest.raises(ValueError, match="NUL"):
        batch.remember(1, "a\0b", "key", b"", 1.0)
    with pytest.raises(ValueError, match="bytes"):
        batch.remember(1, "uid", "k" * 504, b"", 1.0)
    with pytest.raises(ValueError, match="epoch"):
        batch.remember(1, "uid", "key", b"", float("nan"))
    with pytest.raises(ValueError, match="bytes"):
        batch.put_consumer(1, ConsumerRow(name="c" * 508))
    assert batch.operations == []
    longest = make_record(1, uid="3/math-1/5/7/".ljust(500, "u"))
    batch.append(1, longest, b"fits")
    batch.remember(1, "group", "k" * 500, b"fits", 1.0)
    await store.commit(batch)
    assert store.payloads(1, [longest.uid]) == [b"fits"]
    assert store.recall(1, "group", ["k" * 500]) == [b"fits"]


async def test_a_batch_that_cannot_be_applied_fails_alone(
    open_store: OpenStore, make_record: MakeRecord
) -> None:
    store = await open_store()
    batches = [store.batch() for _ in range(3)]
    for seq, batch in enumerate(batches, 1):
        batch.append(1, make_record(seq), b"payload")
    batches[1].append(1, make_record(1, uid="3/math-1/5/8/"), b"its seq is taken")
    commits = [store.commit(batch) for batch in batches]
    first, second, third = await asyncio.gather(*commits, return_exceptions=True)
    assert first is None
    assert isinstance(second, StoreError)
    assert third is None
    uids = [make_record(seq).uid for seq in (1, 2, 3)]
    assert store.payloads(1, uids) == [b"payload", None, b"payload"]
    assert not store.failed.is_set()


def damage(path: Path, *rows: tuple[bytes, bytes]) -> None:
    """Flip one bit in the middle of each row, given as table and key."""
    with lmdb.open(str(path), max_dbs=16) as env:
        for name, key in rows:
            table = env.open_db(name)
            with env.begin(write=True) as txn:
                value = bytearray(txn.get(key, db=table) or b"")
                value[len(value) // 2] ^= 1
                txn.put(key, bytes(value), db=table)
                sign_commit(txn, env.open_db(b"meta", txn=txn))


async def test_damaged_rows_are_left_out_and_named(
    open_store: OpenStore, path: Path, make_record: MakeRecord, buffer_row: MakeBuffer
) -> None:
    store = await open_store()
    await fill(store, buffer_row(1), [make_record(seq) for seq in (1, 2, 3, 5)])
    batch = store.batch()
    for seq in (1, 3, 5):
        row = AdvantageRow(
            seq=seq, advantages=b"\1" * 4, returns=b"\2" * 4, details={"mean_magnitude": 0.31}
        )
        batch.put_advantages(1, row, magnitude=0.31)
    batch.put_lease(1, LeaseRow(id=4, consumer="c", units=[[1]], deadline=7.5))
    batch.put_group(1, GroupRow(id=11, key="k", size=2, open_time=0.0))
    batch.put_progress(1, ProgressRow(seq=1, acked=["actor"]))
    batch.put_consumer(1, ConsumerRow(name="actor-17"))
    batch.put_last_seq(1, 997)
    for uid in ("lost", "kept"):
        batch.remember(1, "uid", uid, b"digest", 73.5)
    await store.commit(batch)
    await store.close()
    damage(
        path,
        (b"records", numbered_key(1, 2)),
        (b"groups", numbered_key(1, 11)),
        (b"leases", numbered_key(1, 4)),
        (b"progress", numbered_key(1, 1)),
        (b"consumers", named_key(1, "actor-17")),
        (b"counters", buffer_key(1)),
        (b"magnitudes", numbered_key(1, 3)),
        (b"magnitudes", numbered_key(1, 5)),
        (b"advantages", numbered_key(1, 1)),
        (b"advantages", numbered_key(1, 5)),
        (b"payloads", payload_key(1, make_record(3).uid)),
        (b"memory", memory_key(1, "uid", "lost")),
    )
    store = await open_store()
    (state,) = store.load()
    assert [record.seq for record in state.records] == [1, 3, 5]
    assert (state.groups, state.leases, state.progress, state.consumers) == ([], [], [], [])
    assert state.damaged == DamagedRows(records=[2], groups=[11], leases=[4], any_records=True)
    assert state.last_seq == 5, "no seq is given again, though the counter is damaged"
    assert state.computed == {1: 0.31, 3: 0.31}, "a magnitude is read from the advantages"
    assert sorted(store.damaged) == [
        "consumers: buffer 1 row actor-17",
        "counters: buffer 1",
        "groups: buffer 1 row 11",
        "leases: buffer 1 row 4",
        "magnitudes: buffer 1 row 3",
        "magnitudes: buffer 1 row 5",
        "progress: buffer 1 row 1",
        "records: buffer 1 row 2",
    ]
    first, second, third = store.advantages(1, [1, 2, 3])
    assert isinstance(first, DamagedRecordError)
    assert str(first).startswith("advantages: buffer 1 row 1 can't be read back")
    assert (second, third and not isinstance(third, DamagedRecordError)) == (None, True)
    uids = [make_record(seq).uid for seq in (1, 3, 4, 5)]
    payloads = store.payloads(1, uids)
    assert [type(payload) for payload in payloads] == [
        bytes, DamagedRecordError, type(None), bytes,
    ]  # fmt: skip
    assert f"payloads: buffer 1 row {uids[1]} can't be read back" in str(payloads[1])
    assert store.recall(1, "uid", ["lost", "kept"]) == [None, b"digest"]
    assert set(store.payload_uids(1)) == {make_record(seq).uid for seq in (1, 2, 3, 5)}


async def test_a_buffer_outlives_its_row_and_its_id_outlives_both(
    open_store: OpenStore, path: Path, make_record: MakeRecord, buffer_row: MakeBuffer
) -> None:
    store = await open_store()
    for buffer_id in (1, 2):
        await fill(store, buffer_row(buffer_id), [make_record(1)])
    await store.close()
    damage(path, (b"buffers", buffer_key(1)), (b"buffers", buffer_key(2)))
    store = await open_store()
    assert [state.row for state in store.load()] == [buffer_row(1), buffer_row(2)]
    await store.close()
    damage(path, (b"buffer_copies", buffer_key(2)))
    store = await open_store()
    assert [state.row.id for state in store.load()] == [1]
    assert store.last_buffer_id == 2
    batch = store.batch()
    batch.put_buffer(buffer_row(1))
    await store.commit(batch)
    list(store.load())
    assert store.damaged == ["buffer_copies: buffer 2", "buffers: buffer 2"]


async def test_a_row_that_got_to_another_key_or_table_is_noticed(
    open_store: OpenStore, path: Path, make_record: MakeRecord, buffer_row: MakeBuffer
) -> None:
    store = await open_store()
    await fill(store, buffer_row(1), [make_record(1), make_record(2)])
    await store.close()
    with lmdb.open(str(path), max_dbs=16) as env:
        records, leases = env.open_db(b"records"), env.open_db(b"leases")
        with env.begin(write=True) as txn:
            stored = txn.get(numbered_key(1, 1), db=records)
            assert stored is not None
            txn.put(numbered_key(1, 2), stored, db=records)
            txn.put(numbered_key(1, 1), stored, db=leases)
            sign_commit(txn, env.open_db(b"meta", txn=txn))
    store = await open_store()
    (state,) = store.load()
    assert state.damaged == DamagedRows(records=[2], leases=[1], any_records=True)


async def test_pruning_passes_damaged_rows(
    open_store: OpenStore, path: Path, buffer_row: MakeBuffer
) -> None:
    store = await open_store()
    await fill(store, buffer_row(1), [])
    batch = store.batch()
    for number in range(3):
        batch.remember(1, "uid", str(number), b"digest", 10.0 + number)
    await store.commit(batch)
    await store.close()
    keys = [memory_key(1, "uid", str(number)) for number in range(3)]
    damage(path, (b"memory", keys[0]), (b"memory_log", memory_log_key(keys[1], 11.0)))
    store = await open_store()
    assert await store.prune(1, 100.0) == 2
    # What only the log knew to be old stays.
    assert store.recall(1, "uid", ["0", "1", "2"]) == [None, b"digest", None]


def test_a_lease_is_stored_as_before_where_it_has_nothing_of_its_own() -> None:
    """Rows of before there were probabilities are read, and most of today's are like them."""
    lease = LeaseRow(id=59, consumer="actor", units=[[1, 2]], deadline=61.5, num_experiences=2)
    old = msgpack.packb((59, "actor", [[1, 2]], 61.5, "open", 2, [], {}))
    assert row_codec.encode_lease(lease, msgpack.packb) == old
    assert row_codec.decode_lease(old) == lease


async def test_the_highest_id_outlives_its_buffer_but_not_its_own_row(
    open_store: OpenStore, path: Path, buffer_row: MakeBuffer
) -> None:
    store = await open_store()
    for row in (buffer_row(7), buffer_row(3)):
        await fill(store, row, [])
    batch = store.batch()
    batch.delete_buffer(7)
    await store.commit(batch)
    await store.close()
    store = await open_store()
    assert ([state.row.id for state in store.load()], store.last_buffer_id) == ([3], 7)
    await store.close()
    damage(path, (b"meta", LAST_BUFFER_KEY))
    store = await open_store()
    assert ([state.row.id for state in store.load()], store.last_buffer_id) == ([3], 3)
    assert store.damaged == ["meta: row last buffer"]


def test_progress_of_before_it_said_who_passed_an_experience_over_is_read() -> None:
    used = ProgressRow(seq=3, acked=["actor"], times_sampled={"actor": 2})
    old = msgpack.packb((3, ["actor"], {}, {"actor": 2}, {}, {}))
    assert row_codec.encode_progress(used, msgpack.packb) == old
    assert row_codec.decode_progress(old) == used
    passed = msgpack.packb((3, ["actor", "critic"], {}, {"actor": 2, "critic": 0}, {}, {}))
    assert row_codec.decode_progress(passed).passed_over == ["critic"]
