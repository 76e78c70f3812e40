"""Frames of a sample stream as they go over the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from experience_buffer._messages.sample_bytes import (
    Pieces,
    frame_pieces,
    frame_response,
    packed_pieces,
)
from experience_buffer.packed import cut
from experience_buffer.v1 import service_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.damage import Unreadable
from experience_buffer_server.rpc import messages as wire
from experience_buffer_server.rpc.batch_assembly import Sampled, packed, pieces_of, sampled
from experience_buffer_server.rpc.flow_control import FRAME_BYTES
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.shared_memory import SampleMemory
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import Store

_T = TypeVar("_T")


class SampledBatch(NamedTuple):
    """A batch that is being sent."""

    lease: Lease
    units: Sequence[Unit]
    """What of the lease is sent, in the batch's order."""
    shortfall: str
    """Why they are fewer than were asked for."""


def packed_messages(
    store: Store,
    buffer: Buffer,
    batch: SampledBatch,
    memory: SampleMemory | None,
    *,
    least: int,
    max_bytes: int,
) -> list[bytes]:
    """A packed batch, in shared memory or in parts of about `FRAME_BYTES`.

    Args:
        store: Where the experiences are.
        buffer: Whose they are.
        batch: The batch.
        memory: Where all of it is put if there is room; otherwise as many of its parts as have some.
        least: The fewest units worth sending.
        max_bytes: The most of the batch in a message.

    Returns:
        At least one message; none where too much can't be read, and the lease was given back.
    """
    lease, units = batch.lease, batch.units
    unreadable = Unreadable()

    def join(pieces: Pieces) -> list[bytes]:
        if unreadable and not buffer.settle(lease, unreadable, least=least):
            return []
        frame = service_pb2.SampleFrame(lease=wire.lease_message(lease, clock.now()))
        whole = service_pb2.SampleFrame()
        whole.CopyFrom(frame)
        _finish(whole, buffer, batch, unreadable)
        large = packed_pieces(service_pb2.SampleFrame, pieces)
        if memory is not None and (message := memory.put(frame_pieces(whole, large))):
            return [message]
        *parts, last = cut(pieces, frame_bytes=_part_bytes(pieces, max_bytes))
        messages = [_packed_message(frame, part, memory) for part in parts]
        return [*messages, _packed_message(whole, last, memory)]

    return packed(store, buffer, units, unreadable, join)


def _part_bytes(pieces: Pieces, max_bytes: int) -> int:
    """How large the parts of a batch are: as near to `FRAME_BYTES` as equal ones can be."""
    num_bytes = sum(map(len, pieces))
    return min(-(-num_bytes // max(round(num_bytes / FRAME_BYTES), 1)), max_bytes)


def _packed_message(
    frame: service_pb2.SampleFrame, part: Pieces, memory: SampleMemory | None
) -> bytes:
    large = packed_pieces(service_pb2.SampleFrame, part)
    if memory is not None and (message := memory.put(frame_pieces(frame, large))):
        return message
    return frame_response(frame, large)


def trxp_parts(units: Sequence[Unit], most: int) -> list[Sequence[Unit]]:
    """A batch in parts that are read at once: none has more bytes but that of a single unit.

    There is at least one part. Its bytes are those that it takes on the wire, at most.
    """
    return _in_parts(units, [unit.message_bytes for unit in units], most)


def trxp_messages(
    store: Store,
    buffer: Buffer,
    batch: SampledBatch,
    part: Sequence[Unit],
    unreadable: Unreadable,
    memory: SampleMemory | None,
    *,
    is_last: bool,
    least: int,
    max_bytes: int,
) -> list[bytes] | None:
    """A part of a batch of payloads, in shared memory or in messages of about `FRAME_BYTES`.

    Args:
        store: Where the experiences are.
        buffer: Whose they are.
        batch: The batch.
        part: One of `trxp_parts`.
        unreadable: What of the batch can't be read, so far.
        memory: Where all of the part is put if there is room.
        is_last: No part follows.
        least: The fewest units of the batch worth sending, of which the last part decides.
        max_bytes: None but a message of a single experience exceeds it.

    Returns:
        The messages; None where too much can't be read, and the lease was given back.
    """
    lease = batch.lease

    def join(experiences: Sequence[Sampled]) -> list[bytes] | None:
        is_short = is_last and bool(unreadable)
        if is_short and not buffer.settle(lease, unreadable, least=least):
            return None
        frame = service_pb2.SampleFrame(lease=wire.lease_message(lease, clock.now()))
        end = service_pb2.SampleFrame()
        end.CopyFrom(frame)
        if is_last:
            _finish(end, buffer, batch, unreadable)
        if memory is not None:
            message = memory.put(frame_pieces(end, pieces_of(experiences)))
            if message is not None:
                return [message]
        sizes = [each.num_bytes for each in experiences]
        *others, last = _in_parts(experiences, sizes, min(FRAME_BYTES, max_bytes))
        messages = [frame_response(frame, pieces_of(each)) for each in others]
        if is_last or last:
            messages.append(frame_response(end, pieces_of(last)))
        return messages

    return sampled(store, buffer, part, unreadable, join)


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


def _finish(
    frame: service_pb2.SampleFrame, buffer: Buffer, batch: SampledBatch, unreadable: Unreadable
) -> None:
    """Make a frame the last one of its batch."""
    frame.last = True
    frame.num_units = unreadable.left_of(batch.units)
    frame.shortfall = unreadable.explain(batch.shortfall)
    frame.batch_bytes = sum(unit.num_bytes for unit in batch.units)
    if buffer.policy_version is not None:
        frame.policy_version = buffer.policy_version
