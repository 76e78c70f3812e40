"""From stored rows back to a buffer that goes on exactly where it was."""

from __future__ import annotations

from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.flow import Flow
from experience_buffer_server.buffer.restore_damage import (
    miss_members,
    rebuild_groups,
    reserve_numbers,
)
from experience_buffer_server.buffer.restore_leases import restore_leases
from experience_buffer_server.buffer.state.candidate import COUNTED
from experience_buffer_server.buffer.state.group_table import Entry
from experience_buffer_server.runtime import clock
from experience_buffer_server.store.interface import Store, StoredBuffer
from experience_buffer_server.store.interning import share_with_group


def restore(buffer: Buffer, state: StoredBuffer, store: Store) -> None:
    """Fill an empty buffer: groups, entries, progress, leases; then offer what isn't leased.

    Whole groups without advantages are computed again, leases keep their deadlines.
    """
    flow = buffer.flow
    contents = flow.state.contents
    _go_on_in_time(state)
    rebuild_groups(flow, state)
    groups = {
        row.id: contents.groups.restore(row, flow.state.settings)
        for row in sorted(state.groups, key=lambda row: row.id)
    }
    for record in state.records:
        group = groups.get(record.group_id)
        entry = Entry(record, group, durable=True)
        magnitude = state.computed.get(record.seq)
        entry.magnitude = magnitude or 0.0
        # Of what was computed without moments, or before these began anew, nothing is in them.
        if (magnitude is not None and state.row.moments) or record.fields & COUNTED:
            entry.counted = True
        entry.available = magnitude is not None or (
            not flow.state.settings.advantage.estimator and not record.tombstone
        )
        contents.add(entry)
        contents.set_missing(entry, flow.state.missing_fields(entry))
        if entry.damage:
            contents.set_quarantine(entry, entry.damage)
        if group is not None:
            group.members.append(entry)
            group.num_durable += 1
            share_with_group(record, group.row)
    reserve_numbers(flow, state)
    miss_members(flow, state, store)
    for group in groups.values():
        votes = group.votes
        group.available = group.is_whole and bool(votes) and all(e.available for e in votes)
    flow.state.progress.restore(state.progress, state.consumers)
    restore_leases(flow, state.leases)
    for consumer in flow.state.consumers.values():
        flow.offers.offer_everything(consumer)
    flow.eviction.settings_changed()
    flow.retention.settings_changed()
    flow.advance([entry for entry in contents if not entry.available])
    for group in groups.values():
        if group.row.closed == "dropped":
            flow.check_whole(group)
    flow.grouping.tidy()
    _remove_leftovers(flow, state)


def _go_on_in_time(state: StoredBuffer) -> None:
    """Let no time pass again that the store has seen pass, whatever the machine's clock says."""
    pushed = max((record.push_time for record in state.records), default=0.0)
    ended = max((row.deadline for row in state.leases if row.state != "open"), default=0.0)
    clock.not_before(max(pushed, ended), what=f"the newest row of buffer {state.row.name!r}")


def _remove_leftovers(flow: Flow, state: StoredBuffer) -> None:
    """Remove what a crash left between a change and what follows from it."""
    batch = flow.changes.batch()
    seqs = [row.seq for row in state.progress if flow.state.contents.by_seq(row.seq) is None]
    for seq in seqs:
        batch.delete_progress(flow.state.id, seq)
    gone = [row.name for row in state.consumers if row.name not in flow.state.consumers]
    for name in gone:
        batch.delete_consumer(flow.state.id, name)
    if seqs or gone:
        flow.changes.spawn(batch)
    flow.removal.discard_done(entry for entry in flow.state.contents if entry.acked)
