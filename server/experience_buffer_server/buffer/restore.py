"""From stored rows back to a buffer that goes on exactly where it was.

Leases come back with their units in the hands of their consumers. A crash, or a disk that was full for
a while, may have left rows of leases that don't fit what is stored now: of a consumer that is gone or
takes other units, or two that hold the same unit.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Sequence

from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.batch_picking import unit_of
from experience_buffer_server.buffer.flow import Flow
from experience_buffer_server.buffer.restore_damage import (
    miss_members,
    rebuild_groups,
    reserve_numbers,
)
from experience_buffer_server.buffer.restore_keys import name_groups
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.entries import COUNTED, Entry, key_of
from experience_buffer_server.runtime import clock
from experience_buffer_server.sampling.leases import Lease, LeaseState
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import (
    DepartedRow,
    LeaseRow,
    ProgressRow,
    Store,
    StoredBuffer,
)
from experience_buffer_server.store.rows import share_with_group

_log = logging.getLogger(__name__)


def restore(buffer: Buffer, state: StoredBuffer, store: Store) -> None:
    """Fill an empty buffer: groups, entries, progress, leases; then offer what isn't leased.

    Whole groups without advantages are computed again, leases keep their deadlines.
    """
    flow = buffer.flow
    contents = flow.state.contents
    _go_on_in_time(state)
    _restore_departed(flow, store)
    rebuild_groups(flow, state)
    name_groups(flow, state)
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
        group.completed = group.is_whole and not group.missing
    flow.state.progress.restore(state.progress, state.consumers)
    _restore_steps(flow, state.progress)
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


def _restore_steps(flow: Flow, rows: Iterable[ProgressRow]) -> None:
    """Tell again what steps have consumed, as far as it is kept for a rewind.

    When that was is known where the buffer has an archive.
    """
    found: dict[tuple[str, int], list[Entry]] = {}
    times: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        entry = flow.state.contents.by_seq(row.seq) if row.steps else None
        if entry is None:
            continue
        for name, steps in row.steps.items():
            for step in steps:
                found.setdefault((name, step), []).append(entry)
        for name, trained_step, time in row.trained:
            if time is not None and trained_step is not None:
                times.setdefault((name, trained_step), []).append(time)
    for (name, step), entries in sorted(found.items()):
        if name in flow.state.consumers:
            flow.state.telemetry.restore(name, step, entries, times.get((name, step), ()))


def _restore_departed(flow: Flow, store: Store) -> None:
    """What has left and isn't archived yet; a row that can't be read back goes."""
    damaged: list[int] = []
    sound: list[DepartedRow] = []
    for seq, row in store.departed_rows(flow.state.id):
        if isinstance(row, DepartedRow):
            sound.append(row)
        else:
            damaged.append(seq)
            _log.error("buffer %r: not archived, since it is damaged: %s", flow.state.name, row)
    flow.state.outbox.restore(sound, clock.now())
    if damaged:
        batch = flow.state.changes.batch()
        for seq in damaged:
            batch.archived(flow.state.id, seq, "")
        flow.state.changes.spawn(batch)
        flow.state.outbox.lost(len(damaged))


def _go_on_in_time(state: StoredBuffer) -> None:
    """Let no time pass again that the store has seen pass, whatever the machine's clock says."""
    pushed = max((record.push_time for record in state.records), default=0.0)
    ended = max((row.deadline for row in state.leases if row.state != "open"), default=0.0)
    clock.not_before(max(pushed, ended), what=f"the newest row of buffer {state.row.name!r}")


def _remove_leftovers(flow: Flow, state: StoredBuffer) -> None:
    """Remove what a crash left between a change and what follows from it."""
    batch = flow.state.changes.batch()
    seqs = [row.seq for row in state.progress if flow.state.contents.by_seq(row.seq) is None]
    for seq in seqs:
        batch.delete_progress(flow.state.id, seq)
    gone = [row.name for row in state.consumers if row.name not in flow.state.consumers]
    for name in gone:
        batch.delete_consumer(flow.state.id, name)
    if seqs or gone:
        flow.state.changes.spawn(batch)
    flow.removal.discard_done(entry for entry in flow.state.contents if entry.acked)


