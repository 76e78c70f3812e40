"""The stream on which a trainer samples: batches against credits, acks and leases on the way back.

The session owns its stream. When it ends, for whatever reason, nothing of it is left behind: its
tasks are cancelled and leases that weren't acknowledged are offered again at once. Only leases that
ranks share stay: the other ranks hold them, too, and the rank gets its part when it comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

from experience_buffer import errors
from experience_buffer.status import to_request_error
from experience_buffer.v1 import service_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.state.consumers import Want
from experience_buffer_server.buffer.state.entries import MAX_NOTE
from experience_buffer_server.rpc.batch_sender import Sending
from experience_buffer_server.rpc.flow_control import (
    MAX_AHEAD,
    Ahead,
    Answers,
    Credits,
    Leased,
    Outgoing,
)
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.runtime.callers import named
from experience_buffer_server.runtime.shared_memory import SampleMemory
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.store.errors import as_client_error
from experience_buffer_server.store.interface import StoreError

_DEFAULT_TIMEOUT_SECONDS = 10.0
_MAX_IDS = 10_000
"""Leases that one message may name."""


class SampleSession:
    """One SampleStream."""

    _asked: service_pb2.SampleStreamOpen
    """The first message; like what is made by it, it is there once that has come."""
    _buffer: Buffer
    _want: Want
    _sending: Sending
    _memory: SampleMemory | None

    def __init__(
        self, backend: Backend, requests: AsyncIterator[service_pb2.SampleStreamRequest]
    ) -> None:
        self._backend = backend
        self._requests = aiter(requests)
        self._outgoing = Outgoing()
        self._credits = Credits()
        self._answers = Answers(self._outgoing.put)
        self._ahead = Ahead(self._sample, self._return_unsent)

    async def responses(self) -> AsyncIterator[bytes]:
        """Frames of batches, answers to acks, and notes while there is nothing to send.

        Each is a `SampleStreamResponse` as it goes over the wire.
        """
        opening = await self._opening()
        if opening is None:
            return
        if opening.WhichOneof("message") != "open":
            raise errors.InvalidRequestError(
                "the first message of a SampleStream must be open", subject="open"
            )
        await self._open(opening.open)
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._read()), loop.create_task(self._deliver())]
        stopping = loop.create_task(self._stop())
        try:
            async with contextlib.aclosing(self._outgoing.messages()) as messages:
                async for message in messages:
                    yield message
            ended = [task for task in tasks if task.done()]
            for error in [task.exception() for task in ended if not task.cancelled()]:
                if error is not None:
                    raise error
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            self._ahead.close()
            self._answers.close()
            self._outgoing.close()
            self._sending.close()
            if self._memory is not None:
                self._memory.close()

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

    async def _open(self, asked: service_pb2.SampleStreamOpen) -> None:
        """Find what the first message names; share memory with the client if it asks for it.

        Raises:
            ExperienceBufferError: There is no such thing, or a number is out of bounds.
        """
        self._asked = asked
        named(asked.holder, on_stream=True)
        self._buffer = buffer = self._backend.buffer(asked.buffer)
        buffer.consumer(asked.consumer)
        timeout_seconds = asked.timeout_seconds or _DEFAULT_TIMEOUT_SECONDS
        self._want = self._backend.want(
            buffer, asked, timeout_seconds=timeout_seconds, max_bytes=2**63
        )
        self._sending = Sending(self._backend, buffer, self._outgoing, self._credits, asked)
        self._memory = None
        if asked.HasField("memory"):
            self._memory = self._backend.shared_memory.for_samples(asked.memory)
        if self._memory is not None:
            await self._outgoing.put(self._memory.offer())

    async def _stop(self) -> None:
        """When the server drains no further batch is sent."""
        await self._backend.draining.wait()
        self._credits.end()

    # --- what the client says

    async def _read(self) -> None:
        """Take credits, acks, nacks and extensions until the client has nothing more to say."""
        memory = self._memory
        try:
            async for request in self._requests:
                kind = request.WhichOneof("message")
                if kind == "credits":
                    self._credits.grant(num_batches=request.credits)
                    self._ask()
                elif kind == "byte_credits":
                    self._credits.grant(num_bytes=request.byte_credits)
                    self._ask()
                elif kind == "released" and memory is not None:
                    memory.release(request.released)
                elif kind == "memory_ready" and memory is not None:
                    memory.is_ready = True
                    self._sending.share(memory)
                elif kind == "extend":
                    lease_id = request.extend.lease_id
                    await self._answers.begin(partial(self._settle, lease_id, request))
                elif kind in ("ack", "nack"):
                    lease_ids = request.ack.ids or request.nack.ids
                    if len(lease_ids) > _MAX_IDS:
                        raise errors.InvalidRequestError(
                            f"{len(lease_ids)} leases in one message, the limit is {_MAX_IDS}; split "
                            "them",
                            subject="ids",
                        )
                    for lease_id in lease_ids:
                        await self._answers.begin(partial(self._settle, lease_id, request))
                else:
                    raise errors.InvalidRequestError(
                        f"unexpected message {kind!r} on an open SampleStream", subject=kind or ""
                    )
        finally:
            await self._answers.wait()
            await self._outgoing.end()

    async def _settle(self, lease_id: int, request: service_pb2.SampleStreamRequest) -> bytes:
        """Do to a lease what a message says; the answer."""
        buffer, sending = self._buffer, self._sending
        result = service_pb2.LeaseResult(lease_id=lease_id)
        try:
            if request.HasField("extend"):
                await buffer.extend(lease_id, request.extend.lease_seconds)
            elif request.HasField("ack"):
                step = request.ack.step if request.ack.HasField("step") else None
                rank = None if sending.rank_of is None else sending.rank_of.rank
                lease = await buffer.ack(lease_id, step=step, rank=rank)
                result.num_waiting_ranks = lease.num_waiting_ranks
                sending.settled(lease_id)
            else:
                reason = request.nack.reason[:MAX_NOTE] or "nacked on its stream"
                await buffer.nack(lease_id, reason=reason)
                sending.settled(lease_id)
        except (errors.ExperienceBufferError, StoreError) as error:
            result.error.CopyFrom(to_request_error(as_client_error(error)))
        return service_pb2.SampleStreamResponse(lease_result=result).SerializeToString()

    # --- what the client gets

    async def _deliver(self) -> None:
        """Send a batch per credit until the server drains."""
        try:
            while await self._credits.wait() and not self._backend.draining.is_set():
                self._ask()
                lease, shortfall = await self._ahead.next()
                if lease is not None:
                    self._credits.take()
                    if not await self._sending.send(
                        lease, shortfall, least=self._want.min_batch_size
                    ):
                        self._credits.put_back()
                elif not self._backend.draining.is_set():
                    self._ask()  # Which says whether there is anything to wait for.
                    note = service_pb2.SampleStreamResponse(waiting=shortfall)
                    await self._outgoing.put(note.SerializeToString())
        finally:
            self._ahead.close()
            await self._outgoing.end()

    def _ask(self) -> None:
        """Ask for the next batch, and for those after it that needn't be waited for.

        Raises:
            ConsumerNotFoundError: The consumer was removed.
            BufferNotFoundError: The buffer was deleted.
        """
        ahead, consumer = self._ahead, self._buffer.consumer(self._asked.consumer)
        # What is being put together counts, too.
        most = min(self._credits.num_batches, MAX_AHEAD - self._credits.is_taken)
        if self._sending.rank_of is not None:
            # Which one is next for a rank follows from the one before.
            most = 0 if self._credits.is_taken else min(most, 1)
        while len(ahead) < most and not self._backend.draining.is_set():
            num_wanted = self._want.batch_size * (1 + len(ahead))
            if ahead and (consumer.waiters or len(consumer.ready) < num_wanted):
                return
            ahead.ask()

    def _return_unsent(self, lease: Lease) -> None:
        if not lease.world_size:  # That of ranks is also the others'.
            self._buffer.give_back([lease.id], "undeliverable")

    async def _sample(self) -> Leased:
        """A batch, or why there is none; a limit that acks relieve is a reason to wait."""
        try:
            lease, shortfall = await self._backend.sample(
                self._buffer, self._asked.consumer, self._want, self._sending.rank_of
            )
        except errors.ResourceExhaustedError as error:
            if error.retry_delay_seconds is None:
                raise
            await asyncio.sleep(error.retry_delay_seconds)
            return None, str(error)
        if lease is not None:
            self._sending.prepare(lease)
        return lease, shortfall
