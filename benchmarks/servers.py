"""A real server in a process of its own, and the CPU time and memory that it uses."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_START_SECONDS = 20.0


class Server:
    """A running server: its address, and what it has cost."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process = process
        self.address = address

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far, by process: the server itself, its store writer, its compute worker."""
        return {name: cpu_seconds(pid) for name, pid in self.processes().items()}

    def memory_bytes(self) -> dict[str, int]:
        """Memory beyond the page cache (RssAnon, RssShmem), by process; what two share is in both."""
        return {name: _own_bytes(pid) for name, pid in self.processes().items()}

    def processes(self) -> dict[str, int]:
        """Process ids: the server itself, its store writer, its compute worker."""
        processes = {"server": self.process.pid}
        for child in _children(self.process.pid):
            command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            processes["writer" if "lmdb.writer_process" in command else "compute"] = child
        return processes


@contextmanager
def running_server(
    data: Path, *arguments: str, start_seconds: float = _START_SECONDS
) -> Iterator[Server]:
    """Start a server on a free port over a store, or an empty folder; end it afterwards.

    Raises:
        RuntimeError: It did not come up; the message holds its log.
        subprocess.CalledProcessError: Its reader can't be compiled.
    """
    _compile()
    log = data.with_name("server.log")
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "experience_buffer_server", "serve"),
                *("--data", str(data), "--port", "0", "--metrics-port", "-1", *arguments),
            ],
            stderr=stderr,
        )
    try:
        yield Server(process, _wait_for_address(process, log, start_seconds))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@functools.cache
def _compile() -> None:
    """See that the reader of payloads is compiled: else the first server would do so while it is measured."""
    subprocess.run(
        [sys.executable, "-m", "experience_buffer_server.buffer.intake.compiled"], check=True
    )


def _wait_for_address(process: subprocess.Popen[bytes], log: Path, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("{") and (entry := json.loads(line))["message"] == "listening":
                return str(entry["address"])
        time.sleep(0.05)
    raise RuntimeError(f"the server did not come up:\n{log.read_text()}")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, its threads and the kernel's work for it included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _own_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = [int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    if len(found) != 2:
        raise RuntimeError(f"the kernel doesn't say how much memory process {pid} uses")
    return sum(found) * 1024


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
