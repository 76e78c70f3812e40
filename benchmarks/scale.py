"""A million experiences in one buffer: start, memory, and what a batch of 64 costs.

`make bench-scale`. The store is written first, without a server; then a server starts on it and
serves each selector in turn; then the same happens within this process, without gRPC. There the
target holds for what selecting and leasing take themselves: a lease is also committed before it is
delivered, and how long that takes is the disk's business.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from benchmarks.scale_fill import BUFFER, CONSUMER, fill
from benchmarks.servers import Server, running_server
from benchmarks.workload import GROUP_SIZE
from experience_buffer.v1 import config_pb2, service_pb2, service_pb2_grpc
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.compute.scheduler import Computer
from experience_buffer_server.buffer.registry import Registry
from experience_buffer_server.buffer.state.consumers import Want
from experience_buffer_server.runtime.memory import loading
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.settings.server import ComputeSection, Settings
from experience_buffer_server.store.lmdb.store import LmdbStore

KINDS = (
    *("fifo", "lifo", "uniform", "prioritized", "min", "max"),
    *("freshest", "advantage", "staleness"),
)
_BATCH_SIZE = 64
_START_SECONDS = 15.0
_MEMORY_BYTES = 1e9
_BATCH_MILLISECONDS = 5.0
_CALL_SECONDS = 60.0
_PATIENCE_SECONDS = 300.0
"""For a start that misses its target by far, too."""


@dataclass(slots=True)
class Times:
    """Seconds of one thing done many times."""

    seconds: list[float] = field(default_factory=list)

    def percentile(self, percent: int) -> float:
        """Milliseconds."""
        return statistics.quantiles(self.seconds, n=100)[percent - 1] * 1e3

    def __str__(self) -> str:
        return f"{self.percentile(50):8.2f}{self.percentile(99):8.2f}"


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiences", type=int, default=1_000_000)
    parser.add_argument("--batches", type=int, default=300, help="per selector and table")
    parser.add_argument("--selectors", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--unit", choices=("item", "group"), default="item")
    parser.add_argument("--data", type=Path, help="keep the store here, and use it again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or Path(folder) / "data"
        _prepare(data, options.experiences // GROUP_SIZE)
        started = time.perf_counter()
        with running_server(data, start_seconds=_PATIENCE_SECONDS) as server:
            _serve(server, started, options)
        asyncio.run(_own(data, options))


def _prepare(data: Path, num_groups: int) -> None:
    if data.exists():
        print(f"using the store at {data}")
        return
    started = time.perf_counter()
    payload_bytes = asyncio.run(fill(data, num_groups))
    print(
        f"{num_groups * GROUP_SIZE:,} experiences of {payload_bytes} bytes in {num_groups:,} groups, "
        f"with advantages, stored in {time.perf_counter() - started:.0f} s",
        flush=True,
    )


# --- through a server


def _serve(server: Server, started: float, options: argparse.Namespace) -> None:
    with grpc.insecure_channel(
        server.address, options=[("grpc.max_receive_message_length", -1)]
    ) as channel:
        stub = service_pb2_grpc.ExperienceBufferStub(channel)
        stats = stub.GetStats(service_pb2.GetStatsRequest(buffer=BUFFER), timeout=_CALL_SECONDS)
        seconds = time.perf_counter() - started
        print(
            f"\nServer with {stats.buffers[0].num_items:,} experiences: answers "
            f"{seconds:.1f} s after its start, {_verdict(seconds, _START_SECONDS)} s",
            flush=True,
        )
        time.sleep(1.0)
        _print_memory(server, "after the start")
        print("Over gRPC, ms     UpdateBuffer  Sample p50     p99  Ack p50     p99")
        for kind in options.selectors:
            began = time.perf_counter()
            _choose(stub, kind, options.unit)
            change = (time.perf_counter() - began) * 1e3
            sample, ack = _calls(stub, options.batches, options.unit)
            print(f"{kind:20}{change:10.0f}    {sample} {ack}", flush=True)
        _print_memory(server, "after all of this")


def _print_memory(server: Server, when: str) -> None:
    memory = server.memory_bytes()
    print(
        f"Memory beyond the page cache {when}, MB: "
        + ", ".join(f"{name} {size / 1e6:.0f}" for name, size in memory.items())
        + f"; server {_verdict(memory['server'] / 1e6, _MEMORY_BYTES / 1e6)} MB",
        flush=True,
    )


def _choose(stub: service_pb2_grpc.ExperienceBufferStub, kind: str, unit: str) -> None:
    consumer = config_pb2.ConsumerConfig(
        name=CONSUMER,
        unit=config_pb2.Unit.Value(f"UNIT_{unit.upper()}"),
        selector=config_pb2.Selector(
            kind=config_pb2.SelectorKind.Value(f"SELECTOR_KIND_{kind.upper()}"), seed=5
        ),
    )
    request = service_pb2.UpdateBufferRequest(
        config=config_pb2.BufferConfig(name=BUFFER, consumers=[consumer])
    )
    request.update_mask.paths.append("consumers")
    stub.UpdateBuffer(request, timeout=_CALL_SECONDS)


def _calls(
    stub: service_pb2_grpc.ExperienceBufferStub, num_batches: int, unit: str
) -> tuple[Times, Times]:
    sample, ack = Times(), Times()
    request = service_pb2.SampleRequest(
        buffer=BUFFER, consumer=CONSUMER, batch_size=_batch_size(unit)
    )
    for _ in range(num_batches):
        started = time.perf_counter()
        response = stub.Sample(request, timeout=_CALL_SECONDS)
        sampled = time.perf_counter()
        _check(response.num_units, unit)
        stub.Ack(
            service_pb2.AckRequest(buffer=BUFFER, lease_id=response.lease.id), timeout=_CALL_SECONDS
        )
        sample.seconds.append(sampled - started)
        ack.seconds.append(time.perf_counter() - sampled)
    return sample, ack


# --- within this process


async def _own(data: Path, options: argparse.Namespace) -> None:
    store = await LmdbStore.open(data)
    settings, metrics = Settings(), Metrics()
    registry = Registry(settings, store, Computer(ComputeSection(), str(data), metrics), metrics)
    try:
        started = time.perf_counter()
        with loading():
            await registry.load()
        print(f"\nWithout gRPC: loaded in {time.perf_counter() - started:.1f} s")
        print(f"One fsync of a page on this disk, ms p50, p99:{_fsyncs(data, options.batches)}")
        print("Select and lease, ms        CPU p50     p99              with its fsync p50     p99")
        for kind in options.selectors:
            selector = {"kind": kind, "seed": 5}
            consumer = {"name": CONSUMER, "unit": options.unit, "selector": selector}
            await registry.update(BUFFER, {"consumers": [consumer]})
            cpu, wall = await _leases(registry.get(BUFFER), options)
            verdict = _verdict(cpu.percentile(99), _BATCH_MILLISECONDS)
            print(f"{kind:20}       {cpu}  {verdict:20} {wall}", flush=True)
    finally:
        await registry.drain()
        await store.close()


async def _leases(buffer: Buffer, options: argparse.Namespace) -> tuple[Times, Times]:
    want = Want(
        batch_size=_batch_size(options.unit),
        min_batch_size=1,
        timeout_seconds=0.0,
        lease_seconds=60.0,
        max_bytes=2**62,
    )
    stop = asyncio.Event()
    cpu, wall = Times(), Times()
    for _ in range(options.batches):
        started, began = time.perf_counter(), time.thread_time()
        lease, _ = await buffer.sample(CONSUMER, want, stop)
        cpu.seconds.append(time.thread_time() - began)
        wall.seconds.append(time.perf_counter() - started)
        assert lease is not None
        _check(lease.num_units, options.unit)
        await buffer.ack(lease.id)
    return cpu, wall


def _fsyncs(data: Path, count: int) -> Times:
    """What the disk alone makes of a commit."""
    times = Times()
    with tempfile.TemporaryFile(dir=data) as file:
        for _ in range(count):
            file.seek(0)
            started = time.perf_counter()
            file.write(os.urandom(4096))
            file.flush()
            os.fsync(file.fileno())
            times.seconds.append(time.perf_counter() - started)
    return times


def _batch_size(unit: str) -> int:
    return _BATCH_SIZE if unit == "item" else _BATCH_SIZE // GROUP_SIZE


def _check(num_units: int, unit: str) -> None:
    if num_units != _batch_size(unit):
        raise RuntimeError(f"a batch of {num_units} {unit}s came, not {_batch_size(unit)}")


def _verdict(figure: float, target: float) -> str:
    return f"target {target:g} {'met' if figure <= target else 'MISSED'}"


if __name__ == "__main__":
    main()
