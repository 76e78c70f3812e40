"""Checking a store: every row against its checksum, and rows against one another. Nothing is written.

The walk runs in a process of its own (`walk_process`), because a damaged page may make LMDB end the
process that reads it: that becomes a finding, too, and the other tables are still looked at.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from experience_buffer_server.store.interface import StoreError, StoreFailedError, StoreFormatError
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.verify.report import Finding, Kind, Report

__all__ = ["Finding", "Kind", "Report", "check"]

_LOCK_NAME: Final = "lock.mdb"
"""LMDB's, of who reads and who writes."""
OnProgress = Callable[[str, int, int], None]
"""Told of the table, its rows read so far, and how many it has."""


def check(
    path: Path, *, payloads: Path | None = None, on_progress: OnProgress | None = None
) -> Report:
    """Walk through the store at `path`, also while a server is writing to it.

    Blocks until it is done: for some seconds per million rows, and for as long as the disk takes to
    read all payloads. It holds no commit of the server up.

    Args:
        path: The directory of the store.
        payloads: The folder of its large payloads; None: its own.
        on_progress: Called now and then.

    Raises:
        StoreFormatError: There is no store, one of another version, or one that is cut short.
        StoreFailedError: It can't be opened.
    """
    started = time.monotonic()
    while True:
        # Without a lock file it is read without a lock: nobody else has it open, and no lock file
        # is left in a snapshot. If a server has made one meanwhile, what was read says nothing.
        is_locked = _is_locked(path)
        try:
            report = _walk(path, payloads or path, on_progress)
        except StoreError:
            if is_locked or not _is_locked(path):
                raise
        else:
            if is_locked or not _is_locked(path):
                break
    report.seconds = time.monotonic() - started
    return report


def _is_locked(path: Path) -> bool:
    """Whether somebody writes to the store, or did since it was copied or restored."""
    return (path / _LOCK_NAME).exists()


def _walk(path: Path, payloads: Path, on_progress: OnProgress | None) -> Report:
    """Walk until the end is reached, without the tables that can't be read.

    Raises:
        StoreError: See `check`.
    """
    crashed: dict[Table, str] = {}
    while not isinstance(found := _run(path, payloads, crashed, on_progress), Report):
        # Again from the start, without the table that can't be read.
        table, end = found
        if table in crashed:
            raise StoreFailedError(
                f"{path}: the process that checks it ended ({end}) outside of any table"
            )
        crashed[table] = end
    for table, end in crashed.items():
        message = f"reading the table ended the process that read it ({end}); its pages are damaged"
        found.add(Kind.CRASH, table, b"", message)
    return found


_MODULE: Final = "experience_buffer_server.store.lmdb.verify.walk_process"
_OF_DAMAGE: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
"""What ends a process that reads a damaged page; all others have other reasons."""


def _run(
    path: Path, payloads: Path, skipped: Iterable[Table], on_progress: OnProgress | None
) -> Report | tuple[Table, str]:
    """Run the process that walks.

    Returns:
        Its report; where it ended before, the table that it was looking at, and how it ended.
    """
    command = [sys.executable, "-P", "-m", _MODULE, str(path), str(payloads)]
    command += [table.name for table in skipped]
    table, report = Table.META, None
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            match json.loads(line):
                case {"at": name, "rows": rows, "of": total}:
                    table = Table[name]
                    if on_progress is not None:
                        on_progress(table.disk_name.decode(), rows, total)
                case {"refused": message}:
                    raise StoreFormatError(message)
                case {"failed": message}:
                    raise StoreFailedError(message)
                case {"report": data}:
                    report = Report.from_json(data)
    if report is not None:
        return report
    status = process.returncode
    if -status in _OF_DAMAGE:
        return table, signal.Signals(-status).name
    end = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    raise StoreFailedError(
        f"{path}: the process that checks it was ended {end}; this says nothing of the store. Run it "
        "again (SIGKILL: see whether memory ran out)"
    )
