"""What can't be read back from the disk any more: set aside, so that everything else is delivered.

An experience of which a row is damaged or gone is offered to nobody. Its record says why, so that a
restart doesn't try it again. It stays visible until it is deleted, or the store restored from a
snapshot. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from experience_buffer import errors
from experience_buffer_server.buffer.delivery.leasing import Leasing
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Entry, Group, key_of
from experience_buffer_server.buffer.state.group_table import groups_of
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.units import Unit

_log = logging.getLogger(__name__)

CURE: Final = "delete it, or restore the store from a snapshot"
LEFT: Final = ""
"""The reason why what is being removed can't be read back: no damage."""
_MAX_REASON: Final = 500


def set_aside(state: BufferState, reasons: Mapping[int, str]) -> None:
    """Offer experiences to nobody any more, nor groups that hold them.

    Args:
        state: The buffer's.
        reasons: By seq, what of it can't be read back, and why. `LEFT` is no reason.
    """
    if state.closed:
        return  # Whatever of a deleted buffer is stored now would stay for ever.
    batch = state.changes.batch()
    damaged = [seq for seq, reason in reasons.items() if reason != LEFT]
    fresh = [e for e in state.contents.by_seqs(damaged) if not (e.damage or e.leaving)]
    for entry in fresh:
        reason = reasons[entry.record.seq][:_MAX_REASON]
        record = dataclasses.replace(entry.record, note=f"{reason}; {CURE}")
        state.contents.replace_record(entry, record)
        state.contents.set_quarantine(entry, record.note)
        if not entry.changing:
            # Else it would replace the record that is on its way; see `put_notes`.
            batch.put_record(state.id, record)
        _log.error("buffer %r: set aside %r: %s", state.name, record.uid, reason)
    for consumer in state.consumers.values():
        for key in {key_of(consumer.settings, entry) for entry in fresh}:
            consumer.set_aside(key)
    for group in groups_of(fresh):
        hold_back(state, group)
    state.events.revalue(fresh)
    if fresh:
        state.changes.spawn(batch)


def put_notes(state: BufferState, entries: Iterable[Entry]) -> None:
    """Store the notes of entries that were set aside while an annotation was under way."""
    batch = state.changes.batch()
    noted = [entry for entry in entries if entry.damage and not entry.leaving]
    for entry in noted:
        batch.put_record(state.id, entry.record)
    if noted and not state.closed:
        state.changes.spawn(batch)


def hold_back(state: BufferState, group: Group) -> None:
    """Say of the members of a group that can't be computed any more why that is so."""
    if group.available or not state.settings.needs_groups or not group.damage:
        return
    for entry in group.votes:
        state.contents.set_quarantine(entry, entry.damage or group.damage)


def check(state: BufferState, entry: Entry) -> None:
    """Refuse to look at what is set aside.

    Raises:
        DataLossError: It is.
    """
    if entry.damage:
        uid = entry.record.uid
        raise errors.DataLossError(
            f"experience {uid!r} of buffer {state.name!r} is damaged: {entry.damage}", subject=uid
        )


def settle(
    state: BufferState,
    leasing: Leasing,
    lease: Lease,
    units: Collection[Unit],
    reasons: Mapping[int, str],
    *,
    is_enough: bool,
) -> bool:
    """Go on with a lease of which some units can't be read.

    Args:
        state: The buffer's.
        leasing: The buffer's.
        lease: Being delivered.
        units: Those of it that can't be read.
        reasons: By seq, what of them can't be read, and why.
        is_enough: Whether what is left is worth delivering.

    Returns:
        Whether the rest is delivered; else it has been given back, to be sampled anew, unless
        the buffer was deleted.
    """
    if state.closed:
        return False
    set_aside(state, reasons)
    # What ranks share is never given back: others may be training on their parts.
    if not (is_enough or lease.world_size):
        leasing.give_back([lease.id], "undeliverable")
        return False
    _take_out(state, leasing, lease, units)
    return True


def _take_out(state: BufferState, leasing: Leasing, lease: Lease, units: Collection[Unit]) -> None:
    consumer = state.consumers.get(lease.consumer)
    if lease.state != "open" or consumer is None or lease.id not in consumer.leases:
        return
    consumer.took_back(lease)
    state.leases.take_out(lease, units)
    consumer.lent(lease)
    for unit in units:
        if consumer.out.get(unit.key) is unit:
            del consumer.out[unit.key]
    state.changes.log(leasing.store_row(lease))
