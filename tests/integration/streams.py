"""A SampleStream spoken by hand: every message of the client, every message of the server."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import Message

from experience_buffer.v1 import service_pb2, types_pb2
from tests.integration.server import Stub

S = TypeVar("S", bound="Spoken")


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


class Spoken:
    """A stream whose messages are sent one by one, when the test says so."""

    def __init__(self, method: Any) -> None:
        self._requests: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.call = method(iter(self._requests.get, None))

    def send(self, message: Message) -> None:
        """Send one message."""
        self._requests.put(message)

    def end(self) -> None:
        """Say no more."""
        self._requests.put(None)


class SpokenStream(Spoken):
    """One SampleStream."""

    def say(self, **message: Any) -> None:
        """Send one message."""
        self.send(service_pb2.SampleStreamRequest(**message))

    def open(self, name: str, batch_size: int, *, credits: int = 0, **fields: Any) -> None:
        """Say what is wanted, and grant credits if there are any."""
        opening: dict[str, Any] = {"consumer": "trainer", "timeout_seconds": 20.0} | fields
        self.say(open=service_pb2.SampleStreamOpen(buffer=name, batch_size=batch_size, **opening))
        if credits:
            self.say(credits=credits)

    def next(self) -> service_pb2.SampleStreamResponse:
        """The next message."""
        found: service_pb2.SampleStreamResponse = next(self.call)
        return found

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


@contextmanager
def ending(stream: S) -> Iterator[S]:
    """A stream that is cancelled in the end."""
    try:
        yield stream
    finally:
        stream.call.cancel()
        stream.end()


def speaking(stub: Stub) -> AbstractContextManager[SpokenStream]:
    """A sample stream that is cancelled in the end."""
    return ending(SpokenStream(stub.SampleStream))
