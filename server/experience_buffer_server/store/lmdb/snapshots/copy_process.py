"""The copy process: `python -m experience_buffer_server.store.lmdb.snapshots.copy_process`.

It opens a store read-only beside its writer and copies one consistent state of it, the newest
commit when the copy begins, without the free pages and without what is free in the file of large
payloads. What it copies isn't reused by the writer meanwhile, so a store that is written to grows
by what is written during the copy. A process of its own, because a process must not open a store
twice, and so that its reading and hashing takes nobody's time: it runs at low priority. It says what
became of it in one line of JSON and ends when whoever started it closes its standard input. Not for
use by hand.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import lmdb
from pydantic import BaseModel

from experience_buffer_server import __version__
from experience_buffer_server.store.interface import (
    DamagedRecordError,
    StoreError,
    StoreFailedError,
    StoreFullError,
)
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk import private_files
from experience_buffer_server.store.lmdb.disk.disk_room import FULL_CODES
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.disk.opening import open_to_read
from experience_buffer_server.store.lmdb.disk.private_files import free_bytes, make_folder, sync
from experience_buffer_server.store.lmdb.large.payload_file import NAME as PAYLOADS_NAME
from experience_buffer_server.store.lmdb.snapshots.folder import DATA_NAME, SnapshotFolder
from experience_buffer_server.store.lmdb.snapshots.inventory import checked_inventory
from experience_buffer_server.store.lmdb.snapshots.manifest import (
    Manifest,
    SnapshotBusyError,
    SnapshotError,
    utc_now,
    write_manifest,
)
from experience_buffer_server.store.lmdb.snapshots.payloads import (
    copy_payloads,
    named_runs,
    payloads_bytes,
)

_SPARE_BYTES = 32 << 20
"""Room that a copy leaves on the disk: a server on the same one must be able to go on."""
_HASH_BYTES = 4 << 20


class Answer(BaseModel):
    """What the process says at its end."""

    outcome: Literal["taken", "busy", "full", "damaged", "failed"]
    message: str = ""
    """Why it wasn't taken, and what to do. Of one that was: what to look after, or empty."""
    name: str = ""
    num_bytes: int = 0
    """What the copy takes on the disk."""
    num_experiences: int = 0
    create_time: float = 0.0
    """Seconds since the Unix epoch."""
    seconds: float = 0.0
    copy_seconds: float = 0.0
    """Of these, until the copy was on disk; the rest checked it."""
    removed: list[str] = []
    """Older snapshots that made room for it."""


def take(data: Path, to: Path, *, label: str = "", keep: int = 0) -> Answer:
    """Take a snapshot of the store in `data`, which may be in use.

    Args:
        data: The store's directory.
        to: The folder of snapshots; made if there is none.
        label: Ends the snapshot's name; empty: a number does.
        keep: How many whole snapshots stay in the folder, this one included; 0: all.

    Raises:
        SnapshotBusyError: Another process is writing to the folder.
        SnapshotError: There is no store in `data`, or the folder can't be used.
        StoreFormatError: The store is of another format version.
        StoreFullError: No room for the copy.
        DamagedRecordError: The store is damaged; nothing is published.
        StoreFailedError: The store can't be read.
    """
    if not (data / DATA_NAME).is_file():
        raise SnapshotError(f"{data} holds no store: there is no {DATA_NAME} in it")
    started = time.monotonic()
    folder = SnapshotFolder(to)
    make_folder(to)
    with folder.locked():
        folder.clean()
        create_time = utc_now()
        partial = folder.begin(label, create_time)
        try:
            stored_bytes = copy_store(data, partial)
            (partial / DATA_NAME).chmod(private_files.FILE_MODE)
            copied = time.monotonic()
            buffers, warnings = checked_inventory(partial)
            manifest = Manifest(
                store_format=disk.FORMAT_VERSION,
                server_version=__version__,
                create_time=create_time,
                label=label,
                data_bytes=(partial / DATA_NAME).stat().st_size,
                sha256=sha256_of(partial / DATA_NAME),
                payloads_bytes=payloads_bytes(partial),
                payloads_stored_bytes=stored_bytes,
                payloads_sha256=sha256_of(partial / PAYLOADS_NAME),
                buffers=tuple(buffers),
            )
            write_manifest(partial, manifest)
            path = folder.publish(partial)
        except BaseException:
            if partial.exists():
                folder.discard(partial)
            raise
        removed = folder.keep_newest(keep, taken=path)
    return Answer(
        outcome="taken",
        message="; ".join([*warnings, *folder.problems]),
        name=path.name,
        num_bytes=manifest.num_bytes,
        num_experiences=manifest.num_experiences,
        create_time=create_time.timestamp(),
        seconds=time.monotonic() - started,
        copy_seconds=copied - started,
        removed=removed,
    )


