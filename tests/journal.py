"""What a process that may be killed has written down, and how it is read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """Lines of JSON, appended one system call each: what a process knew survives its death."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, event: str, **fields: Any) -> None:
        line = {"event": event, "time": time.monotonic(), "pid": os.getpid()} | fields
        os.write(self._file, json.dumps(line).encode() + b"\n")


def events(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal, which may not have been begun."""
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):
            yield json.loads(line)
