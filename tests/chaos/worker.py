"""A worker or trainer of a run.

Each writes down what it is about to do and what came of it, one system call per line, outside the
server: what it knew survives its own death. A call that fails because the server is away is made
again. A worker goes on where its last life stopped; a trainer begins anew.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer.v1.service_pb2_grpc import ExperienceBufferStub
from tests.chaos import work
from tests.chaos.calls import PAUSE, LostError, ask, describe
from tests.chaos.learner import Learner
from tests.journal import Journal, events

_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Batches of large payloads exceed the default.
    ("grpc.max_receive_message_length", 64 << 20),
]
_THINKING_SECONDS = 0.01
"""Between operations: trainers are to keep up, and this is no benchmark."""


# --- workers


class Pusher:
    """Pushes, and seals, drops and deletes what it has pushed."""

    def __init__(self, stub: ExperienceBufferStub, folder: Path, worker: int, seed: int) -> None:
        self._stub = stub
        self._worker = worker
        self._seed = seed
        self._stop = folder / "stop"
        path = folder / f"pusher-{worker}"
        self._first = sum(one["event"] == "done" for one in events(path))
        self._journal = Journal(path)

    def run(self) -> None:
        index = self._first
        while not self._stop.exists():
            operation = work.operation(self._seed, self._worker, index)
            for call in operation.calls():
                self._call(index, call)
            if operation.repeats >= 0:
                earlier = work.operation(self._seed, self._worker, operation.repeats)
                self._call(operation.repeats, next(earlier.calls()))
            self._journal.write("done", index=index)
            index += 1
            PAUSE.wait(_THINKING_SECONDS)
        self._journal.write("stopped")

    def _call(self, index: int, call: work.Call) -> None:
        note = {"index": index, "verb": call.verb, "part": call.part}
        self._journal.write("calling", **note)
        result, retried = self._do(call)
        self._journal.write("called", result=result, retried=retried, **note)

    def _do(self, call: work.Call) -> tuple[Any, bool]:
        """What came of a call, and whether an earlier attempt of it had no answer."""
        key = f"{work.BATCH}/{call.task}"
        if call.verb == "push":
            pushed = service_pb2.PushRequest(buffer=call.buffer, payload=work.payload(call))
            answer = ask(self._stub.Push, pushed)
            outcomes = answer.message.outcomes
            statuses = [types_pb2.PushStatus.Name(one.status)[12:].lower() for one in outcomes]
            return statuses, answer.retried
        if call.verb == "delete":
            deletion = service_pb2.DeleteRequest(buffer=call.buffer, uids=call.uids)
            answer = ask(self._stub.Delete, deletion)
            return answer.message.num_deleted, answer.retried
        try:
            if call.verb == "seal":
                sealing = service_pb2.SealGroupRequest(buffer=call.buffer, group=key)
                return "sealed", ask(self._stub.SealGroup, sealing).retried
            dropping = service_pb2.DropGroupRequest(buffer=call.buffer, group=key, reason="no")
            answer = ask(self._stub.DropGroup, dropping)
            return answer.message.num_dropped, answer.retried
        except LostError as error:
            # Made once more after a crash: the group had been sealed, and consumed since.
            return "gone", error.retried


# --- trainers


class Trainer:
    """Samples from one buffer for one consumer, acknowledges, and now and then doesn't."""

    def __init__(
        self, stub: ExperienceBufferStub, folder: Path, name: str, buffer: str, consumer: str
    ) -> None:
        self._stub = stub
        self._buffer = buffer
        self._journal = Journal(folder / name)
        self._request = service_pb2.SampleRequest(
            buffer=buffer,
            consumer=consumer,
            batch_size=5,
            min_batch_size=1,
            timeout_seconds=0.2,
            lease_seconds=work.LEASE_SECONDS,
        )

    def run(self) -> None:
        number = acked = 0
        while True:
            batch, asked, _ = ask(self._stub.Sample, self._request)
            if not batch.experiences:
                continue
            number += 1
            lease = batch.lease.id
            items = [describe(one) for one in batch.experiences]
            self._write("leased", lease=lease, asked=asked, items=items)
            if number % 23 == 22:
                self._write("forgotten", lease=lease)
            elif number % 7 == 6:
                self._settle(self._stub.Nack, service_pb2.NackRequest, "nack", lease)
            elif self._settle(self._stub.Ack, service_pb2.AckRequest, "ack", lease):
                acked = lease
            if acked and number % 5 == 4:
                # An acknowledgement is idempotent, over any number of crashes.
                self._settle(self._stub.Ack, service_pb2.AckRequest, "reack", acked)

    def _settle(self, method: Any, request: Any, verb: str, lease: int) -> bool:
        self._write(f"{verb}ing", lease=lease)
        try:
            ask(method, request(buffer=self._buffer, lease_id=lease))
        except LostError as error:
            self._write("lost", lease=lease, verb=verb, details=str(error))
            return False
        self._write(f"{verb}ed", lease=lease)
        return True

    def _write(self, event: str, **fields: Any) -> None:
        consumer = self._request.consumer
        self._journal.write(event, buffer=self._buffer, consumer=consumer, **fields)


# --- processes


def push(address: str, folder: Path, worker: int, seed: int) -> None:
    with _stub(address) as stub:
        Pusher(stub, folder, worker, seed).run()


def train(address: str, folder: Path, name: str, *roles: str) -> None:
    """Train in several roles at once, `BUFFER:CONSUMER` or `learn`, until killed."""
    threads = []
    with _stub(address) as stub:
        for role in roles:
            buffer, _, consumer = role.partition(":")
            run: Callable[[], None]
            if consumer:
                run = Trainer(stub, folder, f"{name}-{buffer}-{consumer}", buffer, consumer).run
            else:
                run = Learner(stub, folder).run
            threads.append(threading.Thread(target=functools.partial(_or_die, run)))
            threads[-1].start()
        for thread in threads:
            thread.join()


@contextmanager
def _stub(address: str) -> Iterator[ExperienceBufferStub]:
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        yield ExperienceBufferStub(channel)


def _or_die(run: Callable[[], None]) -> None:
    """A thread's end is everybody's."""
    try:
        run()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
