"""A worker or trainer to be killed: `python kill_worker.py push|train|hold ADDRESS ARGUMENTS...`.

Each writes a journal, one system call per line, so that what it knew survives its own death.
Speaks plain gRPC; a call that fails because the server is away is made again.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import queue
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc

from experience_buffer import trxp
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer.v1.service_pb2_grpc import ExperienceBufferStub

T = TypeVar("T")
AWAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    # What no handler has accepted when a server stops; nobody here cancels a call.
    grpc.StatusCode.CANCELLED,
)
OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
]
LENGTH = struct.Struct("<I")
REPEATED = 3
"""Pushes that a restarted worker makes again though they were acknowledged."""


class Journal:
    """Lines of JSON, appended one system call each."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, event: str, **fields: Any) -> None:
        line = {"event": event, "time": time.monotonic(), "pid": os.getpid()} | fields
        os.write(self._file, json.dumps(line).encode() + b"\n")


def insist(call: Callable[[], T]) -> T:
    """Make a call until the server answers it."""
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            if error.code() not in AWAY:
                raise


def read_work(path: Path) -> Iterator[bytes]:
    """The payloads of a work file."""
    data = path.read_bytes()
    start = 0
    while start < len(data):
        (length,) = LENGTH.unpack_from(data, start)
        start += LENGTH.size + length
        yield data[start - length : start]


def push(stub: ExperienceBufferStub, buffer: str, work: str, journal_path: str) -> None:
    """Push every payload in order, from where an earlier life stopped."""
    path = Path(journal_path)
    lines = path.read_bytes().splitlines() if path.exists() else []
    acked = [json.loads(line)["index"] for line in lines if b'"acked"' in line]
    journal = Journal(path)
    first = max(max(acked, default=-1) + 1 - REPEATED, 0)
    for index, payload in enumerate(read_work(Path(work))):
        if index < first:
            continue
        request = service_pb2.PushRequest(buffer=buffer, payload=payload)
        response = insist(functools.partial(stub.Push, request, timeout=5, wait_for_ready=True))
        statuses = [types_pb2.PushStatus.Name(one.status) for one in response.outcomes]
        messages = [one.message for one in response.outcomes if one.message]
        journal.write("acked", index=index, statuses=statuses, messages=messages)
    journal.write("done")


def train(
    stub: ExperienceBufferStub,
    buffer: str,
    consumer: str,
    batch_size: str,
    lease_seconds: str,
    journal_path: str,
) -> None:
    """Sample and acknowledge; now and then give a batch back, or forget it."""
    journal = Journal(Path(journal_path))
    request = service_pb2.SampleRequest(
        buffer=buffer,
        consumer=consumer,
        batch_size=int(batch_size),
        min_batch_size=1,
        timeout_seconds=0.2,
        lease_seconds=float(lease_seconds),
    )
    number = 0
    journal.write("ready")
    while True:
        batch = insist(lambda: stub.Sample(request, timeout=5, wait_for_ready=True))
        if not batch.experiences:
            continue
        number += 1
        lease = batch.lease.id
        journal.write("leased", lease=lease, items=[describe(one) for one in batch.experiences])
        if number % 13 == 12:
            journal.write("forgotten", lease=lease)
        elif number % 7 == 6:
            settle(stub.Nack, service_pb2.NackRequest(buffer=buffer, lease_id=lease), journal)
        else:
            settle(stub.Ack, service_pb2.AckRequest(buffer=buffer, lease_id=lease), journal)


def hold(stub: ExperienceBufferStub, buffer: str, way: str, seconds: str, path: str) -> None:
    """Lease five units, by a call or on a stream, and keep them until killed."""
    fields: Any = {"buffer": buffer, "consumer": "trainer", "batch_size": 5}
    fields |= {"timeout_seconds": 20.0, "lease_seconds": float(seconds)}
    if way == "call":
        num_leased = len(stub.Sample(service_pb2.SampleRequest(**fields)).experiences)
    else:
        opening = service_pb2.SampleStreamOpen(**fields)
        first = [
            service_pb2.SampleStreamRequest(open=opening),
            service_pb2.SampleStreamRequest(credits=1),
        ]
        never: queue.SimpleQueue[Any] = queue.SimpleQueue()
        batches = stub.SampleStream(itertools.chain(first, iter(never.get, None)))
        num_leased = len(next(batches).frame.experiences)
    Journal(Path(path)).write("leased", num_leased=num_leased)
    threading.Event().wait()


def describe(one: types_pb2.SampledExperience) -> tuple[str, str, float, int]:
    """What is to be checked of a delivered experience; its advantages are all equal."""
    [item] = trxp.read(one.payload)
    assert isinstance(item, trxp.Item), item
    view = memoryview(item.tensors["advantages"].data).cast("B")
    advantages = struct.unpack(f"<{len(view) // 4}f", view)
    assert len(set(advantages)) == 1, advantages
    return one.uid, one.group, advantages[0], one.num_deliveries


def settle(method: Any, request: Any, journal: Journal) -> None:
    """End a lease, and write down what was tried and what came of it."""
    verb = type(request).__name__.removesuffix("Request").lower()
    journal.write(f"{verb}ing", lease=request.lease_id)
    try:
        insist(lambda: method(request, timeout=5, wait_for_ready=True))
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
        journal.write("lost", lease=request.lease_id, details=error.details())
    else:
        journal.write(f"{verb}ed", lease=request.lease_id)


def main() -> None:
    """Run one role until it is done or killed."""
    role, address, *arguments = sys.argv[1:]
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        roles: dict[str, Callable[..., None]] = {"push": push, "train": train, "hold": hold}
        roles[role](ExperienceBufferStub(channel), *arguments)


if __name__ == "__main__":
    main()
