"""How each row becomes bytes and is read back, whatever engine keeps them. Pure.

Most rows are the values of their fields, in the order of their classes. A change here or there that an
older or newer server would misread needs another format version of each engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final

import msgpack

from experience_buffer_server.store.record import Record, cut_of
from experience_buffer_server.store.rows import (
    AdvantageRow,
    BufferRow,
    ConsumerRow,
    DepartedRow,
    GroupRow,
    LeaseRow,
    ProgressRow,
)

_FREED: Final = {False: b"\0", True: b"\1"}
Pack = Callable[[Any], bytes]
"""Anything that encodes plain data with msgpack: `msgpack.Packer().pack`."""


def _values_of(row: type) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(field.name for field in fields(row)))


_BUFFER: Final = _values_of(BufferRow)
_GROUP: Final = _values_of(GroupRow)
_LEASE: Final = _values_of(LeaseRow)
_PROGRESS: Final = _values_of(ProgressRow)
_CONSUMER: Final = _values_of(ConsumerRow)
_NUM_PROGRESS_FIELDS: Final = len(fields(ProgressRow))
_NUM_LATER: Final = 2
"""Fields of leases and progress that came later: few rows have them, others are stored as before."""
_NUM_LAST: Final = 1
"""Those of progress that came after them."""


def encode_buffer(row: BufferRow, pack: Pack) -> bytes:
    """A buffer's row as stored."""
    return pack(_BUFFER(row))


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


def encode_group(row: GroupRow, pack: Pack) -> bytes:
    """A group's row as stored."""
    return pack(_GROUP(row))


def encode_lease(row: LeaseRow, pack: Pack) -> bytes:
    """A lease as stored."""
    values = _LEASE(row)
    return pack(values if row.probabilities or row.stale else values[:-_NUM_LATER])


def encode_progress(row: ProgressRow, pack: Pack) -> bytes:
    """The consumers' progress with one experience as stored."""
    values = _PROGRESS(row)
    if row.trained:
        return pack(values)
    values = values[:-_NUM_LAST]
    return pack(values if row.passed_over or row.uncounted else values[:-_NUM_LATER])


def encode_consumer(row: ConsumerRow, pack: Pack) -> bytes:
    """What is to be known of a consumer as stored."""
    return pack(_CONSUMER(row))


def encode_advantages(row: AdvantageRow, pack: Pack) -> bytes:
    """What was computed for one experience as stored."""
    # Where they are the same, as with most estimators, they are stored once.
    returns = None if row.returns == row.advantages else row.returns
    return pack((row.seq, row.advantages, returns, row.details))


# Each decoder raises ValueError (msgpack's errors are of that kind) or TypeError for bytes that are
# not such a row.


def _unpack(value: bytes | memoryview) -> Any:
    return msgpack.unpackb(value, strict_map_key=False)


def decode_buffer(value: bytes | memoryview) -> BufferRow:
    """Read a buffer's row back."""
    return BufferRow(*_unpack(value))


def decode_record(value: bytes | memoryview) -> Record:
    """Read an index row back."""
    # Not by its constructor: a million are read at the start, and that costs three times all the rest.
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
    return GroupRow(*_unpack(value))


def decode_lease(value: bytes | memoryview) -> LeaseRow:
    """Read a lease back."""
    return LeaseRow(*_unpack(value))


def decode_progress(value: bytes | memoryview) -> ProgressRow:
    """Read the consumers' progress with one experience back."""
    values = _unpack(value)
    row = ProgressRow(*values)
    if len(values) < _NUM_PROGRESS_FIELDS - _NUM_LAST:
        # Before there was the field, one that had passed it over unused was known by this alone.
        row.passed_over = [name for name in row.acked if row.times_sampled.get(name) == 0]
    return row


def encode_departed(
    note: bytes, record: bytes, progress: bytes, *, uid_freed: bool = False
) -> bytes:
    """A row of what has left; `record` and `progress` as they were stored, the latter empty for none."""
    packed: bytes = msgpack.packb((note, record, progress))
    return _FREED[uid_freed] + packed


def is_uid_freed(value: bytes | memoryview) -> bool:
    """Whether the uid of a row of what has left may be another experience's."""
    return value[:1] == _FREED[True]


def freed(value: bytes) -> bytes:
    """The same row once its uid may be another experience's."""
    return _FREED[True] + value[1:]


def decode_departed(value: bytes | memoryview) -> DepartedRow:
    """Read a row of what has left back."""
    note, record, progress = msgpack.unpackb(value[1:])
    return DepartedRow(
        decode_record(record),
        decode_progress(progress) if progress else None,
        note,
        is_uid_freed(value),
    )


def decode_consumer(value: bytes | memoryview) -> ConsumerRow:
    """Read back what is to be known of a consumer."""
    return ConsumerRow(*_unpack(value))


def decode_advantages(value: bytes | memoryview) -> AdvantageRow:
    """Read back what was computed for one experience."""
    seq, advantages, returns, details = _unpack(value)
    return AdvantageRow(seq, advantages, advantages if returns is None else returns, details)
