"""How each row becomes bytes and is read back, whatever engine keeps them. Pure.

A change here that an older or newer server would misread needs another format version of each engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack

from experience_buffer_server.store.record import Record, cut_of
from experience_buffer_server.store.rows import (
    AdvantageRow,
    BufferRow,
    ConsumerRow,
    GroupRow,
    LeaseRow,
    ProgressRow,
)

Pack = Callable[[Any], bytes]
"""Anything that encodes plain data with msgpack: `msgpack.Packer().pack`."""


def encode_buffer(row: BufferRow, pack: Pack) -> bytes:
    """A buffer's row as stored."""
    return pack((row.id, row.name, row.config, row.policy_version, row.create_time, row.moments))


def encode_record(r: Record, pack: Pack) -> bytes:
    """An index row as stored."""
    batch, task, run, step = r.parts
    return pack(
        (
            r.seq,
            r.uid,
            batch,
            task,
            run,
            step,
            r.digest,
            r.group_id,
            r.tombstone,
            r.reward,
            r.response_tokens,
            r.payload_bytes,
            r.min_version,
            r.max_version,
            r.push_time,
            r.note,
            r.fields,
            r.priority,
            r.version,
        )
    )


def encode_group(g: GroupRow, pack: Pack) -> bytes:
    """A group's row as stored."""
    return pack((g.id, g.key, g.size, g.open_time, g.closed, g.note, g.quarantined, g.num_consumed))


def encode_lease(row: LeaseRow, pack: Pack) -> bytes:
    """A lease as stored; without probabilities and marks, which few have, as they were before these."""
    fields = (
        row.id,
        row.consumer,
        row.units,
        row.deadline,
        row.state,
        row.num_experiences,
        row.part_sizes,
        row.acked_parts,
    )
    marks = (row.probabilities, row.stale) if row.probabilities or row.stale else ()
    return pack(fields + marks)


def encode_progress(row: ProgressRow, pack: Pack) -> bytes:
    """The consumers' progress with one experience; few have the last two fields, which came later."""
    fields = row.seq, row.acked, row.num_deliveries, row.times_sampled, row.steps, row.quarantined
    later = (row.passed_over, row.uncounted) if row.passed_over or row.uncounted else ()
    return pack(fields + later)


def encode_consumer(row: ConsumerRow, pack: Pack) -> bytes:
    """What is to be known of a consumer as stored."""
    return pack(
        (row.name, row.safe_step, row.last_step, row.departed_inserts, row.departed_samples)
    )


def encode_advantages(row: AdvantageRow, pack: Pack) -> bytes:
    """What was computed for one experience as stored."""
    # Where they are the same, as with most estimators, they are stored once.
    returns = None if row.returns == row.advantages else row.returns
    return pack((row.seq, row.advantages, returns, row.details))


# Each decoder raises ValueError (msgpack's errors are of that kind) or TypeError for bytes that are
# not such a row. They are written out because a million records are read at the start.


def _unpack(value: bytes | memoryview) -> Any:
    return msgpack.unpackb(value, strict_map_key=False)


def decode_buffer(value: bytes | memoryview) -> BufferRow:
    """Read a buffer's row back."""
    id_, name, config, policy_version, create_time, moments = _unpack(value)
    return BufferRow(
        id=id_,
        name=name,
        config=config,
        policy_version=policy_version,
        create_time=create_time,
        moments=moments,
    )


def decode_record(value: bytes | memoryview) -> Record:
    """Read an index row back."""
    # Not by its constructor: sixteen keywords cost three times as much as all the rest.
    r = Record.__new__(Record)
    (
        r.seq, r.uid, batch, task, _, _, digest, r.group_id, r.tombstone, r.reward,
        r.response_tokens, r.payload_bytes, r.min_version, r.max_version, r.push_time, r.note,
        r.fields, r.priority, r.version,
    ) = msgpack.unpackb(value)  # fmt: skip
    r.cut = cut_of(batch, task)
    r.digest_number = int.from_bytes(digest, "big")
    return r


def decode_group(value: bytes | memoryview) -> GroupRow:
    """Read a group's row back."""
    id_, key, size, open_time, closed, note, quarantined, num_consumed = _unpack(value)
    return GroupRow(
        id=id_,
        key=key,
        size=size,
        open_time=open_time,
        closed=closed,
        note=note,
        quarantined=quarantined,
        num_consumed=num_consumed,
    )


def decode_lease(value: bytes | memoryview) -> LeaseRow:
    """Read a lease back."""
    fields = _unpack(value)
    id_, consumer, units, deadline, state, num_experiences, part_sizes, acked_parts, *marks = fields
    probabilities, stale = marks or ([], [])
    return LeaseRow(
        id=id_,
        consumer=consumer,
        units=units,
        deadline=deadline,
        state=state,
        num_experiences=num_experiences,
        part_sizes=part_sizes,
        acked_parts=acked_parts,
        probabilities=probabilities,
        stale=stale,
    )


def decode_progress(value: bytes | memoryview) -> ProgressRow:
    """Read the consumers' progress with one experience back."""
    seq, acked, num_deliveries, times_sampled, steps, quarantined, *rest = _unpack(value)
    # Before there was the field, one that had passed it over unused was known by this alone.
    unused = [name for name in acked if times_sampled.get(name) == 0]
    passed_over, uncounted = rest or (unused, [])
    return ProgressRow(
        seq=seq,
        acked=acked,
        num_deliveries=num_deliveries,
        times_sampled=times_sampled,
        steps=steps,
        quarantined=quarantined,
        passed_over=passed_over,
        uncounted=uncounted,
    )


def decode_consumer(value: bytes | memoryview) -> ConsumerRow:
    """Read back what is to be known of a consumer."""
    name, safe_step, last_step, departed_inserts, departed_samples = _unpack(value)
    return ConsumerRow(
        name=name,
        safe_step=safe_step,
        last_step=last_step,
        departed_inserts=departed_inserts,
        departed_samples=departed_samples,
    )


def decode_advantages(value: bytes | memoryview) -> AdvantageRow:
    """Read back what was computed for one experience."""
    seq, advantages, returns, details = _unpack(value)
    return AdvantageRow(
        seq=seq,
        advantages=advantages,
        returns=advantages if returns is None else returns,
        details=details,
    )
