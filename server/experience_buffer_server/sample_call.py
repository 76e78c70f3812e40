"""One Sample call: a lease, and the response that carries its experiences."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Final

from experience_buffer import errors
from experience_buffer._sample_wire import Pieces, packed_pieces, sample_response
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server import steady_clock, wire
from experience_buffer_server.assembly import packed, pieces_of, sampled
from experience_buffer_server.backend import Backend, rank_of
from experience_buffer_server.buffer import Buffer
from experience_buffer_server.callers import caller_of
from experience_buffer_server.damage import Unreadable
from experience_buffer_server.responses import Hold
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.units import Unit

_ENVELOPE_BYTES: Final = 64 * 1024
"""Room in a response for everything but payloads."""


async def sample(
    backend: Backend,
    request: service_pb2.SampleRequest,
    *,
    timeout_seconds: float,
    until_sent: Callable[[Hold], None],
) -> bytes:
    """Lease one batch and read it.

    Units that can't be read are set aside, and the others delivered; where those are too few, a
    batch is formed anew.

    Args:
        backend: The buffers and the limits.
        request: What is asked for.
        timeout_seconds: For how long it may wait.
        until_sent: Takes what is to be released once the response is sent, or never will be.

    Returns:
        A `SampleResponse` as it goes over the wire.

    Raises:
        ResourceExhaustedError: The batch is larger than a message may be, too many calls wait, or
            too many bytes of responses wait to be sent until the timeout.
        ExperienceBufferError: As `Desk.sample`.
    """
    buffer, part = backend.buffer(request.buffer), rank_of(request)
    max_bytes = backend.limits.max_message_bytes - _ENVELOPE_BYTES
    want = backend.want(buffer, request, timeout_seconds=timeout_seconds, max_bytes=max_bytes)
    deadline = time.monotonic() + want.timeout_seconds
    while True:
        lease, shortfall = await backend.sample(buffer, request.consumer, want, part)
        response = service_pb2.SampleResponse(
            shortfall=shortfall, policy_version=buffer.row.policy_version
        )
        if lease is None:
            return response.SerializeToString()
        units = list(lease.units if part is None else lease.part(part.rank))
        unreadable = Unreadable()
        try:
            num_bytes = sum(unit.num_bytes for unit in units)
            hold = await backend.responses.wait(caller_of(), num_bytes, deadline=deadline)
            until_sent(hold)
            large = _read(backend, buffer, units, request, unreadable)
        except BaseException:
            buffer.leasing.give_back([lease.id], "undeliverable")
            raise
        if not unreadable or buffer.damage.settle(lease, unreadable, least=want.min_batch_size):
            _finish(response, lease, units, unreadable)
            return sample_response(response, large)
        hold.release()
        left = max(deadline - time.monotonic(), 0.0)
        want = dataclasses.replace(want, timeout_seconds=left)


def _finish(
    response: service_pb2.SampleResponse,
    lease: Lease,
    units: Sequence[Unit],
    unreadable: Unreadable,
) -> None:
    response.lease.CopyFrom(wire.lease_message(lease, steady_clock.now()))
    response.num_units = unreadable.left_of(units)
    response.shortfall = unreadable.explain(response.shortfall)


def _read(
    backend: Backend,
    buffer: Buffer,
    units: Sequence[Unit],
    request: service_pb2.SampleRequest,
    unreadable: Unreadable,
) -> Pieces:
    """The experiences as they go into the response, in the format that was asked for."""
    if request.format == types_pb2.SAMPLE_FORMAT_PACKED:
        pieces = packed(backend.store, buffer, units, unreadable)
        large = packed_pieces(service_pb2.SampleResponse, pieces)
    else:
        found = sampled(backend.store, buffer, units, unreadable)
        large = pieces_of(each for experiences in found for each in experiences)
    num_bytes = sum(map(len, large))
    if num_bytes > backend.limits.max_message_bytes:
        unit = buffer.delivery.consumer(request.consumer).settings.unit
        what = f"one {unit} takes" if len(units) == 1 else f"{len(units)} {unit}s take"
        raise errors.ResourceExhaustedError(
            f"{what} {num_bytes} bytes, the limit server.max_message_bytes is "
            f"{backend.limits.max_message_bytes}; use SampleStream, or raise the limit",
            subject=request.consumer,
        )
    return large
