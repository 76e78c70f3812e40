"""Writes what waits in a store and is killed at the n-th thing that it does to the disk: run by test_crash.

A line of its input is the number; a line of its output says how the process ended that it has forked.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet

from experience_buffer_server.archive.writer_process import Writer
from experience_buffer_server.store.engines import open_reader
from experience_buffer_server.store.lmdb import reader

IMPORTED = (pyarrow.parquet, reader)
"""Before the first fork."""


def write(root: str, store: str, buffer_id: str, seqs: str, left: int) -> None:
    """Write a segment, and be killed."""

    def dying(does: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return does(*args, **kwargs)

        return wrapped

    for place, name in ((os, "fsync"), (os, "fdatasync"), (Path, "replace"), (Path, "unlink")):
        setattr(place, name, dying(getattr(place, name)))
    writer = Writer(Path(root), open_reader(store))
    answer = writer.handle(
        {"kind": "write", "buffer": int(buffer_id), "name": "buffer-1", "refused": [], "now": 1.0}
        | {"seqs": list(map(int, seqs.split(","))), "max_age_seconds": 0.0, "max_bytes": 1 << 40}
    )
    assert "error" not in answer, answer


def main() -> None:
    """Of the command line: the archives' folder, the store, the buffer's id, its seqs."""
    root, store, buffer_id, seqs = sys.argv[1:]
    for line in sys.stdin:
        if not (pid := os.fork()):
            write(root, store, buffer_id, seqs, int(line))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
