"""Large payloads moved, written and changed by hand in a store that no server has open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeAlias

import lmdb

from experience_buffer_server.runtime.memory_arena import whole_blocks
from experience_buffer_server.store.lmdb.disk.commit_number import sign_commit
from experience_buffer_server.store.lmdb.disk.format import (
    MAX_DBS,
    SEAL_BYTES,
    Extent,
    Table,
    decode_extent,
    encode_extent,
    seal,
    unseal,
)
from experience_buffer_server.store.lmdb.large.payload_file import NAME, PayloadWriter
from experience_buffer_server.store.lmdb.large.reads import LargePayloads
from experience_buffer_server.store.payload import LARGE_PAYLOAD_BYTES, checksum

Tables: TypeAlias = "list[lmdb._Database]"


@contextmanager
def changing(
    path: Path, *, map_bytes: int = 1 << 27
) -> Iterator[tuple[lmdb.Transaction[bytes], Tables]]:
    """A write transaction that the store takes for one of its own."""
    with lmdb.open(str(path), max_dbs=MAX_DBS, map_size=map_bytes) as env:
        tables = [env.open_db(table.disk_name, create=False) for table in Table]
        with env.begin(write=True) as txn:
            yield txn, tables
            sign_commit(txn, tables[Table.META])


def put(path: Path, table: Table, key: bytes, value: bytes | None) -> None:
    """Put a sealed row, or remove it."""
    with changing(path) as (txn, tables):
        if value is None:
            assert txn.delete(key, db=tables[table])
        else:
            txn.put(key, seal(table, key, value), db=tables[table])


def write(path: Path, payload: bytes) -> int:
    """Append a payload to the file; where it begins."""
    file = path / NAME
    offset = whole_blocks(file.stat().st_size) if file.exists() else 0
    with closing(PayloadWriter(path)) as out:
        out.write([(offset, memoryview(payload))])
        out.sync()
    return offset


def put_large(path: Path, key: bytes, payload: bytes) -> None:
    """Store a payload in the file."""
    sum_ = checksum(payload)
    extent = Extent(write(path, payload), len(payload), sum_)
    put(path, Table.EXTENTS, key, encode_extent(extent))


def move_out(path: Path) -> None:
    """Move all large payloads that LMDB has into the file; a server may have done so before."""
    with changing(path) as (txn, tables), txn.cursor(tables[Table.PAYLOADS]) as cursor:
        for key, stored in cursor:
            payload = stored[:-SEAL_BYTES]
            if len(payload) >= LARGE_PAYLOAD_BYTES:
                extent = Extent(write(path, payload), len(payload), checksum(payload))
                row = seal(Table.EXTENTS, key, encode_extent(extent))
                txn.put(key, row, db=tables[Table.EXTENTS])
                txn.delete(key, db=tables[Table.PAYLOADS])


def move_in(path: Path, key: bytes) -> None:
    """Move a payload from the file into LMDB."""
    payload = payloads(path)[key]
    with changing(path) as (txn, tables):
        txn.delete(key, db=tables[Table.EXTENTS])
        txn.put(key, seal(Table.PAYLOADS, key, payload), db=tables[Table.PAYLOADS])


def rows(path: Path, table: Table) -> list[tuple[bytes, bytes]]:
    """The rows of a store that nobody has open, by key."""
    with (
        lmdb.open(str(path), readonly=True, lock=False, max_dbs=MAX_DBS) as env,
        env.begin(db=env.open_db(table.disk_name, create=False)) as txn,
    ):
        return [(key, bytes(unseal(table, key, memoryview(row)))) for key, row in txn.cursor()]


def extent_of(path: Path, key: bytes) -> Extent:
    """Where a payload lies."""
    return decode_extent(dict(rows(path, Table.EXTENTS))[key])


def payloads(path: Path) -> dict[bytes, bytes]:
    """All payloads of a store, wherever they lie, by key; each is sound."""
    found = dict(rows(path, Table.PAYLOADS))
    with closing(LargePayloads(path)) as large:
        for key, row in rows(path, Table.EXTENTS):
            assert key not in found
            with large.read(key, decode_extent(row)) as payload:
                found[key] = bytes(payload)
    return found
