"""All that a buffer knows, to be compared before and after a restart at rest, and with the model.

Left out of the former is what counts since the start of the server or tells of the time, and what
nobody can ask for again: what a lease that isn't shared was told of its units.
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
from tests.models.model import Model
from tests.models.model_batch import counted, difference

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
    # They are about a batch of the size that was asked for last, since the start.
    "asked_batch_size",
    "waiting_for",
    "wait_reason",
    "full_in_seconds",
    "full_by",
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
    for name in ("grant_time", "holders", "policy_version"):
        del found[name]  # A restart forgets them.
    found["units"] = [dataclasses.asdict(unit) for unit in lease.units]
    if not lease.world_size:
        for unit in found["units"]:
            del unit["probability"], unit["stale"]
    return {**found, "part_sizes": list(lease.part_sizes)}


# --- what decides what is delivered: as a buffer shows it, and as the model has it


def observed(buffer: Buffer) -> dict[str, Any]:
    buffer.state.check()
    contents = buffer.state.contents
    found: dict[str, Any] = {
        "members": {e.record.uid: e.record.priority for e in contents},
        "order": [e.record.uid for e in sorted(contents, key=lambda e: e.record.seq)],
        "num_items": contents.num_items,
        "num_excess_bytes": contents.num_bytes - sum(e.record.payload_bytes for e in contents),
        "groups": {group.row.key: group.row.closed for group in contents.groups},
        "consumers": sorted(buffer.state.consumers),
    }
    for name, consumer in buffer.state.consumers.items():
        found[name] = _observed_of(buffer, consumer)
    return found


def _observed_of(buffer: Buffer, consumer: Consumer) -> dict[str, Any]:
    units, timeline = _units(buffer, consumer), consumer.timeline
    dropped = {g.row.key for g in buffer.state.contents.groups if g.row.closed == "dropped"}
    dropped |= {
        e.record.uid
        for g in buffer.state.contents.groups
        if g.row.key in dropped
        for e in g.members
    }
    tally, limiter = consumer.tally.counts(), consumer.settings.limiter
    return {
        "available": sorted(units[key] for key in (*consumer.ready, *consumer.held)),
        "out": sorted(units[key] for key in consumer.out),
        "quarantined": sorted(units[key] for key in consumer.quarantined),
        # Of a dropped group it makes no difference any more.
        "finished": sorted(units[key] for key in consumer.finished if units[key] not in dropped),
        "leases": {
            lease.id: (lease.deadline, lease.acked_parts)
            for lease in buffer.state.leases.of_consumer(consumer.name)
        },
        "num_leased": (consumer.num_leased, consumer.num_leased_experiences),
        "timeline": (timeline.num_retained, timeline.safe_step, timeline.last_step),
        "limiter": limiter
        and (
            tally.inserts - tally.deletes,
            tally.inserts * limiter.samples_per_insert - tally.samples,
        ),
    }


def _units(buffer: Buffer, consumer: Consumer) -> dict[int, str]:
    """Names of units, as the model has them, by number."""
    if consumer.settings.unit == "item":
        return {entry.record.seq: entry.record.uid for entry in buffer.state.contents}
    return {group.row.id: group.row.key for group in buffer.state.contents.groups}


def expected(model: Model) -> dict[str, Any]:
    """What `observed` finds where the model is right."""
    found: dict[str, Any] = {
        "members": {m.uid: m.priority for m in model.members().values()},
        "order": [m.uid for m in sorted(model.members().values(), key=lambda m: m.number)],
        "num_items": sum(not m.dead for m in model.members().values()),
        "num_excess_bytes": 0,
        "groups": {group.key: group.closed for group in model.groups.values()},
        "consumers": sorted(model.places),
    }
    for name in model.places:
        found[name] = _expected_of(model, name)
    return found


def _expected_of(model: Model, name: str) -> dict[str, Any]:
    place, leased, units = model.places[name], model.leased(name), model.stored(name)
    retained = [step for unit, ms in units.items() for step in place.retained(unit) * len(ms)]
    num_counted = len(counted(model, name))
    return {
        "available": sorted(model.available(name)),
        "out": sorted(set(leased)),
        "quarantined": sorted(place.quarantined),
        "finished": sorted(
            unit
            for unit, members in units.items()
            if place.consumed(unit) and unit not in leased and members[0].group.closed != "dropped"
        ),
        "leases": {i: (lease.deadline, lease.acked) for i, lease in model.leases_of(name).items()},
        "num_leased": (len(leased), len(model.experiences(name, leased))),
        "timeline": (len(retained), place.safe, place.last),
        "limiter": place.reader.get("limiter")
        and (num_counted, difference(model, name, num_counted)),
    }
