"""Redis: experiences as raw bytes, a group per call, through redis-py with hiredis.

Three modes. `lists`: a group is one RPUSH, a batch one LPOP with a count; nothing can be found by
its name. `hand-laid`: the same, and the bytes don't say what they hold, so encoding them is hardly
more than copies. `keys`: every experience has a key of its own, as it has elsewhere, and a list holds
the order; a group is one pipeline of MSET and RPUSH, a batch LPOP and then MGET with UNLINK, hand-laid
too. Either way nothing but the order keeps groups together.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from benchmarks.compare.adapters import blobs, described
from benchmarks.workload import POOL_GROUPS, Received, Rollout, Size, pool

_KEYS = "bench-keys"
_START_SECONDS = 10.0


@contextmanager
def serve(folder: Path, size: Size, variant: str) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Run redis-server; the variant is its append-only file: `off`, `everysec` or `always`."""
    del size
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    aof = ("--appendonly", "no") if variant == "off" else ("--appendonly", "yes")
    process = subprocess.Popen(
        [
            *("redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)),
            *("--save", "", *aof, "--appendfsync", "no" if variant == "off" else variant),
            # A rewrite amid a short window would be chance, and to Redis's disadvantage.
            *("--auto-aof-rewrite-percentage", "0", "--loglevel", "warning"),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        _wait(port)
        yield f"127.0.0.1:{port}", {"server": process.pid}
    finally:
        process.kill()
        process.wait()


def writer(address: str, size: Size, writer: int, mode: str) -> ListWriter:
    """Connect a writer; mode `lists`, `hand-laid` or `keys`."""
    return {"lists": ListWriter, "hand-laid": HandLaidWriter, "keys": KeyWriter}[mode](
        address, size, writer
    )


def reader(address: str, size: Size, mode: str) -> ListReader:
    """Connect a reader; mode `lists`, `hand-laid` or `keys`."""
    return {"lists": ListReader, "hand-laid": HandLaidReader, "keys": KeyReader}[mode](
        address, size
    )


def leave() -> None:
    """Nothing: each writer and reader has its own connection."""


def versions() -> Mapping[str, str]:
    """Of the packages that count."""
    words = subprocess.run(["redis-server", "--version"], capture_output=True, text=True).stdout
    server = next(word[2:] for word in words.split() if word.startswith("v="))
    return {"redis-server": server, "redis-py": redis.__version__}


class ListWriter:
    """A blocking connection that appends to a list."""

    _list = "bench"

    def __init__(self, address: str, size: Size, writer: int) -> None:
        self._client = _connect(address)
        self._size = size
        self._writer = writer
        self._contents = pool(size)
        self.num_acked = 0

    def push(self, number: int) -> None:
        """Push one group."""
        self._send(number, range(self._size.group_size))
        self.num_acked += self._size.group_size

    def push_one(self, number: int) -> None:
        """Push one experience."""
        group, run = divmod(number, self._size.group_size)
        self._send(group, (run,))

    def flush(self) -> None:
        """Nothing: every push was waited for."""

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def _send(self, number: int, runs: Sequence[int]) -> None:
        self._client.rpush(self._list, *(self._encode(number, run) for run in runs))

    def _encode(self, number: int, run: int) -> bytes:
        rollout = self._contents[number % POOL_GROUPS][run]
        return self._encoding(self._writer, number, run, rollout)

    @staticmethod
    def _encoding(writer: int, number: int, run: int, rollout: Rollout) -> bytes:
        return described.encode(writer, number, run, rollout)


class HandLaidWriter(ListWriter):
    """The same with bytes that don't say what they hold."""

    _list = "bench-hand-laid"

    @staticmethod
    def _encoding(writer: int, number: int, run: int, rollout: Rollout) -> bytes:
        return blobs.encode(writer, number, run, rollout)


class KeyWriter(HandLaidWriter):
    """The same with a key per experience."""

    def _send(self, number: int, runs: Sequence[int]) -> None:
        values = {f"{self._writer}/{number}/{run}": self._encode(number, run) for run in runs}
        pipeline = self._client.pipeline(transaction=True)
        pipeline.mset(values)
        pipeline.rpush(_KEYS, *values)
        pipeline.execute()


class ListReader:
    """A blocking connection that takes from the front."""

    _list = "bench"

    def __init__(self, address: str, size: Size) -> None:
        self._client = _connect(address)
        self._size = size

    @property
    def keeps_groups(self) -> bool:
        """Whether its batches are whole groups."""
        return True

    def sample(self) -> list[blobs.Arrays]:
        """Take one batch."""
        found: Any = self._client.lpop(self._list, self._size.batch_size)
        return [self._decode(data) for data in found or ()]

    def fetch(self) -> list[blobs.Arrays]:
        """Take one batch."""
        return self.sample()

    def settle(self, batch: Any) -> None:
        """Nothing: what was taken is gone."""

    def unpack(self, batch: Any) -> Sequence[Received]:
        """The batch's experiences, to be checked."""
        return [blobs.received(arrays) for arrays in batch]

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def _decode(self, data: bytes) -> blobs.Arrays:
        return described.decode(data, self._size)


class HandLaidReader(ListReader):
    """The same with bytes that don't say what they hold."""

    _list = "bench-hand-laid"

    def _decode(self, data: bytes) -> blobs.Arrays:
        return blobs.decode(data, self._size)


class KeyReader(HandLaidReader):
    """The same with a key per experience."""

    def sample(self) -> list[blobs.Arrays]:
        """Take one batch."""
        keys: Any = self._client.lpop(_KEYS, self._size.batch_size)
        pipeline = self._client.pipeline(transaction=True)
        pipeline.mget(keys or ())
        pipeline.unlink(*(keys or ()))
        found: Any = pipeline.execute()[0]
        return [self._decode(data) for data in found]


def _connect(address: str) -> redis.Redis:
    host, _, port = address.rpartition(":")
    return redis.Redis(host=host, port=int(port))


def _wait(port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            redis.Redis(port=port).ping()
            return
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
