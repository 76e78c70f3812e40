"""The two streaming RPCs: pipelined pushes, and batches against credits.

Each session owns its stream. When it ends, for whatever reason, nothing of it is left behind:
tasks are cancelled and leases that weren't acknowledged are offered again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from experience_buffer import errors
from experience_buffer.status import to_request_error
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server import wire
from experience_buffer_server.assembly import frames
from experience_buffer_server.backend import Backend
from experience_buffer_server.buffer import Buffer
from experience_buffer_server.delivery import Want
from experience_buffer_server.faults import as_client_error
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.store.base import StoreError

_MAX_PUSHES = 64
"""Pushes of one stream that are under way at once; beyond, the stream isn't read."""
_MAX_OUTGOING = 4
"""Messages of one stream that wait to be sent; beyond, no more is assembled."""
_DEFAULT_TIMEOUT_SECONDS = 10.0


class PushSession:
    """One PushStream: requests are taken in order, answered in order, and committed together."""

    def __init__(
        self, backend: Backend, requests: AsyncIterator[service_pb2.PushStreamRequest]
    ) -> None:
        self._backend = backend
        self._requests = requests
        self._answers: asyncio.Queue[asyncio.Task[service_pb2.PushStreamResponse] | None] = (
            asyncio.Queue(_MAX_PUSHES)
        )

    async def responses(self) -> AsyncIterator[service_pb2.PushStreamResponse]:
        """One response per request, in order, each after its commit."""
        reader = asyncio.get_running_loop().create_task(self._read())
        try:
            while (answer := await self._answers.get()) is not None:
                yield await answer
            await reader
        finally:
            reader.cancel()
            _make_room(self._answers)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        stopping = loop.create_task(self._backend.draining.wait())
        requests = aiter(self._requests)
        try:
            while not self._backend.draining.is_set():
                following = asyncio.ensure_future(anext(requests, None))
                await asyncio.wait((following, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    following.cancel()
                    break
                request = following.result()
                if request is None:
                    break
                await self._answers.put(loop.create_task(self._push(request)))
        finally:
            stopping.cancel()
            await self._answers.put(None)

    async def _push(self, request: service_pb2.PushStreamRequest) -> service_pb2.PushStreamResponse:
        response = service_pb2.PushStreamResponse(sequence=request.sequence)
        try:
            response.response.CopyFrom(await self._backend.push(request.push))
        except (errors.ExperienceBufferError, StoreError) as error:
            response.error.CopyFrom(to_request_error(as_client_error(error)))
        return response


class SampleSession:
    """One SampleStream: batches go out as long as the client has granted credits."""

    def __init__(
        self, backend: Backend, requests: AsyncIterator[service_pb2.SampleStreamRequest]
    ) -> None:
        self._backend = backend
        self._requests = aiter(requests)
        self._outgoing: asyncio.Queue[service_pb2.SampleStreamResponse | None] = asyncio.Queue(
            _MAX_OUTGOING
        )
        self._num_credits = 0
        self._granted = asyncio.Event()
        self._leases: set[int] = set()

    async def responses(self) -> AsyncIterator[service_pb2.SampleStreamResponse]:
        """Frames of batches, answers to acks, and notes while there is nothing to send."""
        opening = await self._opening()
        if opening is None:
            return
        if opening.WhichOneof("message") != "open":
            raise errors.InvalidRequestError(
                "the first message of a SampleStream must be open", subject="open"
            )
        buffer = self._backend.buffer(opening.open.buffer)
        buffer.delivery.consumer(opening.open.consumer)
        want = self._backend.want(
            buffer,
            opening.open,
            timeout_seconds=opening.open.timeout_seconds or _DEFAULT_TIMEOUT_SECONDS,
            max_bytes=2**63,
        )
        loop = asyncio.get_running_loop()
        tasks = [
            loop.create_task(self._read(buffer)),
            loop.create_task(self._deliver(buffer, opening.open.consumer, want)),
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
            _make_room(self._outgoing)
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

    async def _read(self, buffer: Buffer) -> None:
        """Take credits, acks and nacks until the client has nothing more to say."""
        try:
            async for request in self._requests:
                kind = request.WhichOneof("message")
                if kind == "credits":
                    self._num_credits += request.credits
                    self._granted.set()
                elif kind in ("ack", "nack"):
                    ids = request.ack.ids if kind == "ack" else request.nack.ids
                    for lease_id in ids:
                        await self._end_lease(buffer, lease_id, acknowledge=kind == "ack")
                else:
                    raise errors.InvalidRequestError(
                        f"unexpected message {kind!r} on an open SampleStream", subject=kind or ""
                    )
        finally:
            await self._outgoing.put(None)

    async def _end_lease(self, buffer: Buffer, lease_id: int, *, acknowledge: bool) -> None:
        result = service_pb2.LeaseResult(lease_id=lease_id)
        try:
            if acknowledge:
                await buffer.leasing.ack(lease_id)
            else:
                await buffer.leasing.nack(lease_id, reason="nacked on its stream")
            self._leases.discard(lease_id)
        except (errors.ExperienceBufferError, StoreError) as error:
            result.error.CopyFrom(to_request_error(as_client_error(error)))
        await self._outgoing.put(service_pb2.SampleStreamResponse(lease_result=result))

    async def _deliver(self, buffer: Buffer, consumer: str, want: Want) -> None:
        """Send a batch per credit until the server drains."""
        draining = self._backend.draining
        try:
            while not draining.is_set():
                if not await self._next_credit():
                    break
                lease, shortfall = None, ""
                while lease is None and not draining.is_set():
                    lease, shortfall = await self._sample(buffer, consumer, want)
                    if lease is None and not draining.is_set():
                        buffer.delivery.consumer(consumer)
                        note = service_pb2.SampleStreamResponse(waiting=shortfall)
                        await self._outgoing.put(note)
                if lease is not None:
                    self._leases.add(lease.id)
                    await self._send(buffer, lease, shortfall)
        finally:
            await self._outgoing.put(None)

    async def _sample(self, buffer: Buffer, consumer: str, want: Want) -> tuple[Lease | None, str]:
        """A batch, or why there is none; a limit that acks relieve is a reason to wait."""
        try:
            return await buffer.sample(consumer, want, self._backend.draining)
        except errors.ResourceExhaustedError as error:
            if error.retry_delay_seconds is None:
                raise
            await asyncio.sleep(error.retry_delay_seconds)
            return None, str(error)

    async def _next_credit(self) -> bool:
        """Wait for a credit and take it; False when the server drains first."""
        loop = asyncio.get_running_loop()
        while not self._num_credits:
            self._granted.clear()
            granted = loop.create_task(self._granted.wait())
            stopping = loop.create_task(self._backend.draining.wait())
            try:
                await asyncio.wait((granted, stopping), return_when=asyncio.FIRST_COMPLETED)
            finally:
                granted.cancel()
                stopping.cancel()
            if self._backend.draining.is_set():
                return False
        self._num_credits -= 1
        return True

    async def _send(self, buffer: Buffer, lease: Lease, shortfall: str) -> None:
        num_units = len(lease.units)
        parts = frames(self._backend.store, buffer, lease)
        part: list[types_pb2.SampledExperience] | None = next(parts)
        while part is not None:
            following = next(parts, None)
            frame = service_pb2.SampleFrame(
                lease=wire.lease_message(lease, time.time()), experiences=part
            )
            if following is None:
                frame.last = True
                frame.num_units = num_units
                frame.shortfall = shortfall
                if buffer.row.policy_version is not None:
                    frame.policy_version = buffer.row.policy_version
            await self._outgoing.put(service_pb2.SampleStreamResponse(frame=frame))
            part = following


def _make_room(queue: asyncio.Queue[Any]) -> None:
    """Let a cancelled task say that it ends, though nobody reads the queue any more."""
    while not queue.empty():
        queue.get_nowait()
