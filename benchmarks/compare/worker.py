"""A process of one system, run by that system's interpreter: its server's host, or a client.

It speaks lines of JSON: a command on stdin, an answer on stdout. What libraries print goes to
stderr. Windows of time begin at an instant of the monotonic clock that all processes share.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from benchmarks.compare import adapters
from benchmarks.workload import ALL_SIZES, Rollout, Size, check, pool

_KEPT_FIRST = 2
_KEPT_EVERY = 40
_MAX_KEPT_BYTES = 64 * 2**20
"""Batches that are kept to be checked after the clock has stopped: the first ones, and every nth."""


def main() -> None:
    """Answer commands until stdin ends."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker(adapters.load(sys.argv[1]))
    _say(output, {"ready": True, "versions": dict(worker.adapter.versions())})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = worker.do(command)
        except BaseException as error:
            # Told to whoever asked, who then ends the run; nothing is hidden here.
            traceback.print_exc()
            answer = {"error": f"{command['verb']}: {type(error).__name__}: {error}"}
        _say(output, answer)
    worker.close()
    sys.stderr.flush()
    # Everything is closed; what libraries still do at exit takes some of them ten seconds.
    os._exit(0)


def _say(output: TextIO, answer: Mapping[str, Any]) -> None:
    output.write(json.dumps(answer) + "\n")


