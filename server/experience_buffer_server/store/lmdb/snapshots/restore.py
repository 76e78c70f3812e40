"""From a snapshot to a store: checked, copied, and there only when all of it is on disk.

The new store begins another life of the old one, which may go on, or be restored once more. Leases
of one life must mean nothing in another: an ack of the old would consume what somebody else holds.
So each life gives lease ids from the time of its restore on, `LEASES_PER_SECOND` a second, and
from anywhere in the first half of that second.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import msgpack

from experience_buffer_server.store import row_codec
from experience_buffer_server.store.interface import (
    LEASES_PER_SECOND,
    DamagedRecordError,
    LeaseRow,
    StoreFailedError,
    StoreFullError,
)
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk import private_files
from experience_buffer_server.store.lmdb.disk.commit_number import sign_commit
from experience_buffer_server.store.lmdb.disk.disk_room import FULL_CODES
from experience_buffer_server.store.lmdb.disk.format import Table, seal
from experience_buffer_server.store.lmdb.disk.opening import handles, open_environment
from experience_buffer_server.store.lmdb.disk.private_files import make_folder, sync
from experience_buffer_server.store.lmdb.large.payload_file import NAME as PAYLOADS_NAME
from experience_buffer_server.store.lmdb.snapshots.copy_process import sha256_of
from experience_buffer_server.store.lmdb.snapshots.folder import DATA_NAME, PARTIAL_PREFIX, look_at
from experience_buffer_server.store.lmdb.snapshots.inventory import problem_of
from experience_buffer_server.store.lmdb.snapshots.manifest import Manifest, SnapshotError
from experience_buffer_server.store.lmdb.snapshots.payloads import copy_payloads
from experience_buffer_server.store.lmdb.verify.check import check
from experience_buffer_server.store.lmdb.writer_process import LOCK_NAME, StoreInUseError, hold_lock

PARTIAL_NAME = f"{PARTIAL_PREFIX}restore"
"""The folder, within the store's, that a restore writes to."""
_COPY_BYTES = 4 << 20
_SPARE_BYTES = 64 << 20
"""Room in the map for a row per buffer."""


