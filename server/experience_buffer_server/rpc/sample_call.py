"""One Sample call: a lease, and the response that carries its experiences."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from experience_buffer import errors
from experience_buffer._messages.sample_bytes import Pieces, packed_pieces, sample_response
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.state.consumers import Want
from experience_buffer_server.rpc import messages
from experience_buffer_server.rpc.batch_assembly import Unreadable, packed, pieces_of, sampled
from experience_buffer_server.rpc.gateway import Backend, rank_of
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.callers import caller_of
from experience_buffer_server.runtime.response_bytes import Hold
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
    leased: Callable[[Buffer, Lease], None],
) -> bytes:
    """Lease one batch and read it.

    Units that can't be read are set aside, and the others delivered; where those are too few, a
    batch is formed anew.

    Args:
        backend: The buffers and the limits.
        request: What is asked for.
        timeout_seconds: For how long it may wait.
        until_sent: Takes what is to be released once the response is sent, or never will be.
        leased: Is told of the lease that the response has.

    Returns:
        A `SampleResponse` as it goes over the wire.

    Raises:
        ResourceExhaustedError: The batch is larger than a message may be, too many calls wait, or
            too many bytes of responses wait to be sent until the timeout.
        ExperienceBufferError: As `Buffer.sample`.
    """
    buffer, part = backend.buffer(request.buffer), rank_of(request)
    max_bytes = backend.limits.max_message_bytes - _ENVELOPE_BYTES
    want = backend.want(buffer, request, timeout_seconds=timeout_seconds, max_bytes=max_bytes)
    deadline = time.monotonic() + want.timeout_seconds
    while True:
        answer = _Answer(
            backend=backend,
            buffer=buffer,
            request=request,
            want=want,
            deadline=deadline,
            until_sent=until_sent,
        )
        lease, shortfall = await backend.sample(
            buffer, request.consumer, want, part, prepare=answer.prepare
        )
        if answer.is_too_small:
            left = max(deadline - time.monotonic(), 0.0)
            want = replace(want, timeout_seconds=left)
        elif lease is None:
            return service_pb2.SampleResponse(
                shortfall=shortfall, policy_version=buffer.policy_version
            ).SerializeToString()
        else:
            leased(buffer, lease)
            return answer.data


@dataclass(slots=True, kw_only=True)
class _Answer:
    """A response in the making."""

    backend: Backend
    buffer: Buffer
    request: service_pb2.SampleRequest
    want: Want
    deadline: float
    """By `time.monotonic`."""
    until_sent: Callable[[Hold], None]
    data: bytes = b""
    """As it goes over the wire."""
    is_too_small: bool = False
    """Too much of the batch couldn't be read: it was given back."""

    async def prepare(self, shortfall: str, lease: Lease) -> None:
        """Read the batch; the lease may be on its way to the disk."""
        # It begins with the next turn of the event loop, and reading keeps that for long.
        await asyncio.sleep(0)
        part = rank_of(self.request)
        units = list(lease.units if part is None else lease.part(part.rank))
        num_bytes = sum(unit.num_bytes for unit in units)
        hold = await self.backend.responses.wait(
            caller_of(), num_bytes + self.buffer.fetched_bytes(units), deadline=self.deadline
        )
        self.until_sent(hold)
        unreadable = Unreadable()
        finish = partial(self._finish, shortfall, lease, units, unreadable)
        store, buffer = self.backend.store, self.buffer
        async with buffer.fetched(units):
            if self.request.format == types_pb2.SAMPLE_FORMAT_PACKED:
                packed(store, buffer, units, unreadable, finish)
            else:
                sampled(store, buffer, units, unreadable, lambda found: finish(pieces_of(found)))
        hold.keep(num_bytes)
        if self.is_too_small:
            hold.release()

    def _finish(
        self,
        shortfall: str,
        lease: Lease,
        units: Sequence[Unit],
        unreadable: Unreadable,
        large: Pieces,
    ) -> None:
        if self.request.format == types_pb2.SAMPLE_FORMAT_PACKED:
            large = packed_pieces(service_pb2.SampleResponse, large)
        least = self.want.min_batch_size
        if unreadable and not unreadable.settle(self.buffer, lease, least=least):
            self.is_too_small = True
            return
        response = service_pb2.SampleResponse(
            lease=messages.lease_message(lease, clock.now()),
            num_units=unreadable.left_of(units),
            shortfall=unreadable.explain(shortfall),
            policy_version=self.buffer.policy_version,
        )
        num_bytes = sum(map(len, large)) + response.ByteSize()
        if num_bytes > (most := self.backend.limits.max_message_bytes):
            unit = self.buffer.consumer(self.request.consumer).settings.unit
            what = f"one {unit} takes" if len(units) == 1 else f"{len(units)} {unit}s take"
            raise errors.ResourceExhaustedError(
                f"{what} {num_bytes} bytes, the limit server.max_message_bytes is {most}; use "
                "a stream, or raise the limit",
                subject=self.request.consumer,
            )
        self.data = sample_response(response, large)
