"""From stored rows back to a buffer that goes on exactly where it was."""

from __future__ import annotations

import itertools

from experience_buffer_server.admission import COUNTED
from experience_buffer_server.buffer import Buffer
from experience_buffer_server.catalog import key_of
from experience_buffer_server.consumers import Consumer
from experience_buffer_server.groups import Entry
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.units import Unit
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
        magnitude = state.computed.get(record.seq)
        entry.magnitude = magnitude or 0.0
        entry.counted = magnitude is not None or bool(record.fields & COUNTED)
        entry.available = magnitude is not None or (
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
    buffer.desk.progress.restore(state.progress, state.consumers)
    for row in state.leases:
        _restore_lease(buffer, row)
    for consumer in buffer.delivery.consumers.values():
        buffer.desk.offering.everything(consumer)
    buffer.eviction.settings_changed()
    buffer.advance([entry for entry in contents if not entry.available])
    for group in groups.values():
        if group.row.closed == "dropped":
            buffer.check_whole(group)
    buffer.grouping.tidy()


def _restore_lease(buffer: Buffer, row: LeaseRow) -> None:
    """Put a lease back, with its units in the hands of their consumer."""
    consumer = buffer.delivery.consumers.get(row.consumer)
    units: list[Unit] = []
    part_sizes = []
    sizes = row.part_sizes or [len(row.units)]
    rows = iter(row.units)
    for size in sizes:
        part = [_restore_unit(buffer, consumer, seqs) for seqs in itertools.islice(rows, size)]
        units += [unit for unit in part if unit is not None]
        part_sizes.append(sum(unit is not None for unit in part))
    lease = Lease(
        id=row.id,
        consumer=row.consumer,
        units=units,
        deadline=row.deadline,
        state=row.state,
        is_stored=True,
        num_units=len(units),
        num_experiences=row.num_experiences,
        num_bytes=sum(unit.num_bytes for unit in units),
        part_sizes=part_sizes if row.part_sizes else (),
        acked_parts=row.acked_parts,
    )
    buffer.leasing.table.restore(lease)
    if row.state == "open":
        buffer.delivery.lent(lease)


def _restore_unit(buffer: Buffer, consumer: Consumer | None, seqs: list[int]) -> Unit | None:
    """The leased unit; None where it has left, or its consumer has."""
    entries = buffer.contents.by_seqs(seqs)
    if not entries or consumer is None:
        return None
    key = key_of(consumer.settings, entries[0])
    if key in consumer.out:
        return consumer.out[key]
    unit = Unit(
        key=key,
        seqs=tuple(entry.record.seq for entry in entries),
        num_bytes=sum(entry.record.payload_bytes for entry in entries),
        num_tokens=sum(entry.record.response_tokens for entry in entries),
    )
    buffer.desk.progress.history(unit, consumer.name)
    unit.num_deliveries += 1
    groups = (entry.group for entry in entries if entry.group is not None)
    unit.gone = any(group.row.closed == "dropped" for group in groups)
    consumer.out[key] = unit
    return unit
