"""Opening a store: the one place that says what is refused, and why."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from experience_buffer_server.store.interface import StoreFailedError, StoreFormatError
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.commit_number import DATA_NAME, read_meta_pages
from experience_buffer_server.store.lmdb.disk.format import Table

CURE = "restore the store from a snapshot"
"""What to do about damage that a server can't go on with."""
_ROW = re.compile(re.escape(disk.MAGIC) + rb"([0-9]+)(, sealed [0-9a-f]{16})?")
_OTHER_NAMESPACE = (
    "a process of the same id reads it, from another container: run this in the one of the server, "
    "or in one that shares its process ids"
)


def open_environment(path: Path, **options: Any) -> lmdb.Environment:
    """Open the LMDB file at `path`, with options of `lmdb.open`.

    Raises:
        StoreFormatError: There is something else, or it is cut short.
        lmdb.Error: It can't be opened.
    """
    try:
        env = lmdb.open(str(path), max_dbs=disk.MAX_DBS, max_readers=disk.MAX_READERS, **options)
    except (lmdb.InvalidError, lmdb.VersionMismatchError) as error:
        raise StoreFormatError(_explain_unopenable(path, error)) from error
    _check_length(env, path)
    return env


def open_to_read(
    path: Path, *, lock: bool = True, readahead: bool = True
) -> tuple[lmdb.Environment, list[lmdb._Database]]:
    """Open the store at `path`, which others may have open, and its tables in their order.

    A process must not open the same store twice: LMDB's locks are per process.

    Args:
        path: Its directory.
        lock: Keep the writer from reusing pages that are read here. Without it no lock file is
            made, and nobody may write meanwhile.
        readahead: Let the system read more than is asked for.

    Raises:
        StoreFormatError: There is no store, one of another version, or one that is cut short.
        StoreFailedError: It can't be opened.
    """
    try:
        # Of the size that the writer uses.
        env = open_environment(
            path, readonly=True, create=False, lock=lock, map_size=0, readahead=readahead
        )
    except lmdb.Error as error:
        why = f"{error}; {_OTHER_NAMESPACE}" if error.code == errno.EAGAIN else str(error)
        raise StoreFailedError(f"can't open the store at {path}: {why}") from error
    try:
        return env, _open_tables(env, path)
    except BaseException:
        env.close()
        raise


def _open_tables(env: lmdb.Environment, path: Path) -> list[lmdb._Database]:
    # Not in a transaction of ours: the handles would end with it.
    try:
        meta = env.open_db(Table.META.disk_name, create=False)
        with begin(env) as txn:
            value = txn.get(disk.FORMAT_KEY, db=meta)
            check_format(None if value is None else bytes(value), path)
        return handles(env)
    except (lmdb.NotFoundError, lmdb.IncompatibleError) as error:
        check_format(None, path)
        raise StoreFormatError(f"{path}: {error}") from error
    except lmdb.Error as error:
        raise StoreFailedError(f"can't read the store at {path}: {error}; {CURE}") from error


def handles(env: lmdb.Environment) -> list[lmdb._Database]:
    """A store's tables, in their order."""
    return [env.open_db(table.disk_name, create=False) for table in Table]


@contextmanager
def at_rest(path: Path) -> Iterator[tuple[lmdb.Transaction[memoryview], list[lmdb._Database]]]:
    """Read a store that nobody else has open, without a lock file: it would become a part of it.

    Returns:
        A transaction, and the tables.

    Raises:
        StoreFormatError: As `open_to_read`.
        StoreFailedError: As that, also from within the block.
    """
    env, tables = open_to_read(path, lock=False)
    try:
        with env, begin(env) as txn:
            yield txn, tables
    except lmdb.Error as error:
        raise StoreFailedError(f"can't read the store at {path}: {error}") from error


def begin(env: lmdb.Environment) -> lmdb.Transaction[memoryview]:
    """A transaction on the newest commit; no other may be open in the environment."""
    while True:
        try:
            return env.begin(buffers=True)
        except lmdb.MapResizedError:
            env.set_mapsize(0)


def check_format(value: bytes | None, path: Path) -> None:
    """Compare what a store's format row says with what this code reads.

    Raises:
        StoreFormatError: It is not a store, one of another version, or its format row is damaged.
    """
    if value == disk.FORMAT_VALUE:
        return
    found = _ROW.fullmatch(value or b"")
    if value is None or not (disk.MAGIC in value or b", sealed " in value):
        raise StoreFormatError(
            f"{path} holds an LMDB database that is not an experience buffer store; "
            "use another directory"
        )
    version = 0 if found is None else int(found[1])
    # A version that a damaged digit made up must not send anybody to another server.
    is_torn = found is not None and (bool(found[2]) or version == disk.FORMAT_VERSION)
    if found is None or (is_torn and value != disk.format_value(version)):
        raise StoreFormatError(
            f"{path}: the row that says the store's format version is damaged ({value!r:.80}); {CURE}"
        )
    cure = "upgrade this server to the version that wrote it"
    if version < disk.FORMAT_VERSION:
        cure = (
            "run the server version that wrote it until what it holds is consumed, then start this "
            "one on an empty directory"
        )
    raise StoreFormatError(
        f"{path} holds a store of format version {version}, this server reads version "
        f"{disk.FORMAT_VERSION}; {cure}, or use another directory"
    )


def _explain_unopenable(path: Path, error: lmdb.Error) -> str:
    """Say why LMDB refuses the file at `path`, and what to do."""
    pages = read_meta_pages(path)
    sound = [number for number, page in enumerate(pages) if not page.problem]
    if len(sound) == 1:
        bad = 1 - sound[0]
        return (
            f"{path / DATA_NAME}: its meta page {bad} is damaged ({pages[bad].problem}), the other "
            f"one is of commit {pages[sound[0]].commit}; LMDB opens no such file; {CURE}"
        )
    return (
        f"{path / DATA_NAME} is not an LMDB database of this kind ({error}); use another directory"
    )


def _check_length(env: lmdb.Environment, path: Path) -> None:
    """Refuse a file that ends before its last page: reading on would end the process.

    Raises:
        StoreFormatError: It is cut short.
    """
    needed = (env.info()["last_pgno"] + 1) * int(env.stat()["psize"])
    found = (path / DATA_NAME).stat().st_size
    if found < needed:
        env.close()
        raise StoreFormatError(
            f"{path / DATA_NAME} is cut short: it has {found} bytes, its pages reach to {needed}; "
            f"{CURE}"
        )
