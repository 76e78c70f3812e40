"""Sending a stream's batches: each is read, put together and put on its way, with what it holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from experience_buffer import errors
from experience_buffer._messages.sample_bytes import (
    Pieces,
    frame_pieces,
    frame_response,
    packed_pieces,
)
from experience_buffer.packed import cut
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.rpc import messages as wire
from experience_buffer_server.rpc.batch_assembly import (
    Sampled,
    Unreadable,
    packed,
    pieces_of,
    sampled,
)
from experience_buffer_server.rpc.flow_control import (
    FRAME_BYTES,
    MAX_BYTES,
    SHARED_PART_BYTES,
    Credits,
    Outgoing,
)
from experience_buffer_server.rpc.gateway import Backend, rank_of
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.callers import caller_of
from experience_buffer_server.runtime.response_bytes import Hold
from experience_buffer_server.runtime.shared_memory import SampleMemory
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import StoreError

_SPARE_LEASES = 64
"""Leases that may be noted beyond twice those that are open."""
_T = TypeVar("_T")


class SampledBatch(NamedTuple):
    """A batch that is being sent."""

    lease: Lease
    units: Sequence[Unit]
    """What of the lease is sent, in the batch's order."""
    shortfall: str
    """Why they are fewer than were asked for."""
    least: int
    """The fewest units worth sending."""
    unreadable: Unreadable
    """What of it can't be read, so far."""