_Parts = list[list[Unit]]
"""The units of each part of a lease; of one that isn't shared, all are one part."""


def restore_leases(flow: Flow, rows: Sequence[LeaseRow]) -> None:
    """Put leases back. A unit belongs to its newest lease; one without units has ended."""
    parts: dict[int, _Parts] = {}
    for row in sorted(rows, key=lambda row: row.id, reverse=True):
        if row.state == "open":
            parts[row.id] = _take_parts(flow, row)
    ended = []
    for row in sorted(rows, key=lambda row: row.id):
        if row.state == "open" and not any(parts[row.id]):
            state: LeaseState = "expired" if row.deadline <= clock.now() else "nacked"
            row = dataclasses.replace(
                row, state=state, units=[], acked_parts={}, deadline=clock.now()
            )
            ended.append(row)
        _restore(flow, row, parts.get(row.id, []))
    if ended:
        batch = flow.state.changes.batch()
        for row in ended:
            batch.put_lease(flow.state.id, row)
        flow.state.changes.spawn(batch)


def _restore(flow: Flow, row: LeaseRow, parts: _Parts) -> None:
    units = [unit for part in parts for unit in part]
    is_open = row.state == "open"
    lease = Lease(
        id=row.id,
        consumer=row.consumer,
        units=units if is_open else [],
        deadline=row.deadline,
        state=row.state,
        is_stored=True,
        num_units=len(units),
        num_experiences=sum(len(unit.seqs) for unit in units) if is_open else row.num_experiences,
        num_bytes=sum(unit.num_bytes for unit in units),
        part_sizes=[len(part) for part in parts] if is_open and row.part_sizes else row.part_sizes,
        acked_parts=row.acked_parts if is_open else {},
    )
    flow.state.leases.restore(lease)
    if is_open and (consumer := flow.state.consumers.get(row.consumer)) is not None:
        consumer.lent(lease)


def _take_parts(flow: Flow, row: LeaseRow) -> _Parts:
    """A lease's units, out of its consumer's hands into its own; those that it still has."""
    consumer = flow.state.consumers.get(row.consumer)
    if consumer is None:
        return []
    places = iter(range(len(row.units)))
    own: dict[int, Unit] = {}
    return [
        _take_units(flow, consumer, row, itertools.islice(places, size), own)
        for size in row.part_sizes or [len(row.units)]
    ]


def _take_units(
    flow: Flow, consumer: Consumer, row: LeaseRow, places: Iterable[int], own: dict[int, Unit]
) -> list[Unit]:
    """Units by their places; `own` are those of the lease so far, which may hold one repeatedly."""
    units = []
    for place in places:
        seqs = row.units[place]
        entries = flow.state.contents.by_seqs(seqs)
        if not entries or not _is_unit(consumer, entries, len(seqs)):
            continue
        key = key_of(consumer.settings, entries[0])
        if key not in own and key in consumer.out:
            continue  # A newer lease has it.
        unit = own[key] = own.get(key) or _unit(flow, consumer, key, entries)
        unit.probability = row.probabilities[place] if row.probabilities else 1.0
        unit.stale = bool(row.stale) and row.stale[place]
        consumer.out[key] = unit
        units.append(unit)
    return units


def _is_unit(consumer: Consumer, entries: Sequence[Entry], num_leased: int) -> bool:
    """Whether leased entries are what the consumer gets as one now: an item, or a whole group."""
    if any(entry.damage for entry in entries):
        return False
    if consumer.settings.unit == "item":
        return num_leased == 1
    group = entries[0].group
    if group is None or group.damage or len(entries) != len(group.votes):
        return False
    return all(entry.group is group for entry in entries)


def _unit(flow: Flow, consumer: Consumer, key: int, entries: Sequence[Entry]) -> Unit:
    unit = unit_of(flow.state, key, entries)
    flow.state.progress.history(unit, consumer.name)
    unit.num_deliveries += 1
    groups = (entry.group for entry in entries if entry.group is not None)
    unit.gone = any(group.row.closed == "dropped" for group in groups)
    return unit
