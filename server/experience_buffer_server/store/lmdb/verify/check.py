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
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

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
    while True:
        walk = _Walk(path, payloads, list(crashed), on_progress)
        report = walk.run()
        if report is not None:
            break
        # Again from the start, without the table that can't be read.
        if walk.table in crashed:
            raise StoreFailedError(
                f"{path}: the process that checks it ended ({walk.end}) outside of any table"
            )
        crashed[walk.table] = walk.end
    for table, end in crashed.items():
        message = f"reading the table ended the process that read it ({end}); its pages are damaged"
        name = table.disk_name.decode()
        report.add(Finding(kind=Kind.CRASH, table=name, buffer=0, row="", message=message))
    return report


_OF_DAMAGE: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
"""What ends a process that reads a damaged page; all others have other reasons."""


class _Walk:
    """One run of the process that walks."""

    def __init__(
        self, path: Path, payloads: Path, skipped: list[Table], on_progress: OnProgress | None
    ) -> None:
        self._command = [
            *(
                sys.executable,
                "-P",
                "-m",
                "experience_buffer_server.store.lmdb.verify.walk_process",
            ),
            *(str(path), str(payloads)),
            *(table.name for table in skipped),
        ]
        self._on_progress = on_progress
        self._path = path
        self.table = Table.META
        """The one that it is, or was, looking at."""
        self.end = ""
        """How it ended, in words."""

    def run(self) -> Report | None:
        """The report; None where the process ended before it had one."""
        report = None
        with subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                report = self._take(json.loads(line)) or report
        status = process.returncode
        if report is None and -status not in _OF_DAMAGE:
            end = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            raise StoreFailedError(
                f"{self._path}: the process that checks it was ended {end}; this says nothing of "
                "the store. Run it again (SIGKILL: see whether memory ran out)"
            )
        self.end = signal.Signals(-status).name if status else ""
        return report

    def _take(self, said: dict[str, Any]) -> Report | None:
        match said:
            case {"at": name, "rows": rows, "of": total}:
                self.table = Table[name]
                if self._on_progress is not None:
                    self._on_progress(self.table.disk_name.decode(), rows, total)
            case {"refused": message}:
                raise StoreFormatError(message)
            case {"failed": message}:
                raise StoreFailedError(message)
            case {"report": data}:
                return Report.from_json(data)
        return None
