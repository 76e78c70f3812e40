"""The stream on which a trainer samples: batches against credits, acks and leases on the way back.

The session owns its stream. When it ends, for whatever reason, nothing of it is left behind: its
tasks are cancelled and leases that weren't acknowledged are offered again at once. Only leases that
ranks share stay: the other ranks hold them, too, and the rank gets its part when it comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from experience_buffer import errors
from experience_buffer._sample_wire import Pieces, frame_response
from experience_buffer.status import to_request_error
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server import steady_clock, wire
from experience_buffer_server.admission import MAX_NOTE
from experience_buffer_server.ahead import MAX_AHEAD, Ahead, Answers
from experience_buffer_server.assembly import frames, pieces_of
from experience_buffer_server.backend import Backend, rank_of
from experience_buffer_server.buffer import Buffer
from experience_buffer_server.callers import caller_of
from experience_buffer_server.consumers import Want
from experience_buffer_server.credits import Credits
from experience_buffer_server.damage import Unreadable
from experience_buffer_server.faults import as_client_error
from experience_buffer_server.outgoing import MAX_BYTES, Outgoing
from experience_buffer_server.prefetching import Prefetches, fetched_bytes, fetched_units
from experience_buffer_server.responses import Hold
from experience_buffer_server.sample_frames import finish, packed_messages
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.sharing import RankOf
from experience_buffer_server.store.base import StoreError

_DEFAULT_TIMEOUT_SECONDS = 10.0
_MAX_IDS = 10_000
"""Leases that one message may name."""


class SampleSession:
    """One SampleStream."""

    def __init__(
        self, backend: Backend, requests: AsyncIterator[service_pb2.SampleStreamRequest]
    ) -> None:
        self._backend = backend
        self._requests = aiter(requests)
        self._outgoing = Outgoing()
        self._credits = Credits()
        self._leases: set[int] = set()
        """Open leases that end with the stream."""
        self._prefetches = Prefetches(backend.store)
        self._rank_of: RankOf | None = None
        self._packed = False
        # The rest is for what travels with payloads.
        self._max_frame_bytes = backend.limits.max_message_bytes // 2
        self._answers = Answers(self._outgoing.put)

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
        asked = opening.open
        buffer = self._backend.buffer(asked.buffer)
        buffer.delivery.consumer(asked.consumer)
        timeout_seconds = asked.timeout_seconds or _DEFAULT_TIMEOUT_SECONDS
        want = self._backend.want(buffer, asked, timeout_seconds=timeout_seconds, max_bytes=2**63)
        self._rank_of = rank_of(asked)
        self._packed = asked.format == types_pb2.SAMPLE_FORMAT_PACKED
        loop = asyncio.get_running_loop()
        ahead = Ahead(
            partial(self._sample, buffer, asked.consumer, want),
            partial(self._return_unsent, buffer),
        )
        ask = partial(self._ask, ahead, buffer, asked.consumer, want)
        tasks = [
            loop.create_task(self._read(buffer, ask)),
            loop.create_task(self._deliver(buffer, want, ahead, ask)),
        ]
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
            ahead.close()
            self._answers.close()
            self._outgoing.close()
            self._prefetches.close()
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

    async def _stop(self) -> None:
        """When the server drains no further batch is sent."""
        await self._backend.draining.wait()
        self._credits.end()

    # --- what the client says

    async def _read(self, buffer: Buffer, ask: Callable[[], None]) -> None:
        """Take credits, acks, nacks and extensions until the client has nothing more to say."""
        try:
            async for request in self._requests:
                kind = request.WhichOneof("message")
                if kind == "credits":
                    self._credits.grant(num_batches=request.credits)
                    ask()
                elif kind == "byte_credits":
                    self._credits.grant(num_bytes=request.byte_credits)
                    ask()
                elif kind == "extend":
                    lease_id = request.extend.lease_id
                    await self._answers.begin(partial(self._settle, buffer, lease_id, request))
                elif kind in ("ack", "nack"):
                    for lease_id in _checked(request.ack.ids or request.nack.ids):
                        await self._answers.begin(partial(self._settle, buffer, lease_id, request))
                else:
                    raise errors.InvalidRequestError(
                        f"unexpected message {kind!r} on an open SampleStream", subject=kind or ""
                    )
        finally:
            await self._answers.wait()
            await self._outgoing.end()

    async def _settle(
        self, buffer: Buffer, lease_id: int, request: service_pb2.SampleStreamRequest
    ) -> bytes:
        """Do to a lease what a message says; the answer."""
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
                reason = request.nack.reason[:MAX_NOTE] or "nacked on its stream"
                await buffer.leasing.nack(lease_id, reason=reason)
                self._leases.discard(lease_id)
        except (errors.ExperienceBufferError, StoreError) as error:
            result.error.CopyFrom(to_request_error(as_client_error(error)))
        return service_pb2.SampleStreamResponse(lease_result=result).SerializeToString()

    # --- what the client gets

    async def _deliver(
        self, buffer: Buffer, want: Want, ahead: Ahead, ask: Callable[[], None]
    ) -> None:
        """Send a batch per credit until the server drains."""
        try:
            while await self._credits.wait() and not self._backend.draining.is_set():
                ask()
                lease, shortfall = await ahead.next()
                if lease is not None:
                    self._credits.take()
                    if not await self._send_or_return(buffer, lease, shortfall, want):
                        self._credits.put_back()
                elif not self._backend.draining.is_set():
                    ask()  # Which says whether there is anything to wait for.
                    note = service_pb2.SampleStreamResponse(waiting=shortfall)
                    await self._outgoing.put(note.SerializeToString())
        finally:
            ahead.close()
            await self._outgoing.end()

    def _ask(self, ahead: Ahead, buffer: Buffer, consumer_name: str, want: Want) -> None:
        """Ask for the next batch, and for those after it that needn't be waited for.

        Raises:
            ConsumerNotFoundError: The consumer was removed.
        """
        consumer = buffer.delivery.consumer(consumer_name)
        # What is being put together counts, too.
        most = min(self._credits.num_batches, MAX_AHEAD - self._credits.is_taken)
        if self._rank_of is not None:
            # Which one is next for a rank follows from the one before.
            most = 0 if self._credits.is_taken else min(most, 1)
        while len(ahead) < most and not self._backend.draining.is_set():
            num_wanted = want.batch_size * (1 + len(ahead))
            if ahead and (consumer.waiters or len(consumer.ready) < num_wanted):
                return
            ahead.ask()

    @staticmethod
    def _return_unsent(buffer: Buffer, lease: Lease) -> None:
        if not lease.world_size:  # That of ranks is also the others'.
            buffer.leasing.give_back([lease.id], "undeliverable")

    async def _sample(self, buffer: Buffer, consumer: str, want: Want) -> tuple[Lease | None, str]:
        """A batch, or why there is none; a limit that acks relieve is a reason to wait."""
        try:
            lease, shortfall = await self._backend.sample(buffer, consumer, want, self._rank_of)
        except errors.ResourceExhaustedError as error:
            if error.retry_delay_seconds is None:
                raise
            await asyncio.sleep(error.retry_delay_seconds)
            return None, str(error)
        if lease is not None:
            units = self._units_of(lease)
            self._prefetches.begin(lease.id, buffer.id, buffer.contents, units)
        return lease, shortfall

    def _units_of(self, lease: Lease) -> list[Unit]:
        """What of a lease this stream gets."""
        return list(lease.units) if self._rank_of is None else lease.part(self._rank_of.rank)

    async def _send_or_return(
        self, buffer: Buffer, lease: Lease, shortfall: str, want: Want
    ) -> bool:
        try:
            return await self._send(buffer, lease, shortfall, least=want.min_batch_size)
        except (errors.ExperienceBufferError, StoreError):
            # With the stream its leases end, and those count as deliveries.
            buffer.leasing.give_back([lease.id], "undeliverable")
            raise
        finally:
            self._prefetches.end(lease.id)

    async def _send(self, buffer: Buffer, lease: Lease, shortfall: str, *, least: int) -> bool:
        """Send a batch without its units that can't be read.

        Returns:
            False if these are too many of it, or if it was returned while it waited to be sent.
        """
        rank_of = self._rank_of
        if rank_of is None:
            self._leases.add(lease.id)
        else:
            self._rank_of = dataclasses.replace(rank_of, after_lease_id=lease.id)
        await self._outgoing.room()
        units = self._units_of(lease)
        hold = await self._backend.responses.wait(caller_of(), self._held_bytes(buffer, units))
        is_sent = False
        try:
            if lease.state != "open":
                self._leases.discard(lease.id)
                return False
            send = self._send_packed if self._packed else self._send_parts
            is_sent = await send(buffer, lease, units, shortfall, least, hold)
        finally:
            if not is_sent:
                hold.release()
        return is_sent

    async def _send_packed(
        self,
        buffer: Buffer,
        lease: Lease,
        units: Sequence[Unit],
        shortfall: str,
        least: int,
        hold: Hold,
    ) -> bool:
        """Send a packed batch, all of which is read before anything of it is sent."""
        store = self._backend.store
        most = self._max_frame_bytes
        async with fetched_units(store, buffer.id, buffer.contents, units):
            if lease.state != "open":
                self._leases.discard(lease.id)
                return False
            messages = packed_messages(
                store, buffer, lease, units, shortfall, least=least, max_bytes=most
            )
        if not messages:
            self._leases.discard(lease.id)
            return False
        self._credits.spend(sum(unit.num_bytes for unit in units))
        messages.reverse()
        while messages:
            await self._outgoing.room()
            message = messages.pop()
            await self._outgoing.put(message, last_of=None if messages else hold)
        return True

    async def _send_parts(
        self,
        buffer: Buffer,
        lease: Lease,
        units: Sequence[Unit],
        shortfall: str,
        least: int,
        hold: Hold,
    ) -> bool:
        """Send a batch of payloads, which are read while others are sent."""
        unreadable, is_begun, is_settled = Unreadable(), False, False
        store, most = self._backend.store, self._max_frame_bytes
        parts = frames(store, buffer, units, unreadable, max_bytes=most)
        part: Pieces | None = pieces_of(await anext(parts))
        if lease.state != "open":
            self._leases.discard(lease.id)
            return False
        while part is not None:
            await self._outgoing.room()
            read = await anext(parts, None)
            following = None if read is None else pieces_of(read)
            del read
            if unreadable and not is_settled and following is None:
                # What has been sent can't be taken back: the rest follows, however small.
                enough = 0 if is_begun else least
                if not buffer.damage.settle(lease, unreadable, least=enough):
                    self._leases.discard(lease.id)
                    return False
                is_settled = True
            if not is_begun:
                self._credits.spend(sum(unit.num_bytes for unit in units))
                is_begun = True
            frame = service_pb2.SampleFrame(lease=wire.lease_message(lease, steady_clock.now()))
            if following is None:
                finish(frame, buffer, units, unreadable, shortfall)
            message = frame_response(frame, part)
            await self._outgoing.put(message, last_of=hold if following is None else None)
            del message
            part = following
        return True

    def _held_bytes(self, buffer: Buffer, units: Sequence[Unit]) -> int:
        """Of a batch, what is in memory at once while it is being sent."""
        num_bytes = sum(unit.num_bytes for unit in units)
        if self._packed:
            return num_bytes + fetched_bytes(buffer.contents, units)
        # A unit is read as a whole, and its experiences are copied into frames. A rank may get none.
        return min(num_bytes, MAX_BYTES + 2 * max((unit.num_bytes for unit in units), default=0))


def _checked(lease_ids: Sequence[int]) -> Sequence[int]:
    """The leases that a message names.

    Raises:
        InvalidRequestError: There are too many.
    """
    if len(lease_ids) > _MAX_IDS:
        raise errors.InvalidRequestError(
            f"{len(lease_ids)} leases in one message, the limit is {_MAX_IDS}; split them",
            subject="ids",
        )
    return lease_ids
