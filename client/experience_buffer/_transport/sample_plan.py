"""What both sample streams say and hear: requests, and batches put together from frames. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from experience_buffer import status
from experience_buffer._arguments import check_whole
from experience_buffer._codec import memory
from experience_buffer._messages import convert, sample_bytes, shared_memory
from experience_buffer._messages.calls import build
from experience_buffer._messages.delivery_calls import given, holder_of, rank_of
from experience_buffer._messages.names import FORMAT
from experience_buffer._transport.retry import is_retryable
from experience_buffer._transport.settings import bounded_seconds
from experience_buffer.consumer_options import SampleFormat
from experience_buffer.errors import DeadlineExceededError
from experience_buffer.options import ClientOptions
from experience_buffer.v1 import service_pb2, types_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """What a sample stream asks for; the same again after every reconnection."""

    batch_size: int
    buffer: str
    consumer: str
    prefetch: int
    """Batches that the server may send ahead."""
    max_bytes: int
    """Payload bytes that the server may send ahead; 0: any."""
    min_batch_size: int
    timeout_seconds: float
    first_timeout: float | None
    """Seconds for which the first batch is waited for; None: without end."""
    lease_seconds: float
    rank: int | None
    """Whose parts of shared batches this wants; None: batches of its own."""
    world_size: int | None
    format: SampleFormat
    options: ClientOptions
    """The client's."""

    def __post_init__(self) -> None:
        check_whole("prefetch", self.prefetch, least=1, most=2**32 - 1)
        check_whole("max_bytes", self.max_bytes)
        if self.first_timeout is not None:
            first = bounded_seconds(self.first_timeout, "first_timeout")
            object.__setattr__(self, "first_timeout", first)
        self.opening(after_lease_id=0)

    def opening(self, *, after_lease_id: int) -> list[service_pb2.SampleStreamRequest]:
        """The first messages of a stream.

        Args:
            after_lease_id: Of shared batches, the last one whose part was taken; 0: the oldest one
                that isn't acknowledged is wanted.

        Raises:
            InvalidRequestError: A value is malformed.
        """
        opened = build(
            service_pb2.SampleStreamOpen,
            buffer=self.buffer,
            consumer=self.consumer,
            batch_size=self.batch_size,
            min_batch_size=self.min_batch_size,
            timeout_seconds=self.timeout_seconds,
            lease_seconds=self.lease_seconds,
            format=FORMAT.number(self.format, "format"),
            read_ahead=self.prefetch,
            holder=holder_of(self.options),
            **given(rank_of=rank_of(self.rank, self.world_size, after_lease_id)),
        )
        if self.options.shared_memory and (machine := shared_memory.machine()):
            opened.memory.machine = machine
        return [
            service_pb2.SampleStreamRequest(open=opened),
            *self.credits(self.prefetch, self.max_bytes),
        ]

    def credits(self, num_batches: int, num_bytes: int) -> list[service_pb2.SampleStreamRequest]:
        """The messages that let the server send more, bytes first: a batch may follow at once."""
        granted = [build(service_pb2.SampleStreamRequest, credits=num_batches)]
        if self.max_bytes and num_bytes:
            granted.insert(0, service_pb2.SampleStreamRequest(byte_credits=num_bytes))
        return granted

    @property
    def returns_leases(self) -> bool:
        """Whether what was read ahead is given back when the stream breaks.

        Shared leases aren't: other ranks may have acknowledged their parts, and this one gets its
        part again.
        """
        return self.rank is None


def ack(lease_id: int, step: int | None) -> service_pb2.SampleStreamRequest:
    """The message that acknowledges a lease.

    Raises:
        InvalidRequestError: The step is malformed.
    """
    leases = build(service_pb2.AckLeases, ids=[lease_id], **given(step=step))
    return service_pb2.SampleStreamRequest(ack=leases)


ASK_SECONDS: Final = 1.0
"""How long asking for what is waited for may take, once the first batch is overdue."""
RETURN_SECONDS: Final = 1.0
"""How long one attempt to give back the leases of a broken stream may take."""
RETURN_REASON: Final = "read ahead on a stream that broke"


def check_result(result: service_pb2.LeaseResult) -> int | None:
    """How many ranks haven't acknowledged yet; None: ask again.

    Raises:
        ExperienceBufferError: The lease did not end as asked.
    """
    if not result.HasField("error"):
        return result.num_waiting_ranks
    error = status.from_request_error(result.error)
    if not is_retryable(error, idempotent=True):
        raise error
    return None


def no_first_batch(plan: StreamPlan, waiting: str) -> DeadlineExceededError:
    """Make the error of a stream whose first batch didn't come in time."""
    return DeadlineExceededError(
        f"no first batch of {plan.batch_size} for consumer {plan.consumer!r} of buffer "
        f"{plan.buffer!r} in first_timeout = {plan.first_timeout} s: "
        f"{waiting or 'the server said nothing of what it waits for'}; go on waiting with the "
        "next call, give first_timeout more time, or smaller batches",
        subject=plan.buffer,
    )


class FrameAssembler:
    """Collects the frames of one stream until a batch is complete.

    Args:
        plan: Names the buffer and the consumer.
    """

    def __init__(self, plan: StreamPlan) -> None:
        self._plan = plan
        self._experiences: list[types_pb2.SampledExperience] = []
        self._payloads: list[bytes | memoryview] = []
        self._packed: list[bytes | memoryview] = []
        self._partial_lease = 0

    @property
    def partial_leases(self) -> list[int]:
        """The lease of the batch that is not complete yet, if there is one."""
        return [self._partial_lease] if self._partial_lease else []

    def add(
        self,
        received: sample_bytes.Received[service_pb2.SampleStreamResponse],
        *,
        received_time: float,
    ) -> dict[str, Any] | None:
        """Add a frame; the fields of the batch that it completes, if it does."""
        frame = received.message.frame
        self._experiences.extend(frame.experiences)
        self._payloads += received.payloads
        if received.packed:
            self._packed.append(received.packed)
        self._partial_lease = frame.lease.id
        if not frame.last:
            return None
        fields = convert.batch_fields(
            self._experiences,
            frame.lease if frame.HasField("lease") else None,
            frame,
            payloads=self._payloads,
            # Writable, and nothing else refers to it: its tensors are views on it.
            packed=memory.joined(self._packed),
            num_bytes=frame.batch_bytes,
            received_time=received_time,
        )
        self._experiences, self._payloads, self._packed, self._partial_lease = [], [], [], 0
        place = {"buffer": self._plan.buffer, "consumer": self._plan.consumer}
        return {**place, "rank": self._plan.rank, **fields}
