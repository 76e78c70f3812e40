"""What decides what is delivered: as a buffer shows it, and as the model has it."""

from __future__ import annotations

from typing import Any

from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.state.consumers import Consumer
from tests.models.model import Model
from tests.models.model_batch import counted, difference


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
