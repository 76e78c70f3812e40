"""Requests above the size limit, answered with a text that names the setting.

gRPC's own check knows no settings, so it is given twice the limit and only cuts off what is far
above; what lies between is read and refused here, unparsed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from experience_buffer import errors


@dataclass(frozen=True, slots=True)
class _Oversized:
    """Takes the place of a request that is too large to be parsed."""

    num_bytes: int
    limit_bytes: int


def receive_limit(max_message_bytes: int) -> int:
    """What gRPC may receive, so that this module can explain what exceeds `max_message_bytes`."""
    return 2 * max_message_bytes


def bounded(deserialize: Callable[[bytes], Any] | None, limit_bytes: int) -> Callable[[bytes], Any]:
    """A deserializer that leaves requests above the limit to `checked`; None: bytes as they are."""

    def read(data: bytes) -> Any:
        if len(data) > limit_bytes:
            return _Oversized(len(data), limit_bytes)
        return data if deserialize is None else deserialize(data)

    return read


def checked(request: Any) -> Any:
    """The request.

    Raises:
        ResourceExhaustedError: It was too large.
    """
    if isinstance(request, _Oversized):
        raise errors.ResourceExhaustedError(
            f"a message of {request.num_bytes} bytes is over the limit: server.max_message_bytes "
            f"is {request.limit_bytes}; send less at once, or raise the limit"
        )
    return request


async def all_checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The requests of a stream.

    Raises:
        ResourceExhaustedError: One was too large; the stream ends with it.
    """
    async for request in requests:
        yield checked(request)
