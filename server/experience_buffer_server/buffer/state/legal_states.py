"""Which combinations of states are legal, in one place. Looks at everything: for tests.

| an experience | is |
|---|---|
| that isn't on disk | neither available, computed, changed nor acknowledged |
| that is available | on disk, lacks no field that the estimator needs, and isn't being changed |
| that is a tombstone | never available, computed or counted by size, and lacks nothing |
| in a group | one of its members, and the group is that of its record |

| a unit of a consumer | is |
|---|---|
| ready | nowhere else; all of it is there, on disk, sound, and available unless the consumer is raw |
| held | nowhere else; it waits for its policy version |
| out | neither ready nor held; with a lease, it is in the consumer's open lease of that number |
| quarantined | neither ready nor held |
| finished | neither ready nor held: the consumer has nothing to do with it any more |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.contents import Contents
from experience_buffer_server.buffer.state.entries import Entry, Group
from experience_buffer_server.sampling.leases import LeaseTable


def illegal(contents: Contents, consumers: Iterable[Consumer], leases: LeaseTable) -> Iterator[str]:
    """What is wrong with a state between two steps, in words; nothing where all is legal."""
    for entry in contents:
        for problem in _of_entry(contents, entry):
            yield f"experience {entry.record.uid!r} {problem}"
    for group in contents.groups:
        for problem in _of_group(contents, group):
            yield f"group {group.row.key!r} (id {group.row.id}) {problem}"
    for consumer in consumers:
        for problem in _of_consumer(contents, leases, consumer):
            yield f"consumer {consumer.name!r}: {problem}"
    records = [entry.record for entry in contents]
    counts = (
        sum(not record.tombstone for record in records),
        sum(record.payload_bytes for record in records),
    )
    if counts != (contents.num_items, contents.num_bytes):
        yield f"holds {counts} and counts {(contents.num_items, contents.num_bytes)} items and bytes"


def _of_entry(contents: Contents, entry: Entry) -> Iterator[str]:
    record = entry.record
    if contents.by_uid(record.uid) is not entry or contents.by_seq(record.seq) is not entry:
        yield "isn't what its uid and its number lead to"
    if not entry.durable and (entry.available or entry.computing or entry.changing or entry.acked):
        yield "is on its way to the disk, and available, computed, changed or acknowledged already"
    if entry.available and entry.missing:
        yield f"is available and lacks {entry.missing}"
    if entry.available and entry.changing:
        yield "is available while an annotation of it is on its way to the disk"
    if record.tombstone and (entry.available or entry.computing or entry.missing):
        yield "is a tombstone, and available, computed or waited for"
    if record.tombstone and record.payload_bytes:
        yield "is a tombstone with a payload"
    if bool(entry.missing) != (record.seq in contents.lacking):
        yield f"lacks {entry.missing or 'nothing'}, and is listed otherwise"
    if bool(entry.quarantine) != (record.seq in contents.quarantined):
        yield f"is quarantined for {entry.quarantine or 'nothing'}, and is listed otherwise"
    if entry.damage and not entry.quarantine:
        yield "is set aside and not quarantined"
    if entry.group is None:
        if record.group_id:
            yield f"has no group, and its record names {record.group_id}"
    elif entry.group.row.id != record.group_id or entry not in entry.group.members:
        yield "isn't a member of the group that its record names"


def _of_group(contents: Contents, group: Group) -> Iterator[str]:
    num_durable = sum(entry.durable for entry in group.members)
    if group.num_durable != num_durable:
        yield f"counts {group.num_durable} members on disk, and has {num_durable}"
    if any(contents.by_seq(e.record.seq) is not e for e in group.members):
        yield "has a member that isn't in the buffer"
    if group.is_open != (group in contents.groups.open_groups):
        yield f"is {group.row.closed or 'open'}, and listed otherwise"
    if not group.available or group.row.closed == "dropped":
        return
    if not group.is_whole:
        yield "is available and not whole"
    if not all(entry.available for entry in group.votes if entry.is_staying):
        yield "is available, and a member of it isn't"


def _of_consumer(contents: Contents, leases: LeaseTable, consumer: Consumer) -> Iterator[str]:
    places = {
        "held": consumer.held.keys(),
        "out": consumer.out.keys(),
        "quarantined": consumer.quarantined.keys(),
        "finished": consumer.finished,
    }
    for key in consumer.ready:
        yield from (
            f"unit {key} is ready and {name}" for name, keys in places.items() if key in keys
        )
        entries = contents.members_of(consumer.settings, key)
        if not entries:
            yield f"unit {key} is ready, and nothing of it stays"
        for entry in entries:
            if not (entry.durable and (entry.available or consumer.settings.raw)):
                yield f"unit {key} is ready, and its {entry.record.uid!r} isn't available"
    for key in consumer.held:
        for name in ("out", "quarantined", "finished"):
            if key in places[name]:
                yield f"unit {key} is held and {name}"
    yield from _of_leases(leases, consumer)


def _of_leases(table: LeaseTable, consumer: Consumer) -> Iterator[str]:
    leases = list(consumer.leases.values())
    known = table.of_consumer(consumer.name)
    if {lease.id for lease in leases} != {lease.id for lease in known}:
        yield f"has leases {sorted(consumer.leases)}, and the table {[one.id for one in known]}"
    for key, unit in consumer.out.items():
        if unit.key != key:
            yield f"unit {unit.key} is out as {key}"
        if unit.lease_id and unit not in getattr(consumer.leases.get(unit.lease_id), "units", ()):
            yield f"unit {key} is out with lease {unit.lease_id}, which isn't open or doesn't hold it"
    counts = (
        sum(len(lease.units) for lease in leases),
        sum(lease.num_experiences for lease in leases),
        sum(lease.num_bytes for lease in leases),
    )
    counted = (consumer.num_leased, consumer.num_leased_experiences, consumer.num_leased_bytes)
    if counts != counted:
        yield f"its leases hold {counts} units, experiences and bytes, and it counts {counted}"