def copy_store(data: Path, to: Path) -> int:
    """Copy a store's newest committed state, compacted, to `to`, and to the disk.

    Returns:
        What its large payloads take on the disk, bytes.

    Raises:
        StoreFormatError: It is of another format version.
        StoreFullError: No room for the copy.
        DamagedRecordError: A page is damaged, or large payloads are lost.
        StoreFailedError: It can't be read.
    """
    env, tables = open_to_read(data)
    try:
        while True:
            try:
                return _copy_state(env, tables, data, to)
            except lmdb.MapResizedError:
                # The writer has a larger map by now. No transaction is open here any more, without
                # which it couldn't be taken over.
                env.set_mapsize(0)
                (to / DATA_NAME).unlink(missing_ok=True)
    except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.IncompatibleError) as error:
        raise DamagedRecordError(f"{data} has a damaged page: {error}") from error
    except (lmdb.Error, OSError) as error:
        code = error.errno if isinstance(error, OSError) else error.code
        if code in FULL_CODES:
            raise StoreFullError(f"no room for the copy in {to.parent}: {error}") from error
        raise StoreFailedError(f"can't copy the store at {data}: {error}") from error
    finally:
        env.close()


def _copy_state(
    env: lmdb.Environment, tables: Sequence[lmdb._Database], data: Path, to: Path
) -> int:
    # What is copied is this transaction's state or a newer one. While it is open, nothing that
    # either names is written over, in either file.
    with env.begin(buffers=True) as txn:
        _check_room(txn, tables, to)
        env.copy(str(to), compact=True)
        sync(to / DATA_NAME)
        return copy_payloads(data, to)


def _check_room(
    txn: lmdb.Transaction[memoryview], tables: Sequence[lmdb._Database], to: Path
) -> None:
    """Refuse before a disk that others share is full.

    Raises:
        StoreFullError: The copy won't fit.
        DamagedRecordError: A row that says where a large payload lies is damaged.
    """
    stats = [txn.stat(db) for db in tables]
    num_bytes = sum(
        stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])
        for stat in stats
    )
    num_bytes += sum(length for _, length in named_runs(txn, tables[Table.EXTENTS]))
    num_free_bytes = free_bytes(to)
    if num_bytes + _SPARE_BYTES > num_free_bytes:
        raise StoreFullError(
            f"the copy takes about {num_bytes} bytes, {num_free_bytes} are free in {to.parent} and "
            f"{_SPARE_BYTES} of them must stay so; free some, or keep fewer snapshots"
        )


def sha256_of(path: Path) -> str:
    """Hash of a file's content as it is read back, in hexadecimal; empty: there is no file.

    It leaves the memory that caches files to those that will be read again.
    """
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_HASH_BYTES))
    try:
        with open(path, "rb", buffering=0) as file:
            while num_bytes := file.readinto(buffer):
                digest.update(buffer[:num_bytes])
                begin = file.tell() - num_bytes
                os.posix_fadvise(file.fileno(), begin, num_bytes, os.POSIX_FADV_DONTNEED)
    except FileNotFoundError:
        return ""
    return digest.hexdigest()


def answer_to(data: Path, to: Path, *, label: str, keep: int) -> Answer:
    """Take a snapshot, and say so in words where it can't be taken."""
    try:
        return take(data, to, label=label, keep=keep)
    except SnapshotBusyError as error:
        return Answer(outcome="busy", message=str(error))
    except StoreFullError as error:
        return Answer(outcome="full", message=str(error))
    except DamagedRecordError as error:
        message = (
            f"{error}; nothing was published. `experience-buffer verify` says what is damaged; "
            "delete those experiences, or restore the store from a snapshot"
        )
        return Answer(outcome="damaged", message=message)
    except StoreError as error:
        return Answer(outcome="failed", message=str(error))
    except OSError as error:
        outcome: Literal["full", "failed"] = "full" if error.errno in FULL_CODES else "failed"
        return Answer(outcome=outcome, message=f"can't write to {to}: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Take one snapshot; the exit status is 0 if it was taken."""
    parser = argparse.ArgumentParser(
        prog="experience_buffer_server.store.lmdb.snapshots.copy_process"
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--label", default="")
    parser.add_argument("--keep", type=int, default=0)
    parser.add_argument("--nice", type=int, default=0)
    options = parser.parse_args(arguments)
    # Whoever started it decides when it ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_owner, name="owner", daemon=True).start()
    os.nice(options.nice)
    answer = answer_to(options.data, options.to, label=options.label, keep=options.keep)
    sys.stdout.write(answer.model_dump_json() + "\n")
    sys.stdout.flush()
    return 0 if answer.outcome == "taken" else 1


def _end_with_owner() -> None:
    """End the process, in the middle of whatever it does, when its owner has gone."""
    while os.read(sys.stdin.fileno(), 64):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # With the process that checks the copy.
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
