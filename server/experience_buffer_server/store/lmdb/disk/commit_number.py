"""Which commit a store is at: by its meta pages, and by a row in which each transaction leaves its number.

LMDB has two meta pages, the first of its file, written by turns, and opens the newer one. A changed
number on one of them makes it open the older: everything fits together then, and the last commit is
missing. It refuses a file as a whole when one of them doesn't look like a meta page.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final, NamedTuple

import lmdb

from experience_buffer_server.store.interface import DamagedRecordError
from experience_buffer_server.store.lmdb.disk.format import Table, seal, unseal

COMMIT_KEY: Final = b"commit"
_FIRST: Final = 1
"""LMDB's number of the first commit; and of a compacted copy, whatever it is a copy of."""
_TRIES: Final = 10
DATA_NAME: Final = "data.mdb"
_META: Final = struct.Struct("=10xH4xII8xQ48x48xQQ")
"""Of every page, flags; then magic, version, map size, two table roots, last page, number of the commit."""
_META_FLAG: Final = 0x08
_MAGIC: Final = 0xBEEFC0DE
_VERSION: Final = 1


class MetaPage(NamedTuple):
    """One of the two."""

    problem: str
    """Why it is none; empty where it is one."""
    commit: int
    """Number of the commit that it describes."""


def read_meta_pages(path: Path) -> list[MetaPage]:
    """Both meta pages of the store at `path`; none where there is no file."""
    page_bytes = os.sysconf("SC_PAGESIZE")
    try:
        with open(path / DATA_NAME, "rb") as file:
            return [_read(file.read(page_bytes)) for _ in range(2)]
    except OSError:
        return []


def _read(page: bytes) -> MetaPage:
    if len(page) < _META.size:
        return MetaPage(f"the file ends after {len(page)} bytes of it", 0)
    flags, magic, version, *_, commit = _META.unpack_from(page)
    if not flags & _META_FLAG or magic != _MAGIC or version != _VERSION:
        return MetaPage("it isn't marked as one", commit)
    return MetaPage("", commit)


def sign_commit(txn: lmdb.Transaction[bytes], meta: lmdb._Database) -> None:
    """Leave the number of a write transaction in table META."""
    number = str(txn.id()).encode()
    txn.put(COMMIT_KEY, seal(Table.META, COMMIT_KEY, number), db=meta)


def commit_problem(txn: lmdb.Transaction[memoryview], meta: lmdb._Database, path: Path) -> str:
    """Why the commit that a read transaction sees isn't the last one; empty where it is."""
    opened, said = txn.id(), _said(txn, meta)
    if said is not None and opened not in (said, _FIRST):
        return (
            f"it was opened at commit {opened}, and what is there is of commit {said}: a meta page "
            "is damaged, and the last commit may be missing"
        )
    numbers: list[int] = []
    for _ in range(_TRIES):  # A writer may be changing them.
        numbers = [page.commit for page in read_meta_pages(path)]
        if len(numbers) < 2 or abs(numbers[0] - numbers[1]) <= 1:
            return ""
    return (
        f"its meta pages are of commits {numbers[0]} and {numbers[1]}, which never follow one "
        "another: one of them is damaged, and the last commit may be missing"
    )


def _said(txn: lmdb.Transaction[memoryview], meta: lmdb._Database) -> int | None:
    stored = txn.get(COMMIT_KEY, db=meta)
    if stored is None:
        return None
    try:
        return int(bytes(unseal(Table.META, COMMIT_KEY, stored)))
    except (DamagedRecordError, ValueError):
        return None  # The walk through its table says so.
