"""The bare Python gRPC server: what sending the bytes alone costs.

Raw bytes, no protobuf, nothing stored, one unary call at a time. A writer sends an experience's
bytes and gets an empty answer; a reader gets a batch's bytes, and with `both` it sends them too.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from benchmarks.compare.adapters import blobs
from benchmarks.workload import POOL_GROUPS, Received, Size, pool

_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@contextmanager
def serve(folder: Path, size: Size, variant: str) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Run the server within this process."""
    del folder, variant
    contents = itertools.cycle(
        [blobs.encode(0, number, 0, group[0]) for number, group in enumerate(pool(size))]
    )
    handlers: dict[str, Any] = {
        name: grpc.unary_unary_rpc_method_handler(answer)
        for name, answer in (
            ("sink", lambda request, context: b""),
            ("source", lambda request, context: next(contents)),
            ("both", lambda request, context: request),
        )
    }
    server = grpc.server(futures.ThreadPoolExecutor(4), options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", {"server": os.getpid()}
    finally:
        server.stop(None).wait()


def writer(address: str, size: Size, writer: int, mode: str) -> EchoWriter:
    """Connect a writer; mode `sink`, or `both`, which gets its bytes back."""
    return EchoWriter(address, size, writer, mode)


def reader(address: str, size: Size, mode: str) -> EchoReader:
    """Connect a reader; there is one mode, `source`."""
    return EchoReader(address, size, mode)


def leave() -> None:
    """Nothing: each writer and reader has its own connection."""


def versions() -> Mapping[str, str]:
    """Nothing that others don't say."""
    return {}


class EchoWriter:
    """Sends the bytes of one experience per call."""

    def __init__(self, address: str, size: Size, writer: int, mode: str) -> None:
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._call: Any = self._channel.unary_unary(f"/echo/{mode}")
        self._contents = pool(size)
        self._writer = writer
        self.num_acked = 0

    def push(self, number: int) -> None:
        """Send one group, an experience per call."""
        for run, rollout in enumerate(self._contents[number % POOL_GROUPS]):
            self._call(blobs.encode(self._writer, number, run, rollout))
            self.num_acked += 1

    def push_one(self, number: int) -> None:
        """Send one group."""
        self.push(number)

    def flush(self) -> None:
        """Nothing: every call was waited for."""

    def close(self) -> None:
        """Disconnect."""
        self._channel.close()


class EchoReader:
    """Asks for the bytes of one experience per call."""

    def __init__(self, address: str, size: Size, mode: str) -> None:
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._call: Any = self._channel.unary_unary(f"/echo/{mode}")
        self._size = size

    @property
    def keeps_groups(self) -> bool:
        """Whether its batches are whole groups."""
        return True

    def sample(self) -> list[blobs.Arrays]:
        """As many experiences as a batch has."""
        return [blobs.decode(self._call(b""), self._size) for _ in range(self._size.batch_size)]

    def fetch(self) -> list[blobs.Arrays]:
        """As many experiences as a batch has."""
        return self.sample()

    def settle(self, batch: Any) -> None:
        """Nothing to say."""

    def unpack(self, batch: Any) -> Sequence[Received]:
        """The batch's experiences, to be checked."""
        return [blobs.received(arrays) for arrays in batch]

    def close(self) -> None:
        """Disconnect."""
        self._channel.close()
