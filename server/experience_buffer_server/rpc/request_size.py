"""Requests that can't be read: above the size limit, or no messages at all.

gRPC's own check of sizes knows no settings, so it is given twice the limit and only cuts off what is
far above; what lies between is read and refused here, unparsed. What can't be parsed gRPC answers
with UNKNOWN, and logs with a traceback as if it were a bug; here it is the caller's error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from experience_buffer import errors


@dataclass(frozen=True, slots=True)
class _Oversized:
    """Takes the place of a request that is too large to be parsed."""

    num_bytes: int
    limit: str


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Takes the place of a request that is no message of its type."""

    num_bytes: int
    problem: str


def receive_limit(max_message_bytes: int) -> int:
    """What gRPC may receive, so that this module can explain what exceeds `max_message_bytes`."""
    return 2 * max_message_bytes


def bounded(
    deserialize: Callable[[bytes], Any] | None, limit_bytes: int, *, own_bytes: int = 0
) -> Callable[[bytes], Any]:
    """A deserializer that leaves what can't be read to `checked`.

    Args:
        deserialize: None: bytes as they are.
        limit_bytes: `server.max_message_bytes`.
        own_bytes: A smaller bound that the call itself has; 0: none.
    """
    limit = f"server.max_message_bytes is {limit_bytes}; send less at once, or raise the limit"
    if 0 < own_bytes < limit_bytes:
        limit_bytes = own_bytes
        limit = f"a request of this call may have {own_bytes} bytes"

    def read(data: bytes) -> Any:
        if len(data) > limit_bytes:
            return _Oversized(len(data), limit)
        try:
            return data if deserialize is None else deserialize(data)
        except DecodeError as error:
            return _Malformed(len(data), str(error))

    return read


def checked(request: Any) -> Any:
    """The request.

    Raises:
        ResourceExhaustedError: It was too large.
        InvalidRequestError: It is no message of its type.
    """
    if isinstance(request, _Oversized):
        raise errors.ResourceExhaustedError(
            f"a message of {request.num_bytes} bytes is over the limit: {request.limit}"
        )
    if isinstance(request, _Malformed):
        raise errors.InvalidRequestError(
            f"the {request.num_bytes} bytes of the request can't be read ({request.problem}); send "
            "a message of the service's contract"
        )
    return request


async def all_checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The requests of a stream.

    Raises:
        ResourceExhaustedError: One was too large; the stream ends with it.
        InvalidRequestError: One is no message of its type; the stream ends with it.
    """
    async for request in requests:
        yield checked(request)
