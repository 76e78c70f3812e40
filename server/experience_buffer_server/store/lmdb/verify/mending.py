"""Taking damage out of a store that no server has open, with what depends on it.

The sound rows are written into a new file, which then takes the place of the old one: so damaged
keys, and pages that no row is on, are gone, too. What is taken out is in a file of its own before
that. After it the store is clean again: what stays can be read, and fits together. The file of large
payloads stays as it is: where no row says that something lies there, it has room.
"""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Final

import lmdb

from experience_buffer_server.store.interface import StoreError, StoreFullError
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk import private_files
from experience_buffer_server.store.lmdb.disk.commit_number import commit_problem, sign_commit
from experience_buffer_server.store.lmdb.disk.disk_room import FULL_CODES
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.disk.meta_pages import DATA_NAME
from experience_buffer_server.store.lmdb.disk.opening import begin, open_to_read
from experience_buffer_server.store.lmdb.disk.private_files import sync
from experience_buffer_server.store.lmdb.large.reads import LargePayloads
from experience_buffer_server.store.lmdb.large.salvage import check_readable
from experience_buffer_server.store.lmdb.verify.check import check
from experience_buffer_server.store.lmdb.verify.fitting import Mender
from experience_buffer_server.store.lmdb.verify.rebuilding import Aside, Rebuild, check_room
from experience_buffer_server.store.lmdb.writer_process import hold_lock

PARTIAL_NAME: Final = ".partial-set-aside"
"""The folder, within the store's, in which the new file is made."""
_SPARE_BYTES: Final = 64 << 20
"""Room in the map: removing needs some, too."""


def mend(path: Path, file: Path) -> list[str]:
    """Take out of the store at `path` what is damaged, and what can't be without it.

    It needs room for a copy of the sound rows. What is taken out is in the file, and on the disk,
    before the new store appears, with a rename.

    Args:
        path: The store's directory; `check` has found that its pages can be read.
        file: Must not exist; see `rebuilding.Aside`.

    Returns:
        What was done, a line each; empty: nothing was wrong, and there is no file.

    Raises:
        StoreFullError: No room for the copy; nothing is changed.
        StoreError: It is in use, or can't be opened or written; nothing is changed.
        FileExistsError: The file exists.
    """
    if file.exists():
        raise FileExistsError(f"{file} exists; name a file that doesn't")
    with hold_lock(path, timeout_seconds=0.0):
        check_readable(path)
        partial = path / PARTIAL_NAME
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=private_files.FOLDER_MODE)
        aside = Aside(file, path)
        try:
            done = _write_anew(path, partial, aside)
            if done:
                _swap(path, partial, file, aside)
            return done
        except lmdb.Error as error:
            if error.code in FULL_CODES:
                raise StoreFullError(f"no room in {path}: {error}; nothing was changed") from error
            raise StoreError(f"the store can't be mended: {error}; nothing was changed") from error
        finally:
            aside.close()
            shutil.rmtree(partial, ignore_errors=True)


def _write_anew(path: Path, partial: Path, aside: Aside) -> list[str]:
    """Make the new store; what was done to it."""
    done: list[str] = []
    env, tables = open_to_read(path, lock=False)  # Nobody can write: the lock is ours.
    with env, begin(env) as txn:
        check_room(txn, tables, path)
        if problem := commit_problem(txn, tables[Table.META], path):
            done.append(f"went on from the commit that can be read: {problem}")
        map_bytes = env.info()["map_size"] + _SPARE_BYTES
        new = lmdb.open(
            str(partial),
            map_size=map_bytes,
            max_dbs=disk.MAX_DBS,
            mode=private_files.FILE_MODE,
            lock=False,
            sync=False,
        )
        with new:
            new_tables = [new.open_db(table.disk_name) for table in Table]
            rebuild = Rebuild(aside, done)
            rebuild.run(txn, tables, new, new_tables)
            with new.begin(write=True) as change, closing(LargePayloads(path)) as large:
                Mender(change, new_tables, aside, done, rebuild.lost, large).run()
                sign_commit(change, new_tables[Table.META])
            new.sync(True)
    return done


def _swap(path: Path, partial: Path, file: Path, aside: Aside) -> None:
    """Put the new store in the place of the old one."""
    report = check(partial, payloads=path)
    if not report.is_clean:
        raise StoreError(
            f"{path} can't be mended, nothing was changed: its sound rows don't fit together "
            f"({report.findings[0].message}); restore the store from a snapshot"
        )
    old = (path / DATA_NAME).stat()
    shutil.copymode(path / DATA_NAME, partial / DATA_NAME)
    os.chown(partial / DATA_NAME, old.st_uid, old.st_gid)  # The server's, whoever mends it.
    sync(partial / DATA_NAME)
    if aside.num_rows:
        aside.publish()
    try:
        # It says how far the old file is: a server that found it would believe it.
        (path / "lock.mdb").unlink(missing_ok=True)
        (partial / DATA_NAME).replace(path / DATA_NAME)
    except OSError:
        file.unlink(missing_ok=True)
        raise
    sync(path)
