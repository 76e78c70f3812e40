"""Frames of a sample stream as they go over the wire."""

from __future__ import annotations

from collections.abc import Sequence

from experience_buffer._sample_wire import Pieces, frame_response, packed_pieces
from experience_buffer.packed import cut
from experience_buffer.v1 import service_pb2
from experience_buffer_server import steady_clock, wire
from experience_buffer_server.assembly import FRAME_BYTES, packed
from experience_buffer_server.buffer import Buffer
from experience_buffer_server.damage import Unreadable
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.base import Store


def packed_messages(
    store: Store,
    buffer: Buffer,
    lease: Lease,
    units: Sequence[Unit],
    shortfall: str,
    *,
    least: int,
    max_bytes: int,
) -> list[bytes]:
    """A packed batch, in messages of about `FRAME_BYTES`.

    Args:
        store: Where the experiences are.
        buffer: Whose they are.
        lease: Which the units are of.
        units: In the batch's order.
        shortfall: Why they are fewer than were asked for.
        least: The fewest units worth sending.
        max_bytes: The most of the batch in a message.

    Returns:
        At least one message; none where too much can't be read, and the lease was given back.
    """
    unreadable = Unreadable()

    def join(pieces: Pieces) -> list[bytes]:
        if unreadable and not buffer.damage.settle(lease, unreadable, least=least):
            return []
        frame = service_pb2.SampleFrame(lease=wire.lease_message(lease, steady_clock.now()))
        *parts, last = cut(pieces, frame_bytes=_part_bytes(pieces, max_bytes))
        messages = [_packed_message(frame, part) for part in parts]
        finish(frame, buffer, units, unreadable, shortfall)
        return [*messages, _packed_message(frame, last)]

    return packed(store, buffer, units, unreadable, join)


def _part_bytes(pieces: Pieces, max_bytes: int) -> int:
    """How large the parts of a batch are: as near to `FRAME_BYTES` as equal ones can be."""
    num_bytes = sum(map(len, pieces))
    return min(-(-num_bytes // max(round(num_bytes / FRAME_BYTES), 1)), max_bytes)


def _packed_message(frame: service_pb2.SampleFrame, part: Pieces) -> bytes:
    return frame_response(frame, packed_pieces(service_pb2.SampleFrame, part))


def finish(
    frame: service_pb2.SampleFrame,
    buffer: Buffer,
    units: Sequence[Unit],
    unreadable: Unreadable,
    shortfall: str,
) -> None:
    """Make a frame the last one of its batch."""
    frame.last = True
    frame.num_units = unreadable.left_of(units)
    frame.shortfall = unreadable.explain(shortfall)
    frame.batch_bytes = sum(unit.num_bytes for unit in units)
    if buffer.row.policy_version is not None:
        frame.policy_version = buffer.row.policy_version
