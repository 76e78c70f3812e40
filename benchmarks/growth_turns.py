"""One turn of `growth`: what the clients do with one server, and the figures that come of it."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from benchmarks.growth_clients import WARM_UP_BATCHES, Clients, Shape, client_processes
from benchmarks.growth_figures import MEGABYTES, RATE, Record
from benchmarks.servers import Server
from benchmarks.workload import GROUP_SIZE

NUM_PROCESSES = 2
"""Writers at once; the first process also reads."""
BATCH_SIZE = 64
_NUM_ONES = 64
"""Experiences pushed one at a time, in a turn."""


class Run:
    """One run: its clients, its servers, and what was found so far."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack, raw: TextIO) -> None:
        self.options = options
        self.records: list[Record] = []
        self._raw = raw
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.data)))
        self.clients = stack.enter_context(client_processes(NUM_PROCESSES))

    def folder(self, name: str) -> Path:
        """A folder of its own for a server: its store, its log."""
        folder = self._folder / name.replace(" ", "-").replace(",", "")
        folder.mkdir()
        return folder

    def add(self, record: Record) -> None:
        """Keep a figure."""
        self.records.append(record)
        self._raw.write(json.dumps(record.line()) + "\n")
        self._raw.flush()


@dataclass(frozen=True, slots=True)
class Side:
    """One of the shapes that are compared, and its server."""

    run: Run
    contest: str
    shape: Shape
    server: Server

    @property
    def clients(self) -> Clients:
        """Of all shapes."""
        return self.run.clients

    def measure(
        self, figure: str, num_experiences: int, work: Callable[[], float], *, kept: bool
    ) -> None:
        """Do some work that takes so many seconds, and note its rate and the server's CPU time."""
        processes = self.server.processes()
        before = {process: _cpu_seconds(pid) for process, pid in processes.items()}
        seconds = work()
        after = {process: _cpu_seconds(pid) for process, pid in processes.items()}
        if not kept:
            return
        self.add(figure, RATE, num_experiences / seconds)
        for process, used in after.items():
            if process in ("server", "writer"):
                name = "store writer" if process == "writer" else "server"
                micro = (used - before[process]) / num_experiences * 1e6
                self.add(f"{figure}: {name}", "CPU us", micro)

    def add(self, figure: str, unit: str, value: float) -> None:
        """Keep a figure of this shape."""
        self.run.add(
            Record(
                contest=self.contest, shape=self.shape.name, figure=figure, unit=unit, value=value
            )
        )

    def add_memory(self, when: str) -> None:
        """Keep what the server's processes hold beyond the page cache, all together."""
        self.run.add(
            Record(
                contest=self.contest,
                shape=self.shape.name,
                figure=when,
                unit=MEGABYTES,
                value=sum(self.server.memory_bytes().values()) / 1e6,
                population=self.shape.population,
            )
        )


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, to the microsecond.

    A turn is too short for the ticks of `/proc`; this is the clock of `clock_getcpuclockid`.
    """
    return time.clock_gettime(~pid << 3 | 2)


def push_and_stream(side: Side, num_experiences: int, kept: bool) -> None:
    """The background writer; single pushes; then both formats, until all that came has gone."""
    shape, size, clients = side.shape, side.shape.workload, side.clients
    share = num_experiences // shape.num_processes // size.group_size
    pushed = share * shape.num_processes * size.group_size

    def append() -> float:
        return clients.all(shape, "append", share)

    side.measure("background writer", pushed, append, kept=kept)
    taken: list[float] = clients.first(shape, "push_ones", max(_NUM_ONES // size.group_size, 1))
    if kept:
        side.add("push of one, p50", "ms", statistics.median(taken))
    num_batches = pushed // 2 // size.batch_size - WARM_UP_BATCHES

    def stream() -> float:
        return float(clients.first(shape, "stream", num_batches))

    for mode in ("packed", "trxp"):
        clients.first(shape, "open_stream", mode)
        side.measure(f"sampled, {mode}", num_batches * size.batch_size, stream, kept=kept)
        clients.first(shape, "close_stream")


def push_and_fetch(side: Side, num_experiences: int, kept: bool) -> None:
    """Calls of groups and of batches, several at once, over all buffers and connections."""
    shape, clients = side.shape, side.clients

    def push() -> float:
        return float(clients.first(shape, "push", num_experiences // GROUP_SIZE))

    def fetch() -> float:
        return float(clients.first(shape, "fetch", num_experiences // BATCH_SIZE))

    side.measure("pushed, a group per call", num_experiences, push, kept=kept)
    side.measure("sampled, a batch per call", num_experiences, fetch, kept=kept)
