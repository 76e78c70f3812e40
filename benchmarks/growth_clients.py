"""The clients of `growth`: processes that keep connections to several servers and use them in turn.

A server with its load is a `Shape`. Each process has connections to the servers of all shapes that
are compared, and works for one of them at a time.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import experiences
from benchmarks.compare.adapters import ours
from benchmarks.growth_fill import BUFFER, CONSUMER
from benchmarks.workload import GROUP_SIZE, SIZES, Size, check
from experience_buffer import BufferConfig, Client, ClientOptions, ConsumerConfig, Selector
from experience_buffer.consumer_options import SelectorKind

NUM_THREADS = 8
"""Calls under way at once where many buffers or connections are used."""
_BATCH_SIZE = 64
_TIMEOUT_SECONDS = 60.0
WARM_UP_BATCHES = 2
"""Of a stream, before it is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a server holds and how its clients use it."""

    name: str
    size: str = "S"
    selector: SelectorKind = "fifo"
    population: int = 0
    """Experiences stored before."""
    num_buffers: int = 1
    num_connections: int = 1
    """Of the first process."""
    group_size: int = GROUP_SIZE
    num_processes: int = 1

    @property
    def workload(self) -> Size:
        """One experience, its group, and a batch of 64 as whole groups."""
        batch_groups = max(_BATCH_SIZE // self.group_size, 1)
        return replace(SIZES[self.size], group_size=self.group_size, batch_groups=batch_groups)

    @property
    def buffers(self) -> Sequence[str]:
        """The names of its buffers."""
        return [BUFFER, *(f"{BUFFER}-{number}" for number in range(1, self.num_buffers))]


class Connected:
    """One process's connections to the server of a shape."""

    def __init__(self, shape: Shape, address: str, writer: int) -> None:
        self._shape, self._address, self._writer = shape, address, writer
        self._size = shape.workload
        self._clients = [
            Client(address, timeout=_TIMEOUT_SECONDS)
            for _ in range(1 if writer else shape.num_connections)
        ]
        self._number = 0
        self._reader: ours.StreamReader | None = None
        self._background: ours.BackgroundWriter | None = None

    def connect(self) -> None:
        """Make the buffers that aren't there, and open all connections."""
        consumer = ConsumerConfig(
            name=CONSUMER, unit="group", selector=Selector(self._shape.selector)
        )
        there = {buffer.config.name for buffer in self._clients[0].list_buffers()}
        for name in sorted({*self._shape.buffers} - there):
            config = BufferConfig(name, group_size=self._size.group_size, consumers=(consumer,))
            self._clients[0].create_buffer(config)
        for client in self._clients:
            client.get_buffer(BUFFER)

    def append(self, num_groups: int) -> float:
        """Push through a background writer until all is durable; seconds."""
        if self._background is None:
            self._background = ours.BackgroundWriter(
                self._address, self._size, self._writer, ClientOptions()
            )
        started = time.perf_counter()
        for number in self._next(num_groups):
            self._background.push(number)
        self._background.flush()
        return time.perf_counter() - started

    def push(self, num_groups: int) -> float:
        """Push a group per call, by several threads, buffers and connections in turn; seconds."""
        numbers = self._next(num_groups)

        def push(thread: int) -> None:
            for number in numbers[thread::NUM_THREADS]:
                group = experiences.group(self._size, self._writer, number)
                self._client(number).push(group, buffer=self._buffer(number))

        return _in_threads(push)

    def push_ones(self, num_groups: int) -> list[float]:
        """Push one experience per call, one call after the other; milliseconds of each."""
        taken = []
        for number in self._next(num_groups):
            for experience in experiences.group(self._size, self._writer, number):
                started = time.perf_counter()
                self._clients[0].push([experience], buffer=BUFFER)
                taken.append((time.perf_counter() - started) * 1e3)
        return taken

    def open_stream(self, mode: str) -> None:
        """Begin a stream, `packed` or `trxp`, check its first batches, and let it read ahead."""
        self._reader = ours.reader(self._address, self._size, mode)
        for _ in range(WARM_UP_BATCHES):
            batch = self._reader.sample()
            check(self._reader.unpack(batch), self._size, experiences.contents(self._size))

    def stream(self, num_batches: int) -> float:
        """Take batches of the stream and acknowledge each; seconds."""
        assert self._reader is not None
        started = time.perf_counter()
        for _ in range(num_batches):
            self._reader.sample()
        return time.perf_counter() - started

    def close_stream(self) -> None:
        """Give back what was read ahead."""
        assert self._reader is not None
        self._reader.close()
        self._reader = None

    def fetch(self, num_batches: int) -> float:
        """Take batches by calls, by several threads, buffers and connections in turn; seconds.

        Raises:
            ValueError: A batch isn't full.
        """

        def fetch(thread: int) -> None:
            for number in range(thread, num_batches, NUM_THREADS):
                batch = self._client(number).sample(
                    self._size.batch_groups,
                    buffer=self._buffer(number),
                    consumer=CONSUMER,
                    format="packed",
                )
                if len(batch.packed) != self._size.batch_size:
                    raise ValueError(f"a batch of {len(batch.packed)} came: {batch.shortfall}")
                batch.ack()

        return _in_threads(fetch)

    def close(self) -> None:
        """Disconnect."""
        if self._background is not None:
            self._background.close()
        for client in self._clients:
            client.close()

    def _next(self, num_groups: int) -> range:
        first, self._number = self._number, self._number + num_groups
        return range(first, self._number)

    def _client(self, number: int) -> Client:
        return self._clients[number % len(self._clients)]

    def _buffer(self, number: int) -> str:
        return self._shape.buffers[number % self._shape.num_buffers]


