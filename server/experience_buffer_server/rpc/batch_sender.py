"""Sending a stream's batches: each is read, put together and put on its way, with what it holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from experience_buffer import errors
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.damage import Unreadable
from experience_buffer_server.buffer.delivery.delivery import RankOf
from experience_buffer_server.rpc.flow_control import (
    FRAME_BYTES,
    MAX_BYTES,
    SHARED_PART_BYTES,
    Credits,
    Outgoing,
)
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.rpc.sample_frames import (
    SampledBatch,
    packed_messages,
    trxp_messages,
    trxp_parts,
)
from experience_buffer_server.runtime.callers import caller_of
from experience_buffer_server.runtime.response_bytes import Hold
from experience_buffer_server.runtime.shared_memory import SampleMemory
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import StoreError

_SPARE_LEASES = 64
"""Leases that may be noted beyond twice those that are open."""


class Sending:
    """Sends the batches of one stream. Belongs to its event loop.

    Args:
        backend: The store and the limits.
        buffer: Whose experiences they are.
        outgoing: Takes the messages.
        credits: Says what is spent.
        rank_of: The part that the stream gets of each batch, if it doesn't get all of it.
        packed: In which format.
        read_ahead: Batches that the client reads ahead of whoever uses them; 0: that isn't known.
    """

    def __init__(
        self,
        backend: Backend,
        buffer: Buffer,
        outgoing: Outgoing,
        credits: Credits,
        *,
        rank_of: RankOf | None,
        packed: bool,
        read_ahead: int = 0,
    ) -> None:
        self._backend = backend
        self._buffer = buffer
        self._outgoing = outgoing
        self._credits = credits
        self.rank_of = rank_of
        """Which batch comes next follows from the one that was sent last."""
        self._packed = packed
        self._memory: SampleMemory | None = None
        self._read_ahead = read_ahead
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
        rank_of = self.rank_of
        if rank_of is not None:
            self.rank_of = dataclasses.replace(rank_of, after_lease_id=lease.id)
        await self._outgoing.room()
        batch = SampledBatch(lease, self._units_of(lease), shortfall)
        hold = await self._backend.responses.wait(caller_of(), self._held_bytes(batch.units))
        is_sent = False
        try:
            send = self._send_packed if self._packed else self._send_trxp
            is_sent = self._is_deliverable(lease) and await send(batch, least, hold)
        finally:
            if not is_sent:
                hold.release()
        return is_sent

    def _is_deliverable(self, lease: Lease) -> bool:
        """Whether it is still open, and fresh enough; that of ranks is also the others'."""
        if lease.state == "open" and self.rank_of is None and not self._buffer.is_fresh(lease):
            self._buffer.give_back([lease.id], "undeliverable")
        return lease.state == "open"

    async def _send_packed(self, batch: SampledBatch, least: int, hold: Hold) -> bool:
        """Send a packed batch, all of which is read before anything of it is sent."""
        store, buffer, units = self._backend.store, self._buffer, batch.units
        async with buffer.fetched(units):
            if batch.lease.state != "open":
                return False
            messages = packed_messages(
                store, buffer, batch, self._memory, least=least, max_bytes=self._max_frame_bytes
            )
        if not messages:
            return False
        hold.keep(self._sent_bytes(units))
        self._credits.spend(sum(unit.num_bytes for unit in units))
        self._note(batch.lease)
        await self._put(messages, last_of=hold)
        return True

    async def _send_trxp(self, batch: SampledBatch, least: int, hold: Hold) -> bool:
        """Send a batch of payloads, in parts that are read when they are to be sent."""
        store, buffer = self._backend.store, self._buffer
        unreadable, is_begun = Unreadable(), False
        *others, last = trxp_parts(batch.units, self._part_bytes)
        for part in (*others, last):
            await self._outgoing.room()
            async with buffer.fetched(part):
                if not is_begun and batch.lease.state != "open":
                    return False
                messages = trxp_messages(
                    store,
                    buffer,
                    batch,
                    part,
                    unreadable,
                    self._memory,
                    is_last=part is last,
                    # What has been sent can't be taken back: the rest follows, however small.
                    least=0 if is_begun else least,
                    max_bytes=self._max_frame_bytes,
                )
            if messages is None:
                return False
            if messages and not is_begun:
                self._credits.spend(sum(unit.num_bytes for unit in batch.units))
                self._note(batch.lease)
                is_begun = True
            if part is last:
                hold.keep(self._sent_bytes(batch.units))
            await self._put(messages, last_of=hold if part is last else None)
        return True

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
