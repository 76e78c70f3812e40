"""The load of `bench`: workers that push groups, and a trainer that takes and acknowledges them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from experience_buffer import EID, BufferConfig, Client, ConsumerConfig, Experience, trxp
from experience_buffer.errors import ExperienceBufferError

_MAX_BYTES: Final = 256 * 1024 * 1024
"""The buffer holds no more: pushes wait for the trainer then."""
_PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of one kind.

    Attributes:
        what: "push", "sample" or "ack".
        calls: How many.
        experiences_per_second: Experiences in them.
        bytes_per_second: Payload bytes in them.
        milliseconds: How long a call took: p50, p90, p99, max.
    """

    what: str
    calls: int
    experiences_per_second: float
    bytes_per_second: float
    milliseconds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured.

    Attributes:
        seconds: How long it took.
        payload_bytes: Size of an experience's payload.
        calls: By kind.
    """

    seconds: float
    payload_bytes: int
    calls: tuple[Calls, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        kinds = [{name: getattr(each, name) for name in each.__slots__} for each in self.calls]
        return {"seconds": self.seconds, "payload_bytes": self.payload_bytes, "calls": kinds}


@dataclass
class Load:
    """A load; see the options of `bench`."""

    buffer: str
    seconds: float
    tokens: int
    group_size: int
    batch: int
    workers: int

    def run(self, client: Client) -> Measured:
        """Make the buffer, and push and train for these seconds.

        Raises:
            ExperienceBufferError: A call failed; all have ended then.
        """
        trainer = ConsumerConfig("trainer", unit="group")
        client.create_buffer(
            BufferConfig(
                self.buffer,
                group_size=self.group_size,
                max_bytes=_MAX_BYTES,
                on_full="block",
                consumers=[trainer],
            )
        )
        size = len(trxp.encode(self._group(0, 0)[:1]))
        self._end = time.monotonic() + self.seconds
        self._failure: ExperienceBufferError | None = None
        push: list[float] = []
        sample: list[float] = []
        ack: list[float] = []
        threads = [
            threading.Thread(target=self._guarded, args=(self._work, client, number, push))
            for number in range(self.workers)
        ]
        threads.append(
            threading.Thread(target=self._guarded, args=(self._train, client, sample, ack))
        )
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self._end = 0.0  # Also where Ctrl-C ends it: nobody pushes to what is removed.
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure
        seconds = time.monotonic() - begin
        kinds = {"push": push, "sample": sample, "ack": ack}
        per_call = self.group_size * self.batch
        return Measured(
            seconds=seconds,
            payload_bytes=size,
            calls=tuple(
                summed(what, taken, seconds, per_call, per_call * size)
                for what, taken in kinds.items()
            ),
        )

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except ExperienceBufferError as error:
            self._failure = self._failure or error
            self._end = 0.0

    def _work(self, client: Client, worker: int, taken: list[float]) -> None:
        task = 0
        while time.monotonic() < self._end:
            groups = [self._group(worker, task + number) for number in range(self.batch)]
            pushed = [each for group in groups for each in group]
            task += self.batch
            begin = time.monotonic()
            client.push(pushed, buffer=self.buffer)
            taken.append(time.monotonic() - begin)

    def _train(self, client: Client, sampled: list[float], acked: list[float]) -> None:
        while (left := self._end - time.monotonic()) > 0:
            begin = time.monotonic()
            batch = client.sample(self.batch, buffer=self.buffer, timeout=left)
            got = time.monotonic()
            if batch.lease_id and not batch.shortfall:  # Short ones come at the end.
                batch.ack()
                sampled.append(got - begin)
                acked.append(time.monotonic() - got)

    def _group(self, worker: int, task: int) -> list[Experience]:
        return [
            Experience(
                eid=EID(batch=worker, task=task, run=run, suffix="bench"),
                prompt=[1, 2, 3, 4],
                response=range(self.tokens),
                logprobs=[-0.5] * self.tokens,
                reward=float(run % 2),
            )
            for run in range(self.group_size)
        ]


def summed(
    what: str, taken: Sequence[float], seconds: float, experiences: int, num_bytes: int
) -> Calls:
    """Sum up how long calls took.

    Args:
        what: Their kind.
        taken: Seconds of each.
        seconds: How long all of it took.
        experiences: Experiences in a call.
        num_bytes: Payload bytes in a call.
    """
    ordered = sorted(taken) or [0.0]
    last = len(ordered) - 1
    return Calls(
        what=what,
        calls=len(taken),
        experiences_per_second=len(taken) * experiences / seconds,
        bytes_per_second=len(taken) * num_bytes / seconds,
        milliseconds={
            name: ordered[math.ceil(part * len(ordered)) - 1 if part < 1 else last] * 1e3
            for name, part in _PERCENTILES.items()
        },
    )