def restore(
    snapshot: Path,
    data: Path,
    *,
    verify: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Make a store from a snapshot; it appears with its last step, a rename.

    Args:
        snapshot: The snapshot's folder.
        data: Where the store will live: a folder that is empty or doesn't exist. What an
            interrupted restore has left there is removed.
        verify: Check every row of the new store, too, before it appears.
        on_progress: Told of the bytes copied so far, and of how many there are.

    Raises:
        SnapshotError: The snapshot isn't whole, is damaged or of another store format, or the
            folder isn't empty.
        StoreFullError: No room for the store.
    """
    found = look_at(snapshot)
    if found.manifest is None or found.problem:
        raise SnapshotError(f"{snapshot} can't be restored: {found.problem}")
    manifest = found.manifest
    if manifest.store_format != disk.FORMAT_VERSION:
        raise SnapshotError(
            f"{snapshot} holds a store of format version {manifest.store_format}, this server reads "
            f"version {disk.FORMAT_VERSION}; restore it with server version "
            f"{manifest.server_version}, which took it"
        )
    check_empty(data)
    partial = data / PARTIAL_NAME
    try:
        make_folder(data)
        with _alone(data):
            check_empty(data)
            _remove_unfinished(data)
            partial.mkdir(mode=private_files.FOLDER_MODE)
            try:
                _fill(snapshot, partial, manifest, on_progress)
                if verify and (problem := problem_of(check(partial))):
                    raise SnapshotError(f"{snapshot} is damaged: {problem}")
                begin_life(partial, time.time())
                _publish(partial, data)
            finally:
                _remove_unfinished(data)
    except OSError as error:
        if error.errno in FULL_CODES:
            raise StoreFullError(f"no room for the store in {data}: {error.strerror}") from error
        raise SnapshotError(f"can't restore {snapshot} to {data}: {error}") from error
    return manifest


def check_empty(data: Path) -> None:
    """Refuse to put a store beside something else.

    Raises:
        SnapshotError: The folder holds something; the message says what.
    """
    if not data.exists():
        return
    if not data.is_dir():
        raise SnapshotError(f"{data} is no folder; give one that is empty or doesn't exist")
    own = [PARTIAL_NAME, LOCK_NAME]
    if (data / PARTIAL_NAME).exists():
        own.append(PAYLOADS_NAME)  # A restore that was interrupted has put it there.
    names = sorted(path.name for path in data.iterdir() if path.name not in own)
    if DATA_NAME in names:
        raise SnapshotError(
            f"{data} holds a store already; move it away, or restore to another folder"
        )
    if names:
        raise SnapshotError(
            f"{data} isn't empty: it holds {', '.join(names[:5])}; give a folder that is empty or "
            "doesn't exist"
        )


def check_not_interrupted(data: Path) -> None:
    """Keep a server from making an empty store where one was to be restored.

    Raises:
        SnapshotError: A restore to the folder was interrupted, or isn't done yet.
    """
    if (data / PARTIAL_NAME).exists() and not (data / DATA_NAME).exists():
        paths = (data / name for name in (PARTIAL_NAME, PAYLOADS_NAME))
        left = " and ".join(str(path) for path in paths if path.exists())
        raise SnapshotError(
            f"a restore to {data} was interrupted, or isn't done yet; run it again, or remove "
            f"{left} to begin with an empty store"
        )


@contextmanager
def _alone(data: Path) -> Iterator[None]:
    """Keep other restores, and servers, out of the folder.

    Raises:
        SnapshotError: One is at work there.
    """
    try:
        with hold_lock(data, timeout_seconds=0.0):
            yield
    except StoreInUseError:
        raise SnapshotError(
            f"another restore to {data}, or a server, is at work there; wait for it, or give "
            "another folder"
        ) from None


def begin_life(path: Path, now: float) -> None:
    """Give leases of a restored store ids that no other life of it gives.

    Each buffer gets the row of a lease that has ended: the next ids are above. What older states of
    the store still had of `payloads.bin` is free: nobody has them here, and transactions are counted
    anew, so that the room would never be taken back.

    Args:
        path: The store's directory; nobody has it open.
        now: Seconds since the Unix epoch.

    Raises:
        SnapshotError: The store can't be written.
    """
    pack = msgpack.Packer().pack
    try:
        with open_environment(path) as env:
            env.set_mapsize(env.info()["map_size"] + _SPARE_BYTES)
            tables = handles(env)
            leases = tables[Table.LEASES]
            # Two lives may be restored within one second.
            floor = int(now) * LEASES_PER_SECOND + secrets.randbelow(LEASES_PER_SECOND // 2)
            with env.begin(write=True) as txn:
                txn.drop(tables[Table.FREED], delete=False)
                for prefix in list(txn.cursor(tables[Table.BUFFERS]).iternext(values=False)):
                    last = _last_number(txn, leases, prefix)
                    number = max(floor, last + 1)
                    key = prefix + disk.numbered_key(0, number)[len(prefix) :]
                    row = LeaseRow(id=number, consumer="", units=[], deadline=0.0, state="expired")
                    value = seal(Table.LEASES, key, row_codec.encode_lease(row, pack))
                    txn.put(key, value, db=leases)
                sign_commit(txn, tables[Table.META])
    except lmdb.Error as error:
        raise SnapshotError(f"can't write the restored store at {path}: {error}") from error


def _last_number(txn: lmdb.Transaction[bytes], table: lmdb._Database, prefix: bytes) -> int:
    """The highest number of a buffer's rows; 0: there are none."""
    end = (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix) + 1, "big")[1:]
    with txn.cursor(table) as cursor:
        found = cursor.prev() if cursor.set_range(end) else cursor.last()
        key = cursor.key() if found else b""
    return disk.number_of(key) if key.startswith(prefix) else 0


def _fill(
    snapshot: Path,
    partial: Path,
    manifest: Manifest,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    def progress(num_bytes: int) -> None:
        if on_progress is not None:
            on_progress(num_bytes, manifest.num_bytes)

    with (
        open(snapshot / DATA_NAME, "rb") as source,
        open(partial / DATA_NAME, "xb", opener=private_files.opener) as target,
    ):
        while chunk := source.read(_COPY_BYTES):
            target.write(chunk)
            progress(target.tell())
        target.flush()
        os.fsync(target.fileno())
    _check_hash(snapshot, partial, DATA_NAME, manifest.sha256)
    try:
        copy_payloads(snapshot, partial, lambda done: progress(manifest.data_bytes + done))
    except (DamagedRecordError, StoreFailedError) as error:
        raise SnapshotError(f"{snapshot} can't be restored: {error}") from error
    _check_hash(snapshot, partial, PAYLOADS_NAME, manifest.payloads_sha256)


def _check_hash(snapshot: Path, partial: Path, name: str, wanted: str) -> None:
    """Compare a copy as it is read back: that is what will be served.

    Raises:
        SnapshotError: It isn't what was to be copied.
    """
    if sha256_of(partial / name) != wanted:
        raise SnapshotError(
            f"{snapshot / name} is damaged, or its copy: its SHA-256 isn't the one in the manifest; "
            "try again, or use another snapshot"
        )


def _publish(partial: Path, data: Path) -> None:
    """Put the files in their place, the one that makes the store exist last."""
    if (partial / PAYLOADS_NAME).exists():
        (partial / PAYLOADS_NAME).rename(data / PAYLOADS_NAME)
        sync(data)
    (partial / DATA_NAME).rename(data / DATA_NAME)
    sync(data)
    sync(data.resolve().parent)


def _remove_unfinished(data: Path) -> None:
    """Remove what a restore has left; the folder that tells of it last."""
    partial = data / PARTIAL_NAME
    if partial.exists() and not (data / DATA_NAME).exists():
        (data / PAYLOADS_NAME).unlink(missing_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
