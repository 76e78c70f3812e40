from __future__ import annotations

from pathlib import Path

import lmdb

from experience_buffer_server.store.interface import (
    AdvantageRow,
    ConsumerRow,
    DamagedRecordError,
    DamagedRows,
    GroupRow,
    LeaseRow,
    ProgressRow,
)
from experience_buffer_server.store.lmdb.disk.commit_number import sign_commit
from experience_buffer_server.store.lmdb.disk.format import (
    LAST_BUFFER_KEY,
    Table,
    buffer_key,
    memory_key,
    memory_log_key,
    named_key,
    numbered_key,
    payload_key,
)
from tests.damaging import flip
from tests.unit.store.conftest import OpenStore, buffer_row, committing, fill, make_record


def damage(path: Path, *rows: tuple[Table, bytes]) -> None:
    for table, key in rows:
        flip(path, table, key)


async def test_damaged_rows_are_left_out_and_named(open_store: OpenStore, path: Path) -> None:
    store = await open_store()
    await fill(store, buffer_row(1), [make_record(seq) for seq in (1, 2, 3, 5)])
    async with committing(store) as batch:
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
    await store.close()
    damage(
        path,
        (Table.RECORDS, numbered_key(1, 2)),
        (Table.GROUPS, numbered_key(1, 11)),
        (Table.LEASES, numbered_key(1, 4)),
        (Table.PROGRESS, numbered_key(1, 1)),
        (Table.CONSUMERS, named_key(1, "actor-17")),
        (Table.COUNTERS, buffer_key(1)),
        (Table.MAGNITUDES, numbered_key(1, 3)),
        (Table.MAGNITUDES, numbered_key(1, 5)),
        (Table.ADVANTAGES, numbered_key(1, 1)),
        (Table.ADVANTAGES, numbered_key(1, 5)),
        (Table.PAYLOADS, payload_key(1, make_record(3).uid)),
        (Table.MEMORY, memory_key(1, "uid", "lost")),
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
    open_store: OpenStore, path: Path
) -> None:
    store = await open_store()
    for buffer_id in (1, 2):
        await fill(store, buffer_row(buffer_id), [make_record(1)])
    await store.close()
    damage(path, (Table.BUFFERS, buffer_key(1)), (Table.BUFFERS, buffer_key(2)))
    store = await open_store()
    assert [state.row for state in store.load()] == [buffer_row(1), buffer_row(2)]
    await store.close()
    damage(path, (Table.BUFFER_COPIES, buffer_key(2)))
    store = await open_store()
    assert [state.row.id for state in store.load()] == [1]
    assert store.last_buffer_id == 2
    async with committing(store) as batch:
        batch.put_buffer(buffer_row(1))
    list(store.load())
    assert store.damaged == ["buffer_copies: buffer 2", "buffers: buffer 2"]


async def test_a_row_that_got_to_another_key_or_table_is_noticed(
    open_store: OpenStore, path: Path
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


async def test_pruning_passes_damaged_rows(open_store: OpenStore, path: Path) -> None:
    store = await open_store()
    await fill(store, buffer_row(1), [])
    async with committing(store) as batch:
        for number in range(3):
            batch.remember(1, "uid", str(number), b"digest", 10.0 + number)
    await store.close()
    keys = [memory_key(1, "uid", str(number)) for number in range(3)]
    damage(path, (Table.MEMORY, keys[0]), (Table.MEMORY_LOG, memory_log_key(keys[1], 11.0)))
    store = await open_store()
    assert await store.prune(1, 100.0) == 2
    # What only the log knew to be old stays.
    assert store.recall(1, "uid", ["0", "1", "2"]) == [None, b"digest", None]


async def test_the_highest_id_outlives_its_buffer_but_not_its_own_row(
    open_store: OpenStore, path: Path
) -> None:
    store = await open_store()
    for row in (buffer_row(7), buffer_row(3)):
        await fill(store, row, [])
    async with committing(store) as batch:
        batch.delete_buffer(7)
    await store.close()
    store = await open_store()
    assert ([state.row.id for state in store.load()], store.last_buffer_id) == ([3], 7)
    await store.close()
    damage(path, (Table.META, LAST_BUFFER_KEY))
    store = await open_store()
    assert ([state.row.id for state in store.load()], store.last_buffer_id) == ([3], 3)
    assert store.damaged == ["meta: row last buffer"]