class Sending:
    """Sends the batches of one stream. Belongs to its event loop.

    Args:
        backend: The store and the limits.
        buffer: Whose experiences they are.
        outgoing: Takes the messages.
        credits: Says what is spent.
        asked: In which format it wants them, and which part of each if it doesn't get all of it.
    """

    def __init__(
        self,
        backend: Backend,
        buffer: Buffer,
        outgoing: Outgoing,
        credits: Credits,
        asked: service_pb2.SampleStreamOpen,
    ) -> None:
        self._backend = backend
        self._buffer = buffer
        self._outgoing = outgoing
        self._credits = credits
        self.rank_of = rank_of(asked)
        """Which batch comes next follows from the one that was sent last."""
        self._packed = asked.format == types_pb2.SAMPLE_FORMAT_PACKED
        self._memory: SampleMemory | None = None
        self._read_ahead = asked.read_ahead
        """Batches that the client reads ahead of whoever uses them; 0: that isn't known."""
        self._leases: dict[int, int] = {}
        """Open leases of which something was sent, and which end with the stream; with their numbers
        in the order of sending. Some have ended by a call."""
        self._num_begun = 0
        self._clear_at = _SPARE_LEASES
        self._prefetches = buffer.prefetches()
        # The rest is for what travels with payloads.
        self._max_frame_bytes = backend.limits.max_message_bytes // 2

    def share(self, memory: SampleMemory) -> None:
        """Put batches into memory that the client has, too, as far as there is room in it."""
        self._memory = memory

    def prepare(self, lease: Lease) -> None:
        """Begin to read what of a lease has to be had from the disk; `send` or `close` follows."""
        self._prefetches.begin(lease.id, self._units_of(lease))

    def settled(self, lease_id: int) -> None:
        """A lease was acknowledged or returned."""
        self._leases.pop(lease_id, None)

    def _note(self, lease: Lease) -> None:
        """It ends with the stream, unless it has ended; those that calls have ended are cleared."""
        if self.rank_of is not None:
            return
        if len(self._leases) >= self._clear_at:
            open_ones = [key for key in self._leases if self._buffer.is_open(key)]
            self._leases = {key: self._leases[key] for key in open_ones}
            self._clear_at = 2 * len(self._leases) + _SPARE_LEASES
        self._leases[lease.id] = self._num_begun
        self._num_begun += 1

    def close(self) -> None:
        """Nothing more is sent; leases that weren't settled are offered again. Idempotent."""
        self._prefetches.close()
        num_taken = self._num_taken()
        for lease_id, number in self._leases.items():
            was_seen = number < num_taken and not self._backend.draining.is_set()
            self._buffer.give_back([lease_id], "stream_closed" if was_seen else "unread")
        self._leases.clear()

    def _num_taken(self) -> float:
        """How many of the batches, the oldest ones, somebody may have looked at."""
        if not self._read_ahead:
            return math.inf
        is_open = self._buffer.is_open
        oldest = next((n for key, n in self._leases.items() if is_open(key)), 0)
        # Whoever dies of a batch, or closes its stream, may do so before the last credit has come.
        return max(self._credits.num_granted - self._read_ahead, oldest) + 1

    def _units_of(self, lease: Lease) -> list[Unit]:
        """What of a lease this stream gets."""
        return list(lease.units) if self.rank_of is None else lease.part(self.rank_of.rank)

    async def send(self, lease: Lease, shortfall: str, *, least: int) -> bool:
        """Send a batch without its units that can't be read.

        Args:
            lease: The batch.
            shortfall: Why it has fewer units than were asked for.
            least: The fewest units worth sending.

        Returns:
            False if too many of it can't be read, or if it was returned while it waited to be sent.

        Raises:
            ExperienceBufferError: Nothing more can be sent; the lease is given back.
            StoreError: The same.
        """
        try:
            return await self._send(lease, shortfall, least)
        except (errors.ExperienceBufferError, StoreError):
            # With the stream its leases end, and those count as deliveries.
            self._buffer.give_back([lease.id], "undeliverable")
            raise
        except BaseException:
            if self.rank_of is None and lease.id not in self._leases:
                # Nothing of it was sent.
                self._buffer.give_back([lease.id], "undeliverable")
            raise
        finally:
            self._prefetches.end(lease.id)

    async def _send(self, lease: Lease, shortfall: str, least: int) -> bool:
        if self.rank_of is not None:
            self.rank_of = dataclasses.replace(self.rank_of, after_lease_id=lease.id)
        await self._outgoing.room()
        batch = SampledBatch(lease, self._units_of(lease), shortfall, least, Unreadable())
        hold = await self._backend.responses.wait(caller_of(), self._held_bytes(batch.units))
        is_sent = False
        try:
            send = self._send_packed if self._packed else self._send_trxp
            is_sent = self._is_deliverable(lease) and await send(batch, hold)
        finally:
            if not is_sent:
                hold.release()
        return is_sent

    def _is_deliverable(self, lease: Lease) -> bool:
        """Whether it is still open, and fresh enough; that of ranks is also the others'."""
        if lease.state == "open" and self.rank_of is None and not self._buffer.is_fresh(lease):
            self._buffer.give_back([lease.id], "undeliverable")
        return lease.state == "open"

    async def _send_packed(self, batch: SampledBatch, hold: Hold) -> bool:
        """Send a packed batch, all of which is read before anything of it is sent."""
        async with self._buffer.fetched(batch.units):
            if batch.lease.state != "open":
                return False
            messages = self._packed_messages(batch)
        if messages is None:
            return False
        hold.keep(self._sent_bytes(batch.units))
        self._begin(batch)
        await self._put(messages, last_of=hold)
        return True

    async def _send_trxp(self, batch: SampledBatch, hold: Hold) -> bool:
        """Send a batch of payloads, in parts that are read when they are to be sent."""
        is_begun = False
        *others, last = _trxp_parts(batch.units, self._part_bytes)
        for part in (*others, last):
            await self._outgoing.room()
            async with self._buffer.fetched(part):
                if not is_begun and batch.lease.state != "open":
                    return False
                messages = self._trxp_messages(
                    # What has been sent can't be taken back: the rest follows, however small.
                    batch, part, is_last=part is last, least=0 if is_begun else batch.least
                )  # fmt: skip
            if messages is None:
                return False
            if messages and not is_begun:
                self._begin(batch)
                is_begun = True
            if part is last:
                hold.keep(self._sent_bytes(batch.units))
            await self._put(messages, last_of=hold if part is last else None)
        return True

    def _begin(self, batch: SampledBatch) -> None:
        """Its first message is about to be sent."""
        self._credits.spend(sum(unit.num_bytes for unit in batch.units))
        self._note(batch.lease)

    async def _put(self, messages: list[bytes], *, last_of: Hold | None) -> None:
        """Put messages on their way, as there is room; the list is used up."""
        messages.reverse()
        while messages:
            await self._outgoing.room()
            message = messages.pop()
            await self._outgoing.put(message, last_of=None if messages else last_of)
            del message

    def _held_bytes(self, units: Sequence[Unit]) -> int:
        """Of a batch, what is in memory at once until all of it is read."""
        num_fetched = self._buffer.fetched_bytes(units)
        if not self._packed:
            num_fetched = min(num_fetched, self._most_of_part(units))
        return self._sent_bytes(units) + num_fetched

    def _sent_bytes(self, units: Sequence[Unit]) -> int:
        """Of a batch, what is in memory at once as messages."""
        num_bytes = sum(unit.num_bytes for unit in units)
        most = MAX_BYTES + self._most_of_part(units)
        return num_bytes if self._packed else min(num_bytes, most)

    @property
    def _part_bytes(self) -> int:
        """Of a batch of payloads, what is read at once, unless a unit is larger."""
        return FRAME_BYTES if self._memory is None else SHARED_PART_BYTES

    def _most_of_part(self, units: Sequence[Unit]) -> int:
        """What of a batch of payloads is read at once. A rank may get none of it."""
        return max([self._part_bytes, *(unit.num_bytes for unit in units)])

    # --- as it goes over the wire

    def _packed_messages(self, batch: SampledBatch) -> list[bytes] | None:
        """A packed batch, in shared memory or in parts of about `FRAME_BYTES`.

        Without room for all of it in shared memory, as many of its parts are there as have some.

        Returns:
            At least one message; None where too much can't be read, and the lease was given back.
        """

        def join(pieces: Pieces) -> list[bytes] | None:
            if batch.unreadable and not batch.unreadable.settle(
                self._buffer, batch.lease, least=batch.least
            ):
                return None
            frame = service_pb2.SampleFrame(lease=wire.lease_message(batch.lease, clock.now()))
            whole = self._last_frame(frame, batch)
            large = packed_pieces(service_pb2.SampleFrame, pieces)
            if message := self._shared(whole, large):
                return [message]
            num_bytes = _part_bytes(pieces, self._max_frame_bytes)
            *parts, last = cut(pieces, frame_bytes=num_bytes)
            messages = [self._packed_message(frame, part) for part in parts]
            return [*messages, self._packed_message(whole, last)]

        return packed(self._backend.store, self._buffer, batch.units, batch.unreadable, join)

    def _packed_message(self, frame: service_pb2.SampleFrame, part: Pieces) -> bytes:
        large = packed_pieces(service_pb2.SampleFrame, part)
        return self._shared(frame, large) or frame_response(frame, large)

    def _trxp_messages(
        self, batch: SampledBatch, part: Sequence[Unit], *, is_last: bool, least: int
    ) -> list[bytes] | None:
        """A part of a batch of payloads, in shared memory or in messages of about `FRAME_BYTES`.

        Only a message of a single experience exceeds what a message may hold.

        Args:
            batch: The batch.
            part: One of `_trxp_parts`.
            is_last: No part follows.
            least: The fewest units of the batch worth sending, of which the last part decides.

        Returns:
            The messages; None where too much can't be read, and the lease was given back.
        """

        def join(experiences: Sequence[Sampled]) -> list[bytes] | None:
            if (
                is_last
                and batch.unreadable
                and not batch.unreadable.settle(self._buffer, batch.lease, least=least)
            ):
                return None
            frame = service_pb2.SampleFrame(lease=wire.lease_message(batch.lease, clock.now()))
            end = self._last_frame(frame, batch) if is_last else frame
            if message := self._shared(end, pieces_of(experiences)):
                return [message]
            sizes = [each.num_bytes for each in experiences]
            *others, last = _in_parts(experiences, sizes, min(FRAME_BYTES, self._max_frame_bytes))
            messages = [frame_response(frame, pieces_of(each)) for each in others]
            if is_last or last:
                messages.append(frame_response(end, pieces_of(last)))
            return messages

        return sampled(self._backend.store, self._buffer, part, batch.unreadable, join)

    def _shared(self, frame: service_pb2.SampleFrame, large: Pieces) -> bytes | None:
        """The message of a frame that was put into shared memory, if there was room."""
        return None if self._memory is None else self._memory.put(frame_pieces(frame, large))

    def _last_frame(
        self, frame: service_pb2.SampleFrame, batch: SampledBatch
    ) -> service_pb2.SampleFrame:
        """The last frame of a batch, from one of the others."""
        last = service_pb2.SampleFrame(
            last=True,
            num_units=batch.unreadable.left_of(batch.units),
            shortfall=batch.unreadable.explain(batch.shortfall),
            batch_bytes=sum(unit.num_bytes for unit in batch.units),
            policy_version=self._buffer.policy_version,
        )
        last.MergeFrom(frame)
        return last


def _part_bytes(pieces: Pieces, max_bytes: int) -> int:
    """How large the parts of a batch are: as near to `FRAME_BYTES` as equal ones can be."""
    num_bytes = sum(map(len, pieces))
    return min(-(-num_bytes // max(round(num_bytes / FRAME_BYTES), 1)), max_bytes)


def _trxp_parts(units: Sequence[Unit], most: int) -> list[Sequence[Unit]]:
    """A batch in parts that are read at once: none has more bytes but that of a single unit.

    There is at least one part. Its bytes are those that it takes on the wire, at most.
    """
    return _in_parts(units, [unit.message_bytes for unit in units], most)


def _in_parts(found: Sequence[_T], sizes: Sequence[int], most: int) -> list[Sequence[_T]]:
    """At least one part; none exceeds `most` but that of a single one."""
    parts: list[Sequence[_T]] = []
    first = num_bytes = 0
    for place, size in enumerate(sizes):
        if place > first and num_bytes + size > most:
            parts.append(found[first:place])
            first, num_bytes = place, 0
        num_bytes += size
    return [*parts, found[first:]]
