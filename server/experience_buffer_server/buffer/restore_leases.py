"""Leases as they were stored, with their units in the hands of their consumers.

A crash, or a disk that was full for a while, may have left rows that don't fit what is stored now:
of a consumer that is gone or takes other units, or two that hold the same unit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from experience_buffer_server.buffer.flow import Flow
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.group_table import Entry
from experience_buffer_server.buffer.state.units import key_of
from experience_buffer_server.runtime import clock
from experience_buffer_server.sampling.leases import Lease, LeaseState
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import LeaseRow

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
        batch = flow.changes.batch()
        for row in ended:
            batch.put_lease(flow.state.id, row)
        flow.changes.spawn(batch)


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
        acked_parts=row.acked_parts,
    )
    flow.state.leases.restore(lease)
    if is_open:
        flow.offers.lent(lease)


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
    unit = flow.state.unit(consumer.settings, key, entries)
    flow.state.progress.history(unit, consumer.name)
    unit.num_deliveries += 1
    groups = (entry.group for entry in entries if entry.group is not None)
    unit.gone = any(group.row.closed == "dropped" for group in groups)
    return unit
