"""What tests of snapshots begin with, but for those that fill a store of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from experience_buffer_server.store.lmdb.snapshots.copy_process import Answer
from tests.unit.store.conftest import MakeBuffer, OpenStore
from tests.unit.store.lmdb.large_payloads import fill


@pytest.fixture
async def filled(path: Path, open_store: OpenStore, buffer_row: MakeBuffer) -> Path:
    """A closed store with large payloads, and what is left of removed ones between them."""
    return await fill(path, open_store, buffer_row)


def run_copy(data: Path, to: Path, *, max_file_bytes: int = 0) -> Answer:
    """Take a snapshot in a process of its own."""
    command = [sys.executable, "-m", "experience_buffer_server.store.lmdb.snapshots.copy_process"]
    command += ["--data", str(data), "--to", str(to), "--nice", "3"]
    if max_file_bytes:
        limit = f'ulimit -f {max_file_bytes // 512}; exec "$@"'
        command = ["/bin/sh", "-c", limit, "sh", *command]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        return Answer.model_validate_json(process.stdout.read())
