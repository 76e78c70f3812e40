"""Who holds what: a buffer's open leases."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from experience_buffer import errors
from experience_buffer.looking import LeasedUnit, LeaseInfo, LeasePart
from experience_buffer_server.buffer.inspection.glance import Glance
from experience_buffer_server.buffer.inspection.pages import Page
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.sampling.leases import Holder, Lease
from experience_buffer_server.sampling.units import Unit

_MOST_UNITS: Final = 32
"""Of each lease, where several are listed."""
_MOST_OF_ONE: Final = 1024
"""Of a lease that is asked for alone."""
_NOBODY: Final = Holder(name="", address="", caller="", on_stream=False, time=0.0)


async def lease_page(
    state: BufferState, *, consumer: str, lease_id: int, after: int, size: int, now: float
) -> Page[LeaseInfo]:
    """Open leases, oldest first.

    Args:
        state: The buffer's.
        consumer: Only those of this consumer; empty: of all.
        lease_id: Only this one, with up to 1,024 units; 0: all.
        after: Only those with a larger id; -1: from the first.
        size: Most of them.
        now: Seconds since the Unix epoch.

    Raises:
        ConsumerNotFoundError: There is no such consumer.
        LeaseNotFoundError: No such lease is open.
    """
    if consumer:
        state.consumer(consumer)
    if lease_id:
        return Page([_one(state, lease_id, consumer, now)])
    found: list[LeaseInfo] = []
    glance, last = Glance(), after
    for number in [n for n in state.leases.open_ids() if n > after]:
        if len(found) == size or glance.is_over:
            return Page(found, last)
        await glance.breathe()
        last = number
        lease = state.leases.find(number)
        if lease is None or (consumer and lease.consumer != consumer):
            continue
        if (info := _info(state, lease, now, most_units=_MOST_UNITS)) is not None:
            found.append(info)
    return Page(found)


def _one(state: BufferState, lease_id: int, consumer: str, now: float) -> LeaseInfo:
    lease = state.leases.find(lease_id)
    info = None
    if lease is not None and consumer in ("", lease.consumer):
        info = _info(state, lease, now, most_units=_MOST_OF_ONE)
    if info is None:
        raise errors.LeaseNotFoundError(
            f"buffer {state.name!r} has no open lease {lease_id}"
            + (f" of consumer {consumer!r}" if consumer else ""),
            subject=str(lease_id),
        )
    return info


def _info(state: BufferState, lease: Lease, now: float, *, most_units: int) -> LeaseInfo | None:
    """What is known of a lease; None where it has ended."""
    holder = state.consumers.get(lease.consumer)
    if holder is None or lease.id not in holder.leases:
        return None
    # The first to have received it is who had it formed.
    by = min(lease.holders.values(), key=lambda one: one.time, default=_NOBODY)
    return LeaseInfo(
        id=lease.id,
        consumer=lease.consumer,
        unit=holder.settings.unit,
        holder=by.name,
        address=by.address,
        caller=by.caller,
        on_stream=by.on_stream,
        grant_time=lease.grant_time,
        age_seconds=None if lease.grant_time is None else max(now - lease.grant_time, 0.0),
        expire_time=lease.deadline,
        expires_in_seconds=max(lease.deadline - now, 0.0),
        is_ending=lease.state == "ending",
        num_units=lease.num_units,
        num_experiences=lease.num_experiences,
        num_bytes=lease.num_bytes,
        max_deliveries=max((unit.num_deliveries for unit in lease.units), default=0),
        world_size=lease.world_size,
        parts=tuple(_parts(lease)),
        units=tuple(islice(_units(state, holder, lease), most_units)),
    )


def _parts(lease: Lease) -> Iterator[LeasePart]:
    for rank, num_units in enumerate(lease.part_sizes):
        by = lease.holders.get(rank)
        known = by or _NOBODY
        yield LeasePart(
            rank=rank,
            num_units=num_units,
            holder=known.name,
            address=known.address,
            caller=known.caller,
            receive_time=None if by is None else by.time,
            is_acked=rank in lease.acked_parts,
            step=lease.acked_parts.get(rank),
        )


def _units(state: BufferState, consumer: Consumer, lease: Lease) -> Iterator[LeasedUnit]:
    ranks = (rank for rank, count in enumerate(lease.part_sizes) for _ in range(count))
    for unit in lease.units:
        yield LeasedUnit(
            key=_key(state, consumer, unit),
            num_experiences=len(unit.seqs),
            num_deliveries=unit.num_deliveries,
            rank=next(ranks, 0),
            is_stale=unit.stale,
            is_gone=unit.gone,
        )


def _key(state: BufferState, consumer: Consumer, unit: Unit) -> str:
    """The key of a leased group, or the uid of a leased experience; these stay as long as the lease."""
    if consumer.settings.unit == "group":
        group = state.contents.groups.by_id(unit.key)
        return "" if group is None else group.row.key
    entry = state.contents.by_seq(unit.key)
    return "" if entry is None else entry.record.uid
