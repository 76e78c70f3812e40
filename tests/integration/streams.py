"""A SampleStream spoken by hand: every message of the client, every message of the server."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from experience_buffer.v1 import service_pb2, types_pb2
from tests.integration.server import Stub


@dataclass
class Received:
    """One batch as its frames brought it."""

    frames: list[service_pb2.SampleFrame] = field(default_factory=list)

    @property
    def lease(self) -> int:
        """The id of its lease."""
        return self.frames[-1].lease.id

    @property
    def last(self) -> service_pb2.SampleFrame:
        """The frame that ended it."""
        return self.frames[-1]

    @property
    def experiences(self) -> list[types_pb2.SampledExperience]:
        """Of all frames."""
        return [one for frame in self.frames for one in frame.experiences]

    @property
    def uids(self) -> list[str]:
        """Of all frames."""
        return [one.uid for one in self.experiences]


class SpokenStream:
    """One SampleStream."""

    def __init__(self, stub: Stub) -> None:
        self._requests: queue.SimpleQueue[service_pb2.SampleStreamRequest | None] = (
            queue.SimpleQueue()
        )
        self.call = stub.SampleStream(iter(self._requests.get, None))

    def say(self, **message: Any) -> None:
        """Send one message."""
        self._requests.put(service_pb2.SampleStreamRequest(**message))

    def open(self, name: str, batch_size: int, *, credits: int = 0, **fields: Any) -> None:
        """Say what is wanted, and grant credits if there are any."""
        opening: dict[str, Any] = {"consumer": "trainer", "timeout_seconds": 20.0} | fields
        self.say(open=service_pb2.SampleStreamOpen(buffer=name, batch_size=batch_size, **opening))
        if credits:
            self.say(credits=credits)

    def next(self) -> service_pb2.SampleStreamResponse:
        """The next message."""
        return next(self.call)

    def batch(self) -> Received:
        """The next batch. Nothing else may come first."""
        received = Received()
        while not received.frames or not received.last.last:
            message = self.next()
            assert message.WhichOneof("message") == "frame", message
            received.frames.append(message.frame)
        return received

    def settle(self, **message: Any) -> types_pb2.RequestError | None:
        """Say something about a lease; what went wrong. Nothing else may come first."""
        self.say(**message)
        answer = self.next()
        assert answer.WhichOneof("message") == "lease_result", answer
        result = answer.lease_result
        return result.error if result.HasField("error") else None

    def ack(self, *ids: int, **fields: Any) -> types_pb2.RequestError | None:
        """Acknowledge leases; what went wrong with the first."""
        return self.settle(ack=service_pb2.AckLeases(ids=ids, **fields))

    def end(self) -> None:
        """Say no more."""
        self._requests.put(None)


@contextmanager
def speaking(stub: Stub) -> Iterator[SpokenStream]:
    """A stream that is cancelled in the end."""
    stream = SpokenStream(stub)
    try:
        yield stream
    finally:
        stream.call.cancel()
        stream.end()
