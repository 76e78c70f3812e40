"""What this machine can do at most: memory, disk, loopback, and the store's engine alone."""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

_SECONDS = 0.4
_MEBI = 2**20


def measure() -> Iterator[dict[str, Any]]:
    """A record per limit, each taking about half a second."""
    yield _record("memcpy", "GB/s", _memcpy())
    for kind, milliseconds in (
        ("fsync 4 KB", _fsyncs(4096)),
        ("fsync 1 MB", _fsyncs(_MEBI)),
        ("loopback round trip 1 KB", _round_trips()),
    ):
        cuts = statistics.quantiles(milliseconds, n=100)
        yield _record(f"{kind} p50", "ms", cuts[49])
        yield _record(f"{kind} p99", "ms", cuts[98])
    for value_bytes, per_commit in ((8192, 64), (32_768, 64), (2**17, 32)):
        name = f"LMDB durable puts of {value_bytes // 1024} KB by {per_commit}"
        yield _record(name, "puts/s", _lmdb_puts(value_bytes, per_commit))


def _record(case: str, unit: str, value: float) -> dict[str, Any]:
    return {"system": "machine", "size": "", "case": case, "mode": unit, "value": value}


def _memcpy() -> float:
    source = np.ones(64 * _MEBI, np.uint8)
    target = np.empty_like(source)
    count, seconds = _repeat(lambda: np.copyto(target, source))
    return count * source.nbytes / seconds / 1e9


def _fsyncs(num_bytes: int) -> list[float]:
    """Milliseconds of an append with its fsync."""
    data = os.urandom(num_bytes)
    with tempfile.TemporaryFile() as file:

        def append() -> None:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

        return _times(append)


def _round_trips() -> list[float]:
    """Milliseconds of 1 KB there and back."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as client:
            server, _ = listener.accept()
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            echo = threading.Thread(target=_echo, args=(server,))
            echo.start()
            data = bytes(1024)

            def there_and_back() -> None:
                client.sendall(data)
                client.recv(1024, socket.MSG_WAITALL)

            times = _times(there_and_back)
        echo.join()
        server.close()
        return times


def _echo(connection: socket.socket) -> None:
    while data := connection.recv(1024):
        connection.sendall(data)


def _lmdb_puts(value_bytes: int, per_commit: int) -> float:
    value = os.urandom(value_bytes)
    with tempfile.TemporaryDirectory() as folder:
        environment = lmdb.open(str(Path(folder) / "limit"), map_size=16 * 2**30)
        key = 0

        def commit() -> None:
            nonlocal key
            with environment.begin(write=True) as transaction:
                for _ in range(per_commit):
                    transaction.put(key.to_bytes(8, "big"), value, append=True)
                    key += 1

        count, seconds = _repeat(commit)
        environment.close()
    return count * per_commit / seconds


def _repeat(action: Callable[[], Any]) -> tuple[int, float]:
    action()
    count, started = 0, time.perf_counter()
    while (seconds := time.perf_counter() - started) < _SECONDS:
        action()
        count += 1
    return count, seconds


def _times(action: Callable[[], Any]) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(times) < 3:
        started = time.perf_counter()
        action()
        times.append((time.perf_counter() - started) * 1e3)
    return times
