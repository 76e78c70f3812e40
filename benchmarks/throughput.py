"""Experiences per second through real processes: ingest with 1 and 4 writers, then sampling.

Encoding and decoding are inside the clock. Ingest: one group of 8 per call, counted when its ack
has come, so when it is on disk; `writer1` is one process with the client's background writer, which
puts groups together and doesn't wait for each ack. Sampling: one reader, batches of 64 experiences that end as
tensors, each acknowledged.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import torch

from benchmarks.servers import running_server
from benchmarks.workload import GROUP_SIZE, SIZES, Size, check, group
from experience_buffer import BufferConfig, Client, ConsumerConfig

_BATCH_GROUPS = 8
_context = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured case."""

    case: str
    size: str
    num_experiences: int
    seconds: float
    payload_bytes: int
    """Of one experience."""
    server_microseconds: dict[str, float]
    """CPU time per experience, by server process."""

    @property
    def rate(self) -> float:
        """Experiences per second."""
        return self.num_experiences / self.seconds

    @property
    def megabytes_per_second(self) -> float:
        """Payload megabytes (10^6) per second."""
        return self.rate * self.payload_bytes / 1e6


def write(
    address: str,
    size: Size,
    writer: int,
    num_groups: int,
    ready: Event,
    go: Event,
    in_background: bool,
) -> None:
    """Push groups, one per call or through a background writer; the body of a writer process."""
    torch.set_num_threads(1)
    groups = [group(size, writer, number) for number in range(num_groups)]
    with Client(address) as client:
        client.get_buffer("bench")
        ready.set()
        go.wait()
        if in_background:
            with client.writer(buffer="bench") as background:
                for experiences in groups:
                    background.append(experiences)
        else:
            for experiences in groups:
                client.push(experiences, buffer="bench")


def measure(
    size: Size, num_writers: int, num_groups: int, *, in_background: bool = False
) -> list[Result]:
    """Ingest `num_groups` per writer, then sample all of it."""
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder) / "data") as server:
        with Client(server.address) as client:
            consumer = ConsumerConfig(name="trainer", unit="group")
            client.create_buffer(
                BufferConfig(name="bench", group_size=GROUP_SIZE, consumers=(consumer,))
            )
        ready = [_context.Event() for _ in range(num_writers)]
        go = _context.Event()
        processes = [
            _context.Process(
                target=write,
                daemon=True,
                args=(
                    server.address,
                    size,
                    writer,
                    num_groups,
                    ready[writer],
                    go,
                    in_background,
                ),
            )
            for writer in range(num_writers)
        ]
        for process in processes:
            process.start()
        for event, process in zip(ready, processes, strict=True):
            while not event.wait(1.0):
                if process.exitcode is not None:
                    raise RuntimeError(f"a writer ended early with status {process.exitcode}")
        count = num_writers * num_groups * GROUP_SIZE
        before, started = server.cpu_seconds(), time.perf_counter()
        go.set()
        for process in processes:
            process.join()
            if process.exitcode:
                raise RuntimeError(f"a writer ended with status {process.exitcode}")
        seconds = time.perf_counter() - started
        after = server.cpu_seconds()
        with Client(server.address) as client:
            payload_bytes = client.get_buffer("bench").num_bytes // count
        ingest = Result(
            case=f"{'writer' if in_background else 'ingest'}{num_writers}",
            size=size.name,
            num_experiences=count,
            seconds=seconds,
            payload_bytes=payload_bytes,
            server_microseconds=_per_experience(before, after, count),
        )
        before, started = server.cpu_seconds(), time.perf_counter()
        _drain(server.address, count)
        seconds = time.perf_counter() - started
        sample = Result(
            case="sample",
            size=size.name,
            num_experiences=count,
            seconds=seconds,
            payload_bytes=payload_bytes,
            server_microseconds=_per_experience(before, server.cpu_seconds(), count),
        )
    return [ingest, sample]


def insert_latencies(size: Size, num_inserts: int) -> list[float]:
    """Seconds from call to durable ack of single experiences, one after the other."""
    seconds = []
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder) / "data") as server,
        Client(server.address) as client,
    ):
        for number in range(num_inserts // GROUP_SIZE):
            for experience in group(size, 0, number):
                started = time.perf_counter()
                client.push([experience])
                seconds.append(time.perf_counter() - started)
    return seconds


def _drain(address: str, count: int) -> None:
    torch.set_num_threads(1)
    with (
        Client(address) as client,
        client.stream(_BATCH_GROUPS, buffer="bench", consumer="trainer") as batches,
    ):
        for batch in batches:
            for experience in batch.experiences:
                check(experience)
            count -= len(batch.experiences)
            batch.ack()
            if count <= 0:
                return


def _per_experience(
    before: dict[str, float], after: dict[str, float], count: int
) -> dict[str, float]:
    return {
        name: (seconds - before.get(name, 0.0)) / count * 1e6 for name, seconds in after.items()
    }


def run(num_groups: dict[str, int]) -> Iterator[Result]:
    """All cases; groups per size are shared by the writers of a case."""
    for name, count in num_groups.items():
        for num_writers, in_background in ((1, False), (4, False), (1, True)):
            # Whole batches only, so that the reader never waits for a partial one.
            per_writer = -(-count // num_writers // _BATCH_GROUPS) * _BATCH_GROUPS
            yield from measure(SIZES[name], num_writers, per_writer, in_background=in_background)
