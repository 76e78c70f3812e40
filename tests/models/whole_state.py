"""All that a buffer knows, to be compared before and after a restart at rest.

Left out is what counts since the start of the server or tells of the time, and what nobody can ask for
again: what a lease that isn't shared was told of its units.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.contents import num_deliverable
from experience_buffer_server.buffer.state.entries import Entry, Group
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.store.interface import ProgressRow

_LEFT_OUT = {
    "num_acked_units",
    "num_redelivered_units",
    "num_stale_units",
    "num_ready_units",
    "num_held_units",
    "num_used",
    "num_unused",
    "keep_ratio",
    "oldest_open_group",
}


def everything(buffer: Buffer) -> dict[str, Any]:
    """What a buffer at rest knows, in a form that compares and tells where it differs."""
    state = buffer.state
    found: dict[str, Any] = {"row": dataclasses.asdict(state.row), "last": state.contents.last_seq}
    found["stats"] = _told(dataclasses.asdict(buffer.stats()))
    found["entries"] = {entry.record.uid: _entry(buffer, entry) for entry in state.contents}
    found["groups"] = {group.row.id: _group(group) for group in state.contents.groups}
    found["consumers"] = {name: _consumer(buffer, c) for name, c in state.consumers.items()}
    found["ended"] = {
        lease.id: (lease.consumer, lease.state, lease.num_experiences)
        for lease in state.leases._ended.values()
    }
    found["last lease"] = state.leases.last_id
    return found


def differences(before: object, after: object, path: str = "") -> list[str]:
    """Where two of them differ, a line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in {**before, **after}
            for line in differences(before.get(key), after.get(key), f"{path}/{key}")
        ]
    return [] if before == after else [f"{path}: {before!r} before, {after!r} after"]


def _told(stats: dict[str, Any]) -> dict[str, Any]:
    told = {key: value for key, value in stats.items() if key not in _LEFT_OUT}
    told["consumers"] = {
        consumer["name"]: {k: v for k, v in consumer.items() if k not in _LEFT_OUT}
        for consumer in told["consumers"]
    }
    return told


def _entry(buffer: Buffer, entry: Entry) -> dict[str, Any]:
    names = ("durable", "available", "leaving", "computing", "changing", "missing", "quarantine")
    row = buffer.state.progress._rows.get(entry.record.seq, ProgressRow(seq=entry.record.seq))
    progress = {
        name: {k: v for k, v in value.items() if v or name == "times_sampled"}
        if isinstance(value := getattr(row, name), dict)
        else sorted(value)
        for name in ("num_deliveries", "times_sampled", "quarantined", "passed_over", "uncounted")
    }
    return {
        "record": dataclasses.asdict(entry.record),
        "group": entry.group and entry.group.row.id,
        "acked": entry.acked,
        "magnitude": entry.magnitude,
        "damage": entry.damage,
        "steps": {name: sorted(steps) for name, steps in row.steps.items()},
        "progress": progress,
        **{name: getattr(entry, name) for name in names},
    }


def _group(group: Group) -> dict[str, Any]:
    names = ("is_whole", "has_consumed", "num_durable", "damage")
    return {
        "row": dataclasses.asdict(group.row),
        "members": sorted(entry.record.uid for entry in group.members),
        "words": group.describe(),
        # Of a dropped group it makes no difference any more.
        "available": group.available and group.row.closed != "dropped",
        **{name: getattr(group, name) for name in names},
    }


def _consumer(buffer: Buffer, consumer: Consumer) -> dict[str, Any]:
    timeline = consumer.timeline
    num_present = num_deliverable(buffer.state.contents, consumer)
    has_limiter = consumer.settings.limiter is not None
    return {
        "settings": consumer.settings,
        # Whether a unit waits for its version is looked at again when its turn comes.
        "to come": sorted([*consumer.ready, *consumer.held]),
        "quarantined": dict(consumer.quarantined),
        "finished": set(consumer.finished),
        "out": {key: (unit.lease_id, unit.gone) for key, unit in consumer.out.items()},
        "leases": {lease.id: _lease(lease) for lease in consumer.leases.values()},
        "leased": (
            consumer.num_leased,
            consumer.num_leased_experiences,
            consumer.num_leased_bytes,
        ),
        "counts": dataclasses.asdict(consumer.counts()) if has_limiter else None,
        "room": dataclasses.asdict(consumer.counts(num_present=num_present))
        if has_limiter
        else None,
        "departed": (consumer.tally.departed_inserts, consumer.tally.departed_samples)
        if has_limiter
        else None,
        "timeline": (timeline.safe_step, timeline.last_step),
        "retained": {step: sorted(seqs) for step, seqs in timeline._seqs.items()},
    }


def _lease(lease: Lease) -> dict[str, Any]:
    found = {field.name: getattr(lease, field.name) for field in dataclasses.fields(lease)}
    found["units"] = [dataclasses.asdict(unit) for unit in lease.units]
    if not lease.world_size:
        for unit in found["units"]:
            del unit["probability"], unit["stale"]
    return {**found, "part_sizes": list(lease.part_sizes)}
