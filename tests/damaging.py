"""What a failing disk does to a store: bytes of its files change while nobody looks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lmdb

from experience_buffer_server.store.lmdb.disk.format import (
    MAX_DBS,
    Extent,
    Table,
    decode_extent,
    unseal,
)
from experience_buffer_server.store.lmdb.large.payload_file import NAME


def raw(path: Path, table: Table, key: bytes) -> bytes:
    """A row of a store that nobody has open, as it is stored."""
    with (
        lmdb.open(str(path), readonly=True, lock=False, max_dbs=MAX_DBS) as env,
        env.begin(db=env.open_db(table.disk_name, create=False)) as txn,
    ):
        value = txn.get(key)
    assert value is not None, f"{table.name} has no row {key!r}"
    return value


def changing(path: Path, content: bytes) -> Iterator[tuple[bytearray, int]]:
    """The bytes of a store's file, to be changed, and each place where they have this content."""
    file = path / "data.mdb"
    data = bytearray(file.read_bytes())
    start = data.find(content)
    assert start >= 0, f"{content[:99]!r} isn't in one piece in the file"
    while start >= 0:
        yield data, start
        start = data.find(content, start + 1)
    file.write_bytes(data)


def flip(path: Path, table: Table, key: bytes, *, place: float = 0.5) -> None:
    """Flip one bit of a row where it lies in the file, and of its older copies there.

    Args:
        path: The store's directory.
        table: The row's table.
        key: Its key.
        place: Where in the row, 0 to below 1.
    """
    stored = raw(path, table, key)
    _flip(path, stored, int(place * len(stored)), 0x10)
    assert raw(path, table, key) != stored


def flip_key(path: Path, table: Table, key: bytes, *, byte: int, bit: int) -> None:
    """Flip one bit of a row's key where it lies in the file, and of its older copies there."""
    _flip(path, key + raw(path, table, key), byte, bit)


def _flip(path: Path, stored: bytes, byte: int, bit: int) -> None:
    file = path / "data.mdb"
    data = bytearray(file.read_bytes())
    start = data.find(stored)
    assert start >= 0, f"{stored!r} isn't in one piece in the file"
    while start >= 0:
        data[start + byte] ^= bit
        start = data.find(stored, start + 1)
    file.write_bytes(data)


def large(path: Path, key: bytes) -> Extent:
    """Where a large payload of a store that nobody has open lies in its file."""
    return decode_extent(unseal(Table.EXTENTS, key, memoryview(raw(path, Table.EXTENTS, key))))


def flip_large(path: Path, key: bytes, *, place: float = 0.5) -> None:
    """Flip one bit of a large payload where it lies in its file.

    Args:
        path: The store's directory.
        key: Its key in `PAYLOADS`.
        place: Where in the payload, 0 to below 1.
    """
    extent = large(path, key)
    with (path / NAME).open("r+b") as file:
        file.seek(extent.offset + int(place * extent.num_bytes))
        [byte] = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))
