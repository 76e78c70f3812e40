"""From stored rows back to a buffer that goes on exactly where it was."""

from __future__ import annotations

from experience_buffer_server.admission import COUNTED
from experience_buffer_server.buffer import Buffer
from experience_buffer_server.groups import Entry
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.queue import Unit
from experience_buffer_server.store.base import BufferState, LeaseRow


def restore(buffer: Buffer, state: BufferState) -> None:
    """Fill an empty buffer: groups, entries, progress, leases; then offer what isn't leased.

    Whole groups without advantages are computed again, leases keep their deadlines.
    """
    contents = buffer.contents
    groups = {
        row.id: contents.groups.restore(row, buffer.settings)
        for row in sorted(state.groups, key=lambda row: row.id)
    }
    for record in state.records:
        group = groups.get(record.group_id)
        entry = Entry(record, group, durable=True)
        entry.counted = record.seq in state.computed or bool(record.fields & COUNTED)
        entry.available = record.seq in state.computed or (
            not buffer.settings.advantage.estimator and not record.tombstone
        )
        contents.add(entry)
        contents.set_missing(entry, buffer.missing_fields(entry))
        if group is not None:
            group.members.append(entry)
            group.num_durable += 1
    for group in groups.values():
        votes = group.votes
        # Who left, and why, isn't stored: take it for consumed.
        group.has_consumed = not group.is_open and len(group.members) < group.row.size
        group.available = group.is_whole and bool(votes) and all(e.available for e in votes)
    buffer.retirement.restore(state.progress)
    for row in state.leases:
        _restore_lease(buffer, row)
    for consumer in buffer.delivery.consumers.values():
        buffer.offering.everything(consumer)
    buffer.advance(list(contents))
    buffer.grouping.tidy()


def _restore_lease(buffer: Buffer, row: LeaseRow) -> None:
    """Put a lease back, with its units in the hands of their consumer."""
    consumer = buffer.delivery.consumers.get(row.consumer)
    units = []
    for seqs in row.units:
        entries = buffer.contents.by_seqs(seqs)
        if not entries or consumer is None:
            continue
        unit = Unit(
            tuple(entry.record.seq for entry in entries),
            sum(entry.record.payload_bytes for entry in entries),
        )
        past = buffer.retirement.num_deliveries(unit.order, row.consumer)
        unit.num_deliveries = past + 1
        groups = (entry.group for entry in entries if entry.group is not None)
        unit.gone = any(group.row.closed == "dropped" for group in groups)
        consumer.hold(unit)
        units.append(unit)
    lease = Lease(
        id=row.id,
        consumer=row.consumer,
        units=units,
        deadline=row.deadline,
        state=row.state,
        num_experiences=row.num_experiences,
    )
    buffer.leasing.table.restore(lease)
    if row.state == "open":
        buffer.delivery.lent(lease)
