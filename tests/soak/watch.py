"""What a soak looks at every second: memory, descriptors, threads, disk and depths."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from experience_buffer import Client
from experience_buffer.values import BufferStats
from tests.faults.shim import FILES
from tests.integration.server import Server
from tests.soak.plan import GROUP_DEADLINE_SECONDS, LATE, QUEUE, REPLAY

SLACK_SECONDS: Final = 2.0
"""From a deadline until its group must be closed: the server's clock ticks ten times a second."""
_PROBES_PER_SAMPLE: Final = 8
_MODULES: Final = {"writer": "lmdb.writer_process", "compute": "compute.worker"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    memory_bytes: int
    """Of its own, beyond the page cache (RssAnon)."""
    num_descriptors: int
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    time: float
    """By `time.monotonic`."""
    processes: dict[str, Process]
    """By name: server, writer, compute."""
    file_bytes: int
    """Blocks that the store's files take on the disk."""
    payload_bytes: int
    """Of what is stored."""
    depths: dict[str, int]
    oldest_open_seconds: float
    """Age of the oldest group of the queue that is open; 0: there is none."""
    slowest_fsync_seconds: float
    """Of some small writes to the same disk, each with its fsync."""


@dataclass(slots=True)
class Watch:
    """Looks at a server. Not thread-safe."""

    server: Server
    client: Client
    probe_path: Path
    """A file on the same disk as the store."""
    samples: list[Sample] = field(default_factory=list)

    def look(self) -> Sample:
        slowest = self._slowest_fsync()
        stats = {one.name: one for one in self.client.get_stats().buffers}
        sample = Sample(
            time=time.monotonic(),
            processes={name: _process(pid) for name, pid in self._pids().items()},
            file_bytes=sum(_disk_bytes(self.server.data / name) for name in FILES),
            payload_bytes=sum(one.num_bytes for one in stats.values()),
            depths=_depths(stats),
            oldest_open_seconds=self._oldest_open(),
            slowest_fsync_seconds=slowest,
        )
        self.samples.append(sample)
        return sample

    def _pids(self) -> dict[str, int]:
        children = {
            name: child
            for name, module in _MODULES.items()
            for child in self.server.children(module)
        }
        return {"server": self.server.pid} | children

    def _oldest_open(self) -> float:
        waiting = self.client.list(buffer=QUEUE, state="waiting_for_group", page_size=200)
        return max((time.time() - one.push_time for one in waiting), default=0.0)

    def _slowest_fsync(self) -> float:
        """Seconds that the disk alone takes."""
        slowest, pause = 0.0, threading.Event()
        with self.probe_path.open("wb", buffering=0) as file:
            for _ in range(_PROBES_PER_SAMPLE):
                began = time.monotonic()
                file.write(bytes(4096))
                os.fsync(file.fileno())
                slowest = max(slowest, time.monotonic() - began)
                pause.wait(0.02)
        return slowest

    @property
    def stuck_seconds(self) -> float:
        """By how much a group of the queue has outlived its deadline; 0: none has."""
        oldest = max((sample.oldest_open_seconds for sample in self.samples), default=0.0)
        return max(oldest - GROUP_DEADLINE_SECONDS - SLACK_SECONDS, 0.0)


def _disk_bytes(path: Path) -> int:
    # The file of large payloads is made with the first of them.
    return path.stat().st_blocks * 512 if path.exists() else 0


def _process(pid: int) -> Process:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return Process(
        memory_bytes=int(status["RssAnon"].split()[0]) * 1024,
        num_descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        num_threads=int(status["Threads"]),
    )


def _depths(stats: dict[str, BufferStats]) -> dict[str, int]:
    """What is stored, and what of the queue is where."""
    readers = {one.name: one for one in stats[QUEUE].consumers}
    return {
        "queue": stats[QUEUE].num_items,
        "replay": stats[REPLAY].num_items,
        "late": stats[LATE].num_items,
        "open groups": stats[QUEUE].num_open_groups,
        "for the trainer": readers["trainer"].num_ready_units,
        "for the logger": readers["logger"].num_ready_units,
        "leases": sum(one.num_leases for each in stats.values() for one in each.consumers),
    }