def _in_threads(work: Callable[[int], None]) -> float:
    started = time.perf_counter()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(work, range(NUM_THREADS)))
    return time.perf_counter() - started


# --- processes

_connected: dict[str, Connected] = {}
"""In a client process: by the name of their shape."""


class Clients:
    """Client processes, of which each shape uses the first ones."""

    def __init__(self, executors: Sequence[ProcessPoolExecutor]) -> None:
        self._executors = executors

    def connect(self, shape: Shape, address: str) -> None:
        """Connect processes to a shape's server."""
        for writer in range(shape.num_processes):
            self._executors[writer].submit(_connect, shape, address, writer).result()

    def disconnect(self, shape: Shape) -> None:
        """Disconnect them."""
        for executor in self._of(shape):
            executor.submit(_disconnect, shape.name).result()

    def first(self, shape: Shape, verb: str, *arguments: Any) -> Any:
        """Let one process do something; what it answers."""
        return self._executors[0].submit(_do, shape.name, verb, arguments).result()

    def all(self, shape: Shape, verb: str, *arguments: Any) -> float:
        """Let all of a shape's processes do something at once; seconds until it is done."""
        started = time.perf_counter()
        doing = [each.submit(_do, shape.name, verb, arguments) for each in self._of(shape)]
        for each in doing:
            each.result()
        return time.perf_counter() - started

    def _of(self, shape: Shape) -> Sequence[ProcessPoolExecutor]:
        return self._executors[: shape.num_processes]


@contextmanager
def client_processes(count: int) -> Iterator[Clients]:
    """Start processes, and end them."""
    context = multiprocessing.get_context("spawn")
    executors = [
        ProcessPoolExecutor(1, mp_context=context, initializer=torch.set_num_threads, initargs=(1,))
        for _ in range(count)
    ]
    try:
        yield Clients(executors)
    finally:
        for executor in executors:
            executor.shutdown(cancel_futures=True)


def _connect(shape: Shape, address: str, writer: int) -> None:
    connected = _connected[shape.name] = Connected(shape, address, writer)
    connected.connect()


def _do(name: str, verb: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(_connected[name], verb)(*arguments)


def _disconnect(name: str) -> None:
    _connected.pop(name).close()
