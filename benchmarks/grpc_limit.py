"""`python -m benchmarks.grpc_limit`: what Python's gRPC alone moves on this machine.

Raw bytes over streams, no protobuf, nothing read or stored: four writers send messages as large as a
background writer's to one asyncio server, and a server sends messages to one reader. Rates are given
as experiences of each size, CPU time as microseconds per megabyte.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import uvloop

from benchmarks.servers import cpu_seconds
from benchmarks.workload import SIZES
from experience_buffer_server.runtime.memory import keep_large_blocks

_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_MEBI = 2**20
_CASES = (("sink", 1, 4), ("sink", 2, 4), ("source", 1, 1), ("source", 8, 1))
"""Mode, MiB per message, clients."""
_UNDER_WAY = 3
"""Messages that a client sends, or asks for, ahead of the answers."""
_LEAD_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Moved:
    """What went through in a window of time."""

    rate: float
    """Bytes per second, of all clients."""
    client_cpu: float
    """CPU seconds per byte, of all clients."""
    server_cpu: float


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[tuple[str, int, int], list[Moved]] = {case: [] for case in _CASES}
    for _ in range(options.rounds):
        for (mode, mebi, num_clients), runs in found.items():
            runs.append(_measure(mode, mebi * _MEBI, num_clients, options.seconds))
    print(f"load {os.getloadavg()[0]:.1f}; medians of {options.rounds}\n")
    names = " | ".join(f"{name}, experiences/s" for name in SIZES)
    print(f"| messages | MB/s | {names} | CPU us per MB, clients | server |\n" + "|---" * 7 + "|")
    for (mode, mebi, num_clients), runs in found.items():
        rate, client, server = (
            statistics.median(getattr(run, name) for run in runs)
            for name in ("rate", "client_cpu", "server_cpu")
        )
        sizes = " | ".join(f"{rate / size.num_bytes:,.0f}" for size in SIZES.values())
        print(
            f"| {mode}, {mebi} MiB, clients: {num_clients} | {rate / 1e6:,.0f} | {sizes} "
            f"| {client * 1e12:.0f} | {server * 1e12:.0f} |"
        )


def _measure(mode: str, num_bytes: int, num_clients: int, seconds: float) -> Moved:
    context = multiprocessing.get_context("spawn")
    ports, ended = context.Queue(), context.Event()
    server = context.Process(target=_serve, args=(ports, ended, num_bytes))
    server.start()
    port = ports.get()
    counts = [context.Value("q", 0, lock=False) for _ in range(num_clients)]
    clients = [
        context.Process(target=_send_and_receive, args=(port, mode, num_bytes, count, ended))
        for count in counts
    ]
    for client in clients:
        client.start()
    while not all(count.value for count in counts):
        time.sleep(0.05)
    time.sleep(_LEAD_SECONDS)

    def state() -> tuple[float, int, float, float]:
        client_cpu = sum(cpu_seconds(client.pid or 0) for client in clients)
        num_messages = sum(count.value for count in counts)
        return time.monotonic(), num_messages, client_cpu, cpu_seconds(server.pid or 0)

    before = state()
    time.sleep(seconds)
    after = state()
    ended.set()
    for process in (*clients, server):
        process.join()
    lasted, num_messages, client_cpu, server_cpu = (
        end - start for start, end in zip(before, after, strict=True)
    )
    moved = num_messages * num_bytes
    return Moved(moved / lasted, client_cpu / moved, server_cpu / moved)


def _serve(ports: Any, ended: Any, num_bytes: int) -> None:
    keep_large_blocks()
    uvloop.run(_serving(ports, ended, os.urandom(num_bytes)))


async def _serving(ports: Any, ended: Any, data: bytes) -> None:
    async def sink(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield b""

    async def source(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield data

    server = grpc.aio.server(options=_OPTIONS)
    handlers: dict[str, Any] = {
        behavior.__name__: grpc.stream_stream_rpc_method_handler(behavior)
        for behavior in (sink, source)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("limit", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ports.put(port)
    await asyncio.to_thread(ended.wait)
    await server.stop(None)


def _send_and_receive(port: int, mode: str, num_bytes: int, count: Any, ended: Any) -> None:
    keep_large_blocks()
    data = os.urandom(num_bytes) if mode == "sink" else b"more"
    room = threading.Semaphore(_UNDER_WAY)

    def requests() -> Iterator[bytes]:
        while not ended.is_set():
            room.acquire()
            yield data

    with grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) as channel:
        call: Any = channel.stream_stream(f"/limit/{mode}")
        for _ in call(requests()):
            room.release()
            count.value += 1
            if ended.is_set():
                return


if __name__ == "__main__":
    main()
