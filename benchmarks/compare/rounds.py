"""One round: one system's server, fresh, and all its cases at one size."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.plan import FILL, NUM_WRITERS, READ_LEAD_SECONDS, Plan, System
from benchmarks.compare.processes import Fleet, Process, together
from benchmarks.servers import cpu_seconds
from benchmarks.workload import ALL_SIZES, IMAGE

_WRITE_LEAD_SECONDS = 0.6
"""For which writers work before a window of time begins, so that a background queue is full."""
_WARM_SECONDS = 0.2
_CONSUME_SECONDS = 10.0
"""At most, to sample what is left."""
_MANY = 10**9
_SLACK_BATCHES = 12
"""What a reader that goes away may have read ahead, and lost."""


class Round:
    """The state of one round.

    Args:
        system: Whose turn it is.
        fleet: Its processes.
        size: Name of the experiences' size.
        plan: How long things take.
    """

    def __init__(self, system: System, fleet: Fleet, size: str, plan: Plan) -> None:
        self._system = system
        self._fleet = fleet
        self._size = ALL_SIZES[size]
        self._plan = plan
        self._read_lead_seconds = READ_LEAD_SECONDS[size]
        self._address = ""
        self._server_processes: dict[str, int] = {}
        self._stored: dict[str, int] = {}
        """Experiences that can be sampled, by the mode they need to be read in."""
        self._rates: dict[str, float] = {}
        """Of sampling, by mode."""

    def run(self) -> Iterator[dict[str, Any]]:
        """All cases of the round, a record for each."""
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            (data := Path(folder) / "server").mkdir()
            served = self._fleet.host.call(
                "serve", folder=str(data), size=self._size.name, variant=self._system.variant
            )
            self._address = served["address"]
            self._server_processes = served["processes"]
            for record in self._cases():
                yield {"system": self._system.name, "size": self._size.name, **record}
            together(self._fleet.all[1:], "close")
            self._fleet.host.call("close")

    def _cases(self) -> Iterator[dict[str, Any]]:
        if self._size is IMAGE:
            yield from self._image_cases()
            return
        for mode in self._system.writes:
            for num_writers in (1, len(self._fleet.writers)):
                yield self._ingest(mode, num_writers)
        for mode in self._system.reads:
            yield self._sample(mode)
        for write, read in self._system.mixes:
            yield from self._mixed(write, read)
        if self._system.writes and self._system.reads:
            self._consume(self._system.reads[0])
            yield self._reused(self._system.writes[0], NUM_WRITERS)
        if self._size.name == self._plan.latency_size:
            yield from self._latencies()

    def _image_cases(self) -> Iterator[dict[str, Any]]:
        for mode in self._system.images:
            yield self._ingest(mode, 1)
        if self._system.images:
            for mode in self._system.reads:
                if mode in self._system.reading_of.values() and mode not in self._system.images:
                    continue
                yield self._sample(mode)
            if self._system.adapter != "echo":
                yield self._reused(self._system.images[0], 1)

    def _ingest(self, mode: str, num_writers: int) -> dict[str, Any]:
        writers = self._open_writers(mode, num_writers)
        (pushed,) = self._window(self._plan.window_seconds, write=(mode, writers))
        return {"case": f"ingest{num_writers}", "mode": mode, **pushed}

    def _reused(self, mode: str, num_writers: int) -> dict[str, Any]:
        """Writing where what was written before has been sampled: its space is used again."""
        return {**self._ingest(mode, num_writers), "case": f"reused{num_writers}"}

    def _consume(self, mode: str) -> None:
        """Sample what is left."""
        reader = self._fleet.reader
        reader.call("read", address=self._address, size=self._size.name, mode=mode)
        now = time.monotonic()
        window = {"begin": now, "start": now, "seconds": _CONSUME_SECONDS}
        found = reader.call("sample", max_batches=self._num_batches(mode), **window)
        self._take(mode, found["taken"])

    def _sample(self, mode: str) -> dict[str, Any]:
        self._fill(mode)
        self._fleet.reader.call("read", address=self._address, size=self._size.name, mode=mode)
        (sampled,) = self._window(self._plan.window_seconds, read=mode)
        self._rates[mode] = sampled["rate"]
        return {"case": "sample", "mode": mode, **sampled}

    def _mixed(self, write: str, read: str) -> Iterator[dict[str, Any]]:
        self._fill(read)
        writers = self._open_writers(write, len(self._fleet.writers))
        self._fleet.reader.call("read", address=self._address, size=self._size.name, mode=read)
        # The reader must not run dry before the window ends.
        enough = self._num_batches(read) * self._size.batch_size / self._rates[read]
        seconds = max(min(self._plan.window_seconds, 0.9 * enough - self._read_lead_seconds), 0.25)
        pushed, sampled = self._window(seconds, write=(write, writers), read=read)
        yield {"case": "mixed-ingest4", "mode": write, "beside": read, **pushed}
        yield {"case": "mixed-sample", "mode": read, "beside": write, **sampled}

    def _latencies(self) -> Iterator[dict[str, Any]]:
        limits = {"count": self._plan.num_latencies, "seconds": self._plan.latency_seconds}
        for mode in self._system.latencies:
            (writer,) = self._open_writers(mode, 1)
            writer.call("latency", count=self._size.group_size * 4, seconds=_WARM_SECONDS)
            found = writer.call("latency", **limits)
            self._note(mode, [found])
            yield {"case": "insert1", "mode": mode, "milliseconds": found["milliseconds"]}
        for mode in self._system.reads:
            self._fill(mode)
            reader = self._fleet.reader
            reader.call("read", address=self._address, size=self._size.name, mode=mode)
            self._take(mode, reader.call("fetch", count=5, seconds=1.0)["experiences"])
            count = min(self._plan.num_latencies, self._num_batches(mode))
            found = reader.call("fetch", count=count, seconds=self._plan.latency_seconds)
            self._take(mode, found["experiences"])
            yield {"case": "fetch1", "mode": mode, "milliseconds": found["milliseconds"]}

    def _open_writers(self, mode: str, count: int) -> Sequence[Process]:
        writers = self._fleet.writers[:count]
        for number, writer in enumerate(writers):
            arguments = {"address": self._address, "size": self._size.name, "mode": mode}
            writer.start("write", writer=number, **arguments)
        for writer in writers:
            writer.result()
        return writers

    def _window(
        self,
        seconds: float,
        *,
        write: tuple[str, Sequence[Process]] | None = None,
        read: str | None = None,
    ) -> list[dict[str, Any]]:
        """Let writers, the reader or both work in one window of time: what the sides did."""
        lead = self._read_lead_seconds if write is None else _WRITE_LEAD_SECONDS
        start = time.monotonic() + lead
        window = {"start": start, "seconds": seconds}
        mode, writers = write or ("", ())
        for writer in writers:
            writer.start("push", max_groups=_MANY, **window)
        if read is not None:
            begin = start - self._read_lead_seconds
            max_batches = self._num_batches(read)
            self._fleet.reader.start("sample", begin=begin, max_batches=max_batches, **window)
        cpu = self._cpu_during(start, seconds)
        pushed = [writer.result() for writer in writers]
        sides = []
        if write is not None:
            self._note(mode, pushed)
            sides.append(_joined(pushed, cpu, seconds))
        if read is not None:
            sampled = self._fleet.reader.result()
            self._take(read, sampled["taken"])
            checked = {"checked": sampled["checked"]}
            sides.append(_joined([sampled], cpu, seconds) | checked)
        return sides

    def _fill(self, read: str) -> None:
        """Store what a reader in this mode can sample."""
        mode = self._system.reading_of.get(read, (self._system.writes or self._system.images)[0])
        missing = FILL[self._size.name] - self._stored.get(self._key(read), 0)
        if missing <= 0 or self._system.adapter == "echo":
            return
        writers = self._open_writers(mode, len(self._fleet.writers))
        window = {"start": time.monotonic(), "seconds": self._plan.fill_seconds}
        groups = -(-missing // (len(writers) * self._size.group_size))
        self._note(mode, together(writers, "push", max_groups=groups, **window))

    def _key(self, mode: str) -> str:
        """Which store of experiences a mode of writing fills, or one of reading takes from."""
        return mode if mode in self._system.reading_of else ""

    def _note(self, mode: str, pushed: Sequence[dict[str, Any]]) -> None:
        key = self._key(mode)
        self._stored[key] = self._stored.get(key, 0) + sum(found["stored"] for found in pushed)

    def _take(self, mode: str, experiences: int) -> None:
        key = self._key(mode)
        self._stored[key] = self._stored.get(key, 0) - experiences

    def _num_batches(self, mode: str) -> int:
        """Whole batches that are certainly there."""
        if self._system.adapter == "echo":
            return _MANY
        slack = 0 if self._size is IMAGE else _SLACK_BATCHES
        return max(self._stored.get(self._key(mode), 0) // self._size.batch_size - slack, 1)

    def _cpu_during(self, start: float, seconds: float) -> dict[str, float]:
        """CPU time that each server process uses in a window of time, which this waits out."""
        time.sleep(max(start - time.monotonic(), 0.0))
        before = {name: cpu_seconds(pid) for name, pid in self._server_processes.items()}
        time.sleep(max(start + seconds - time.monotonic(), 0.0))
        return {
            name: cpu_seconds(pid) - before[name] for name, pid in self._server_processes.items()
        }


def _joined(
    found: Sequence[dict[str, Any]], server: dict[str, float], seconds: float
) -> dict[str, Any]:
    """One figure of several processes': their rates add up.

    Args:
        found: What each says.
        server: CPU seconds of the server's processes in the window.
        seconds: Of the window.
    """
    rate = sum(each["experiences"] / each["seconds"] for each in found)
    client = sum(each["cpu_seconds"] / each["seconds"] for each in found)
    micro = 1e6 / rate if rate else 0.0
    return {
        "rate": rate,
        "experiences": sum(each["experiences"] for each in found),
        "seconds": max(each["seconds"] for each in found),
        "cpu_us": {"client": client * micro}
        | {name: used / seconds * micro for name, used in server.items()},
    }
