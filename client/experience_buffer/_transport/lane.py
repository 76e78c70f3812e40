"""The terms of pushing over a stream that several calls share, for both clients."""

from __future__ import annotations

from typing import Final

from experience_buffer import status
from experience_buffer.errors import DeadlineExceededError, InternalServerError
from experience_buffer.v1 import service_pb2 as pb

KEEP_SECONDS: Final = 1.0
"""For which the stream stays open after a push, and within which two make it worth opening one."""
PAUSE_SECONDS: Final = 10.0
"""For which there are only calls after a stream has failed: something between here and the server may
let these pass, and no streams."""


def response_of(answer: pb.PushStreamResponse, sequence: int) -> pb.PushResponse:
    """What a server says to the push with this number.

    Raises:
        ExperienceBufferError: Nothing of it is stored, and why; or this is the answer to another one.
    """
    if answer.sequence != sequence:
        raise InternalServerError(f"push {sequence} was answered as push {answer.sequence}")
    if answer.HasField("error"):
        raise status.from_request_error(answer.error)
    return answer.response


def late_error(timeout: float) -> DeadlineExceededError:
    """Make the error of a push that took too long."""
    return DeadlineExceededError(
        f"the push has no answer after {timeout:.3g} s; {DeadlineExceededError.cure}"
    )
