"""A bit of a key has changed: nothing sound is lost, overwritten, or hidden."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from pathlib import Path
from typing import Any

import lmdb
import pytest
import xxhash

from experience_buffer_server.store.interface import (
    GroupRow,
    LeaseRow,
    StoreError,
    StoreFailedError,
    StoreFormatError,
)
from experience_buffer_server.store.lmdb.disk.format import (
    Table,
    buffer_key,
    numbered_key,
)
from experience_buffer_server.store.lmdb.reader import LmdbReader
from experience_buffer_server.store.lmdb.verify.check import Kind, check
from tests.damaging import flip, flip_key
from tests.unit.store.conftest import OpenStore, buffer_row, committing, make_record

NUM = 60
PLAIN: dict[str, Any] = {
    "group_id": 0, "payload_bytes": 1, "digest_number": xxhash.xxh3_128_intdigest(b"x"), "fields": 0,
}  # fmt: skip


@pytest.fixture
async def filled(open_store: OpenStore, path: Path) -> Path:
    """A closed store of two buffers."""
    store = await open_store()
    async with committing(store) as batch:
        for buffer_id in (1, 3):
            batch.put_buffer(buffer_row(buffer_id))
            for seq in range(1, NUM + 1):
                batch.append(buffer_id, make_record(seq, **PLAIN), b"x")
            batch.put_group(buffer_id, GroupRow(id=5, key="k", size=2, open_time=0.0))
            batch.put_lease(buffer_id, LeaseRow(id=7, consumer="c", units=[], deadline=0.0))
    await store.close()
    return path


def test_a_row_out_of_order_keeps_the_server_from_starting(filled: Path) -> None:
    flip_key(filled, Table.RECORDS, numbered_key(1, 10), byte=0, bit=1)
    with (
        LmdbReader(filled) as reader,
        pytest.raises(
            StoreFailedError, match=r"out of order: .*nothing was changed; restore the store"
        ),
    ):
        next(reader.load())


@pytest.mark.parametrize(
    ("table", "key"),
    [
        (Table.RECORDS, numbered_key(3, NUM)),
        (Table.GROUPS, numbered_key(3, 5)),
        (Table.LEASES, numbered_key(3, 7)),
    ],
)
def test_a_number_far_too_high_is_not_believed(filled: Path, table: Table, key: bytes) -> None:
    """The last row of a table: its order says nothing."""
    flip_key(filled, table, key, byte=4, bit=0x80)
    with LmdbReader(filled) as reader:
        _, state = reader.load()
        assert reader.damaged == [f"{table.disk_name.decode()}: buffer 3 row {2**63 + key[-1]}"]
    numbers = [*state.damaged.records, *state.damaged.groups, *state.damaged.leases]
    assert len(numbers) == 1
    assert key[-1] <= max(numbers) < 2**40
    assert state.last_seq < 2**40


async def test_the_id_of_a_lone_damaged_lease_is_not_given_again(
    open_store: OpenStore, path: Path
) -> None:
    """Ids begin at the buffer's creation: that high is no sign of damage."""
    row = dataclasses.replace(buffer_row(1), create_time=1.9e9)
    given = row.lease_floor + 3
    store = await open_store()
    async with committing(store) as batch:
        batch.put_buffer(row)
        batch.put_lease(1, LeaseRow(id=given, consumer="c", units=[], deadline=0.0))
    await store.close()
    flip(path, Table.LEASES, numbered_key(1, given))
    with LmdbReader(path) as reader:
        (state,) = reader.load()
    assert state.damaged.leases == [given]


@pytest.mark.parametrize("byte", [0, 3])
def test_a_row_of_no_buffer_is_missed_where_it_lies(filled: Path, byte: int) -> None:
    """At the end of the table with a higher buffer, at its beginning with none."""
    at_end = byte == 0
    key = numbered_key(3, NUM) if at_end else numbered_key(1, 1)
    flip_key(filled, Table.RECORDS, key, byte=byte, bit=1)
    with LmdbReader(filled) as reader:
        first, second = reader.load()
    lost, other = (second, first) if at_end else (first, second)
    assert lost.damaged.records == [NUM if at_end else 1]
    assert (len(lost.records), len(other.records)) == (NUM - 1, NUM)
    assert other.damaged.records == []
    assert other.damaged.any_records


def test_a_buffer_is_found_by_its_copy(filled: Path) -> None:
    flip_key(filled, Table.BUFFERS, buffer_key(3), byte=3, bit=0x40)
    with LmdbReader(filled) as reader:
        assert [state.row.id for state in reader.load()] == [1, 3]
        assert 3 <= reader.last_buffer_id < 2**20
        assert reader.damaged == ["buffers: buffer 67"]


async def test_no_append_overwrites_a_record(filled: Path, open_store: OpenStore) -> None:
    store = await open_store()
    batches = [store.batch() for _ in range(3)]
    for batch, seq in zip(batches, (NUM + 1, 5, NUM + 2), strict=True):
        batch.append(1, make_record(seq, uid=f"3/math-{seq}/5/7/new", group_id=0), b"y")
    done = await asyncio.gather(*map(store.commit, batches), return_exceptions=True)
    assert done[::2] == [None, None]
    assert type(done[1]) is StoreError
    assert "given twice: records: buffer 1 row 5 is there already" in str(done[1])
    state = next(store.load())
    assert [record.uid for record in state.records[4:5]] == ["3/math-5/5/7/é"]
    assert len(state.records) == NUM + 2
    assert list(store.payloads(1, ["3/math-5/5/7/new"])) == [None]
    replaced = store.batch()
    replaced.replace(1, make_record(5, uid="3/math-5/5/7/again", group_id=0), b"z")
    await store.commit(replaced)


@pytest.mark.parametrize("which", ["older", "older by little", "newer"])
async def test_an_older_commit_is_noticed(filled: Path, open_store: OpenStore, which: str) -> None:
    """A changed number on a meta page makes LMDB open the other one, without the last commit."""
    store = await open_store()
    async with committing(store) as batch:
        batch.append(1, make_record(NUM + 1, **PLAIN), b"x")
    await store.close()
    file = filled / "data.mdb"
    data = bytearray(file.read_bytes())
    place = 16 + struct.calcsize("=II8xQ48x48xQ")
    numbers = [struct.unpack_from("=Q", data, page * 4096 + place)[0] for page in (0, 1)]
    page = numbers.index(max(numbers) if which == "newer" else min(numbers))
    changed = {"older": numbers[page] + 64, "older by little": numbers[page] + 2, "newer": 0}[which]
    struct.pack_into("=Q", data, page * 4096 + place, changed)
    file.write_bytes(data)
    report = check(filled)
    assert report.totals[Kind.MISSING_COMMIT] == 1
    assert "the last commit may be missing" in report.findings[0].message
    with pytest.raises(StoreFormatError, match=r"the last commit may be missing; restore the"):
        await open_store()


def test_a_copy_of_a_store_is_of_its_last_commit(filled: Path, tmp_path: Path) -> None:
    """A compacted one starts numbering anew."""
    for name, compact in (("plain", False), ("compact", True)):
        to = tmp_path / name
        to.mkdir()
        with lmdb.open(str(filled), readonly=True, lock=False, max_dbs=16) as env:
            env.copy(str(to), compact=compact)
        assert check(to).is_clean
