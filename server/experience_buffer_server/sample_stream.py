"""The stream on which a trainer samples: batches against credits, acks and leases on the way back.

The session owns its stream. When it ends, for whatever reason, nothing of it is left behind: its
tasks are cancelled and leases that weren't acknowledged are offered again at once. Only leases that
ranks share stay: the other ranks hold them, too, and the rank gets its part when it comes back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from experience_buffer import errors
from experience_buffer.packed import frames as packed_frames
from experience_buffer.status import to_request_error
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server import wire
from experience_buffer_server.assembly import FRAME_BYTES, frames, packed
from experience_buffer_server.backend import Backend, rank_of
from experience_buffer_server.buffer import Buffer
from experience_buffer_server.consumers import Want
from experience_buffer_server.credits import Credits
from experience_buffer_server.faults import as_client_error
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.sharing import RankOf
from experience_buffer_server.store.base import StoreError

_MAX_OUTGOING = 4
"""Messages of one stream that wait to be sent; beyond, no more is assembled."""
_DEFAULT_TIMEOUT_SECONDS = 10.0


class SampleSession:
    """One SampleStream."""

    def __init__(
        self, backend: Backend, requests: AsyncIterator[service_pb2.SampleStreamRequest]
    ) -> None:
        self._backend = backend
        self._requests = aiter(requests)
        self._outgoing: asyncio.Queue[service_pb2.SampleStreamResponse | None] = asyncio.Queue(
            _MAX_OUTGOING
        )
        self._credits = Credits()
        self._leases: set[int] = set()
        """Open leases that end with the stream."""
        self._rank_of: RankOf | None = None
        self._packed = False

    async def responses(self) -> AsyncIterator[service_pb2.SampleStreamResponse]:
        """Frames of batches, answers to acks, and notes while there is nothing to send."""
        opening = await self._opening()
        if opening is None:
            return
        if opening.WhichOneof("message") != "open":
            raise errors.InvalidRequestError(
                "the first message of a SampleStream must be open", subject="open"
            )
        asked = opening.open
        buffer = self._backend.buffer(asked.buffer)
        buffer.delivery.consumer(asked.consumer)
        timeout_seconds = asked.timeout_seconds or _DEFAULT_TIMEOUT_SECONDS
        want = self._backend.want(buffer, asked, timeout_seconds=timeout_seconds, max_bytes=2**63)
        self._rank_of = rank_of(asked)
        self._packed = asked.format == types_pb2.SAMPLE_FORMAT_PACKED
        loop = asyncio.get_running_loop()
        tasks = [
            loop.create_task(self._read(buffer)),
            loop.create_task(self._deliver(buffer, asked.consumer, want)),
        ]
        try:
            while (message := await self._outgoing.get()) is not None:
                yield message
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            while not self._outgoing.empty():
                # A cancelled task says that it ends, though nobody reads any more: it needs room.
                self._outgoing.get_nowait()
            buffer.leasing.give_back(self._leases, "stream_closed")

    async def _opening(self) -> service_pb2.SampleStreamRequest | None:
        """The first message; None when the stream ends or the server drains before it."""
        loop = asyncio.get_running_loop()
        first = asyncio.ensure_future(anext(self._requests, None))
        stopping = loop.create_task(self._backend.draining.wait())
        try:
            await asyncio.wait((first, stopping), return_when=asyncio.FIRST_COMPLETED)
            return first.result() if first.done() else None
        finally:
            first.cancel()
            stopping.cancel()

    # --- what the client says

    async def _read(self, buffer: Buffer) -> None:
        """Take credits, acks, nacks and extensions until the client has nothing more to say."""
        try:
            async for request in self._requests:
                kind = request.WhichOneof("message")
                if kind == "credits":
                    self._credits.grant(num_batches=request.credits)
                elif kind == "byte_credits":
                    self._credits.grant(num_bytes=request.byte_credits)
                elif kind == "extend":
                    await self._settle(buffer, request.extend.lease_id, request)
                elif kind in ("ack", "nack"):
                    for lease_id in request.ack.ids if kind == "ack" else request.nack.ids:
                        await self._settle(buffer, lease_id, request)
                else:
                    raise errors.InvalidRequestError(
                        f"unexpected message {kind!r} on an open SampleStream", subject=kind or ""
                    )
        finally:
            await self._outgoing.put(None)

    async def _settle(
        self, buffer: Buffer, lease_id: int, request: service_pb2.SampleStreamRequest
    ) -> None:
        """Do to a lease what a message says, and answer."""
        result = service_pb2.LeaseResult(lease_id=lease_id)
        try:
            if request.HasField("extend"):
                seconds = self._backend.lease_seconds(buffer, request.extend.lease_seconds)
                await buffer.leasing.extend(lease_id, seconds)
            elif request.HasField("ack"):
                step = request.ack.step if request.ack.HasField("step") else None
                rank = None if self._rank_of is None else self._rank_of.rank
                lease = await buffer.desk.ack(lease_id, step=step, rank=rank)
                result.num_waiting_ranks = lease.num_waiting_ranks
                self._leases.discard(lease_id)
            else:
                reason = request.nack.reason or "nacked on its stream"
                await buffer.leasing.nack(lease_id, reason=reason)
                self._leases.discard(lease_id)
        except (errors.ExperienceBufferError, StoreError) as error:
            result.error.CopyFrom(to_request_error(as_client_error(error)))
        await self._outgoing.put(service_pb2.SampleStreamResponse(lease_result=result))

    # --- what the client gets

    async def _deliver(self, buffer: Buffer, consumer: str, want: Want) -> None:
        """Send a batch per credit until the server drains."""
        draining = self._backend.draining
        try:
            while await self._credits.take(draining):
                lease, shortfall = None, ""
                while lease is None and not draining.is_set():
                    lease, shortfall = await self._sample(buffer, consumer, want)
                    if lease is None and not draining.is_set():
                        buffer.delivery.consumer(consumer)
                        note = service_pb2.SampleStreamResponse(waiting=shortfall)
                        await self._outgoing.put(note)
                if lease is not None:
                    await self._send_or_return(buffer, lease, shortfall)
        finally:
            await self._outgoing.put(None)

    async def _sample(self, buffer: Buffer, consumer: str, want: Want) -> tuple[Lease | None, str]:
        """A batch, or why there is none; a limit that acks relieve is a reason to wait."""
        try:
            return await buffer.desk.sample(
                consumer, want, self._backend.draining, rank_of=self._rank_of
            )
        except errors.ResourceExhaustedError as error:
            if error.retry_delay_seconds is None:
                raise
            await asyncio.sleep(error.retry_delay_seconds)
            return None, str(error)

    async def _send_or_return(self, buffer: Buffer, lease: Lease, shortfall: str) -> None:
        try:
            await self._send(buffer, lease, shortfall)
        except (errors.ExperienceBufferError, StoreError):
            # With the stream its leases end, and those count as deliveries.
            buffer.leasing.give_back([lease.id], "undeliverable")
            raise

    async def _send(self, buffer: Buffer, lease: Lease, shortfall: str) -> None:
        if self._rank_of is None:
            self._leases.add(lease.id)
            units = list(lease.units)
        else:
            self._rank_of = dataclasses.replace(self._rank_of, after_lease_id=lease.id)
            units = lease.part(self._rank_of.rank)
        num_bytes = sum(unit.num_bytes for unit in units)
        self._credits.spend(num_bytes)
        parts = self._parts(buffer, units)
        part: service_pb2.SampleFrame | None = next(parts)
        while part is not None:
            following = next(parts, None)
            part.lease.CopyFrom(wire.lease_message(lease, time.time()))
            if following is None:
                part.last = True
                part.num_units = len(units)
                part.shortfall = shortfall
                part.batch_bytes = num_bytes
                if buffer.row.policy_version is not None:
                    part.policy_version = buffer.row.policy_version
            await self._outgoing.put(service_pb2.SampleStreamResponse(frame=part))
            part = following

    def _parts(self, buffer: Buffer, units: Sequence[Unit]) -> Iterator[service_pb2.SampleFrame]:
        """The batch in frames of bounded size, at least one."""
        store = self._backend.store
        if not self._packed:
            for experiences in frames(store, buffer, units):
                yield service_pb2.SampleFrame(experiences=experiences)
            return
        for data in packed_frames(packed(store, buffer, units), frame_bytes=FRAME_BYTES):
            yield service_pb2.SampleFrame(packed=data)