class Worker:
    """Carries out commands."""

    def __init__(self, adapter: adapters.Adapter) -> None:
        self.adapter = adapter
        self._size: Size = ALL_SIZES["S"]
        self._server: AbstractContextManager[Any] | None = None
        self._writer: adapters.Writer | None = None
        self._reader: adapters.Reader | None = None
        self._number = 0
        self._contents: tuple[str, list[list[Rollout]]] | None = None

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one; what there is to say of it.

        Raises:
            ValueError: An unknown verb.
        """
        verb = command["verb"]
        if verb not in ("serve", "write", "read", "push", "latency", "sample", "fetch", "close"):
            raise ValueError(f"unknown verb {verb!r}")
        arguments = {name: value for name, value in command.items() if name != "verb"}
        found = getattr(self, verb)(**arguments)
        return found or {}

    def serve(self, folder: str, size: str, variant: str) -> dict[str, Any]:
        """Start the server."""
        self._server = self.adapter.serve(Path(folder), ALL_SIZES[size], variant)
        address, processes = self._server.__enter__()
        return {"address": address, "processes": dict(processes)}

    def write(self, address: str, size: str, writer: int, mode: str) -> None:
        """Become a writer; group numbers go on, so that identities stay unique on one server."""
        self._close_clients()
        self._size = ALL_SIZES[size]
        self._writer = self.adapter.writer(address, self._size, writer, mode)

    def read(self, address: str, size: str, mode: str) -> None:
        """Become a reader."""
        self._close_clients()
        self._size = ALL_SIZES[size]
        self._reader = self.adapter.reader(address, self._size, mode)

    def push(self, start: float, seconds: float, max_groups: int) -> dict[str, Any]:
        """Push groups from now until a window of time ends; what is acknowledged in it counts.

        Pushing before the window makes it one of steady work: a background writer's queue is as
        full at its end as at its beginning.
        """
        writer = self._given_writer()
        first = writer.num_acked
        window = Window(start, seconds)
        for _ in range(max_groups):
            writer.push(self._number)
            self._number += 1
            if window.is_over(writer.num_acked):
                break
        found = window.found(writer.num_acked)
        writer.flush()
        return found | {"stored": writer.num_acked - first}

    def latency(self, count: int, seconds: float) -> dict[str, Any]:
        """Push one experience after the other; how long each took."""
        writer = self._given_writer()
        size = self._size.group_size
        end, taken = time.monotonic() + seconds, []
        first = self._number * size
        # Whole groups only, for the sake of whoever reads them.
        for number in range(first, first + -(-count // size) * size):
            began = time.perf_counter()
            writer.push_one(number)
            taken.append((time.perf_counter() - began) * 1e3)
            if time.monotonic() >= end and (number + 1) % size == 0:
                break
        self._number += -(-len(taken) // size)
        return {"milliseconds": taken, "stored": len(taken)}

    def sample(
        self, begin: float, start: float, seconds: float, max_batches: int
    ) -> dict[str, Any]:
        """Sample batches from `begin` until a window of time ends; some are checked after it."""
        reader = self._given_reader()
        time.sleep(max(begin - time.monotonic(), 0.0))
        kept: list[Any] = []
        max_kept = max(_MAX_KEPT_BYTES // (self._size.num_bytes * self._size.batch_size), 1)
        window = Window(start, seconds)
        done = 0
        while done < max_batches:
            batch = reader.sample()
            done += 1
            if len(kept) < max_kept and (done <= _KEPT_FIRST or done % _KEPT_EVERY == 0):
                kept.append(batch)
            if window.is_over(done * self._size.batch_size):
                break
        found = window.found(done * self._size.batch_size)
        for batch in kept:
            self._check(batch)
        checked = len(kept) * self._size.batch_size
        return found | {"taken": done * self._size.batch_size, "checked": checked}

    def fetch(self, count: int, seconds: float) -> dict[str, Any]:
        """Sample one batch after the other by calls of their own; how long each took."""
        reader = self._given_reader()
        end, taken = time.monotonic() + seconds, []
        for number in range(count):
            began = time.perf_counter()
            batch = reader.fetch()
            taken.append((time.perf_counter() - began) * 1e3)
            reader.settle(batch)
            if not number:
                self._check(batch)
            if time.monotonic() >= end:
                break
        return {"milliseconds": taken, "experiences": len(taken) * self._size.batch_size}

    def close(self) -> None:
        """Disconnect, or stop the server."""
        self._close_clients()
        self._number = 0
        if self._server is None:
            self.adapter.leave()
        else:
            server, self._server = self._server, None
            server.__exit__(None, None, None)

    def _close_clients(self) -> None:
        clients = (self._writer, self._reader)
        self._writer = self._reader = None
        for client in clients:
            if client is not None:
                client.close()

    def _given_writer(self) -> adapters.Writer:
        if self._writer is None:
            raise ValueError("this worker is no writer yet")
        return self._writer

    def _given_reader(self) -> adapters.Reader:
        if self._reader is None:
            raise ValueError("this worker is no reader yet")
        return self._reader

    def _check(self, batch: Any) -> None:
        if self._contents is None or self._contents[0] != self._size.name:
            self._contents = (self._size.name, pool(self._size))
        reader = self._given_reader()
        found = reader.unpack(batch)
        check(found, self._size, self._contents[1], whole=reader.keeps_groups)


class Window:
    """A window of time, in which a count grows.

    Args:
        start: By `time.monotonic`, which all processes share.
        seconds: How long it lasts.
    """

    def __init__(self, start: float, seconds: float) -> None:
        self._start, self._end = start, start + seconds
        self._first: tuple[int, float, float] | None = None

    def is_over(self, count: int) -> bool:
        """Look at the clock; the count so far."""
        now = time.monotonic()
        if self._first is None and now >= self._start:
            self._first = (count, now, time.process_time())
        return now >= self._end

    def found(self, count: int) -> dict[str, float]:
        """What happened between its first and its last look.

        Raises:
            ValueError: The work ended before the window began, or there was nothing to look at.
        """
        now, cpu = time.monotonic(), time.process_time()
        if self._first is None or now <= self._first[1]:
            raise ValueError("the work ended before the window of time began: store more before")
        before, began, used = self._first
        return {
            "experiences": count - before,
            "seconds": now - began,
            "cpu_seconds": cpu - used,
        }


if __name__ == "__main__":
    main()
