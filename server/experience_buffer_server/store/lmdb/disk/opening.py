"""Opening a store to read it: the one place that says what is refused, and why."""

from __future__ import annotations

import errno
from pathlib import Path

import lmdb

from experience_buffer_server.store.interface import StoreFailedError, StoreFormatError
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.disk.meta_pages import check_length, explain_unopenable

CURE = "restore the store from a snapshot"
"""What to do about damage that a server can't go on with."""

_OTHER_NAMESPACE = (
    "a process of the same id reads it, from another container: run this in the one of the server, "
    "or in one that shares its process ids"
)


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
        env = lmdb.open(
            str(path),
            readonly=True,
            create=False,
            lock=lock,
            map_size=0,  # what the writer uses
            max_dbs=disk.MAX_DBS,
            max_readers=disk.MAX_READERS,
            readahead=readahead,
        )
    except (lmdb.InvalidError, lmdb.VersionMismatchError) as error:
        raise StoreFormatError(explain_unopenable(path, error)) from error
    except lmdb.Error as error:
        why = f"{error}; {_OTHER_NAMESPACE}" if error.code == errno.EAGAIN else str(error)
        raise StoreFailedError(f"can't open the store at {path}: {why}") from error
    check_length(env, path)
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
            disk.check_format(None if value is None else bytes(value), path)
        return [env.open_db(table.disk_name, create=False) for table in Table]
    except (lmdb.NotFoundError, lmdb.IncompatibleError) as error:
        disk.check_format(None, path)
        raise StoreFormatError(f"{path}: {error}") from error
    except lmdb.Error as error:
        raise StoreFailedError(f"can't read the store at {path}: {error}; {CURE}") from error


def begin(env: lmdb.Environment) -> lmdb.Transaction[memoryview]:
    """A transaction on the newest commit; no other may be open in the environment."""
    while True:
        try:
            return env.begin(buffers=True)
        except lmdb.MapResizedError:
            env.set_mapsize(0)
