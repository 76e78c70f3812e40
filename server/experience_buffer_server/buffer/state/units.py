"""From a consumer's unit numbers to the entries of the buffer and back, and what is known of them.

A unit's number is the seq of its experience, or the id of its group. Belongs to one buffer and its
event loop. No rules about delivery, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.contents import Contents
from experience_buffer_server.buffer.state.group_table import Entry, Group
from experience_buffer_server.sampling.staleness import Age
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.settings.consumer import ConsumerSettings, SelectorSettings
from experience_buffer_server.store.interface import MAX_PRIORITY

_ENVELOPE_BYTES = 192
"""What travels with an experience besides payload, uid and group key, at most."""
_COMPUTED_BYTES = 320
"""Most that the computed tensors take besides their values: their entries in the tensor table."""
_COMPUTED_BYTES_PER_TOKEN = 4 + 4 + 1
"""Advantage, return, and a mask where none was pushed."""


def members_of(contents: Contents, settings: ConsumerSettings, key: int) -> list[Entry]:
    """The experiences of a unit that are staying; none where it has left, or was set aside."""
    if settings.unit == "item":
        entry = contents.by_seq(key)
        if entry is None or not entry.is_staying or entry.damage:
            return []
        return [entry]
    group = contents.groups.by_id(key)
    if group is None or group.damage:
        return []
    return [entry for entry in group.votes if entry.is_staying]


def unit_of(key: int, entries: Iterable[Entry], *, computes: bool) -> Unit:
    """The unit of this number and these entries, about to be delivered.

    Args:
        key: Its number.
        entries: Its experiences.
        computes: Whether the buffer has an estimator now.
    """
    seqs = []
    num_bytes = num_tokens = message_bytes = 0
    for entry in entries:
        record = entry.record
        seqs.append(record.seq)
        num_bytes += record.payload_bytes
        num_tokens += record.response_tokens
        message_bytes += _message_bytes(entry, computes)
    seqs.sort()
    return Unit(
        key=key,
        seqs=tuple(seqs),
        num_bytes=num_bytes,
        num_tokens=num_tokens,
        message_bytes=message_bytes,
    )


def _message_bytes(entry: Entry, computes: bool) -> int:
    """Most that an experience takes in a message, in either format."""
    record = entry.record
    size = _ENVELOPE_BYTES + record.payload_bytes + _utf8_bytes(record.uid)
    if entry.group is not None:
        size += _utf8_bytes(entry.group.row.key)
    if entry.magnitude or computes:
        size += _COMPUTED_BYTES + _COMPUTED_BYTES_PER_TOKEN * record.response_tokens
    return size


def key_of(settings: ConsumerSettings, entry: Entry) -> int:
    """The number of the unit that an entry belongs to; 0: to none."""
    if settings.unit == "item":
        return entry.record.seq
    return 0 if entry.group is None else entry.group.row.id


def units_of(settings: ConsumerSettings, group: Group) -> list[int]:
    """The numbers of the units that a group's experiences make up."""
    if settings.unit == "group":
        return [group.row.id]
    return [entry.record.seq for entry in group.votes]


def age_of(entries: Sequence[Entry]) -> Age:
    """How old a unit is: by its oldest member, and by the versions of all."""
    records = [entry.record for entry in entries]
    lowest = [record.min_version for record in records if record.min_version is not None]
    highest = [record.max_version for record in records if record.max_version is not None]
    return Age(
        min_version=min(lowest, default=None),
        max_version=max(highest, default=None),
        push_time=min(record.push_time for record in records),
    )


def value_of(selector: SelectorSettings, entries: Sequence[Entry]) -> float:
    """What a selector chooses a unit by; of a group, the mean of its members. Always finite or -inf."""
    kind = selector.kind
    if kind in ("fifo", "lifo", "uniform"):
        return 0.0
    if kind in ("freshest", "staleness"):
        version = age_of(entries).min_version
        return -math.inf if version is None else float(version)
    if kind == "advantage":
        return math.fsum(entry.magnitude for entry in entries) / len(entries)
    if kind != "prioritized" and selector.key != "priority":
        return math.fsum(_key(selector.key, entry) for entry in entries) / len(entries)
    priorities = (min(entry.record.priority, MAX_PRIORITY) for entry in entries)
    return math.fsum(priorities) / len(entries)


def _key(name: str, entry: Entry) -> float:
    if name == "reward":
        return entry.record.reward or 0.0
    return float(entry.record.response_tokens)


def _utf8_bytes(text: str) -> int:
    """How many bytes a text takes in a message."""
    return len(text) if text.isascii() else len(text.encode())


def num_deliverable(contents: Contents, consumer: Consumer) -> int:
    """The consumer's units in the buffer, also those that aren't whole, computed or consumed yet.

    Not those whose advantages can't be computed, that can't be read, or whose group was dropped:
    nobody gets them, so pushes must not wait until they are sampled.
    """
    by_item = consumer.settings.unit == "item"
    num_present = contents.num_items if by_item else len(contents.groups)
    return num_present - _num_out_of_reach(contents, consumer)


def _num_out_of_reach(contents: Contents, consumer: Consumer) -> int:
    """Those that it can't get, but for what it is done with, or is kept from: that counts elsewhere.

    What it has consumed may be found damaged when another consumer is to get it.
    """
    keys = {key_of(consumer.settings, entry) for entry in contents.quarantined.values()}
    keys.discard(0)
    for group in contents.groups.dropped_groups:
        # Somebody else may still hold some of it.
        of_group = units_of(consumer.settings, group)
        keys.update(key for key in of_group if key not in consumer.out)
    idle = (consumer.finished, consumer.held, consumer.quarantined)
    return sum(not any(key in others for others in idle) for key in keys)
