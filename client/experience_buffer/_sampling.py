"""What both sample streams say and hear: requests, and batches put together from frames. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from experience_buffer import _convert, status
from experience_buffer._calls import build
from experience_buffer._retry import is_retryable
from experience_buffer.errors import DeadlineExceededError, InvalidRequestError
from experience_buffer.v1 import service_pb2, types_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """What a sample stream asks for; the same again after every reconnection."""

    batch_size: int
    buffer: str
    consumer: str
    prefetch: int
    """Batches that the server may send ahead."""
    min_batch_size: int
    timeout_seconds: float
    lease_seconds: float

    def __post_init__(self) -> None:
        if self.prefetch < 1:
            raise InvalidRequestError(
                f"prefetch is {self.prefetch}; give at least 1", subject="prefetch"
            )

    def opening(self) -> list[service_pb2.SampleStreamRequest]:
        """The first messages of a stream."""
        opened = build(
            service_pb2.SampleStreamOpen,
            buffer=self.buffer,
            consumer=self.consumer,
            batch_size=self.batch_size,
            min_batch_size=self.min_batch_size,
            timeout_seconds=self.timeout_seconds,
            lease_seconds=self.lease_seconds,
        )
        return [service_pb2.SampleStreamRequest(open=opened), credit(self.prefetch)]


def credit(num_batches: int) -> service_pb2.SampleStreamRequest:
    """The message that lets the server send more batches."""
    return service_pb2.SampleStreamRequest(credits=num_batches)


def ack(lease_id: int) -> service_pb2.SampleStreamRequest:
    """The message that acknowledges a lease."""
    return service_pb2.SampleStreamRequest(ack=service_pb2.LeaseIds(ids=[lease_id]))


RETURN_SECONDS: Final = 1.0
"""How long one attempt to give back the leases of a broken stream may take."""
RETURN_REASON: Final = "read ahead on a stream that broke"


def unanswered_ack(lease_id: int, seconds: float) -> DeadlineExceededError:
    """Make the error of an ack that the stream didn't answer in time."""
    return DeadlineExceededError(
        f"no answer to the ack of lease {lease_id} in {seconds} s; ack it again",
        subject=str(lease_id),
    )


def check_result(result: service_pb2.LeaseResult) -> bool:
    """Whether the ack is done; False: ask again.

    Raises:
        ExperienceBufferError: The lease did not end as asked.
    """
    if not result.HasField("error"):
        return True
    error = status.from_request_error(result.error)
    if not is_retryable(error, idempotent=True):
        raise error
    return False


class FrameAssembler:
    """Collects the frames of one stream until a batch is complete.

    Args:
        plan: Names the buffer and the consumer.
    """

    def __init__(self, plan: StreamPlan) -> None:
        self._plan = plan
        self._experiences: list[types_pb2.SampledExperience] = []
        self._lease_id = 0

    @property
    def partial_leases(self) -> list[int]:
        """The lease of the batch that is not complete yet, if there is one."""
        return [self._lease_id] if self._experiences else []

    def add(self, frame: service_pb2.SampleFrame, *, received_time: float) -> dict[str, Any] | None:
        """Add a frame; the fields of the batch that it completes, if it does."""
        self._experiences.extend(frame.experiences)
        self._lease_id = frame.lease.id
        if not frame.last:
            return None
        lease = frame.lease if frame.HasField("lease") else None
        fields = _convert.batch_fields(self._experiences, lease, frame, received_time=received_time)
        self._experiences = []
        return {"buffer": self._plan.buffer, "consumer": self._plan.consumer, **fields}
