"""A start after damage: what the store could not read back is missed, and what it leaves is named.

| damaged row | what follows |
|---|---|
| record | the experience is lost, its payload stays; its group is set aside, unless it is open and knows its size: then it waits for its member as for any other |
| group | rebuilt from its members and set aside: whether it was whole isn't known |
| lease | its experiences are offered again, its acks are refused |
| progress | the experience is offered again to every consumer: twice rather than never |
| consumer | its last step, its safe step and its limiter's past are forgotten |
| magnitude | read from the advantages, else computed again |
| buffer | its copy is used |
"""

from __future__ import annotations

import logging
from collections import defaultdict

from experience_buffer.eid import EID
from experience_buffer_server.buffer.flow import Flow
from experience_buffer_server.buffer.state.entries import Group
from experience_buffer_server.buffer.state.group_keys import group_key
from experience_buffer_server.store.interface import (
    DepartedRow,
    GroupRow,
    Record,
    Store,
    StoredBuffer,
    departed_name,
)

_log = logging.getLogger(__name__)


def rebuild_groups(flow: Flow, state: StoredBuffer) -> None:
    """Add to the state the groups whose rows can't be read and whose members can."""
    known = {row.id for row in state.groups}
    group_by = flow.state.settings.group_by
    members: defaultdict[int, list[Record]] = defaultdict(list)
    if not state.damaged.groups or group_by == "none":
        return
    for record in state.records:
        if record.group_id and record.group_id not in known:
            members[record.group_id].append(record)
    batch = flow.state.changes.batch()
    for group_id, records in members.items():
        row = GroupRow(
            id=group_id,
            key=group_key(records[0], group_by),
            size=len(records),
            open_time=min(record.push_time for record in records),
            closed="whole",
            note="its row can't be read back, so nobody knows whether it is whole; drop the group, "
            "or restore the store from a snapshot",
            quarantined=True,
        )
        state.groups.append(row)
        batch.put_group(flow.state.id, row)
        _log.error("buffer %r: set aside group %r: %s", flow.state.name, row.key, row.note)
    if members:
        flow.state.changes.spawn(batch)


def reserve_numbers(flow: Flow, state: StoredBuffer) -> None:
    """Give no number again that was given: also not one of a row that can't be read."""
    flow.state.contents.reserve(state.last_seq)
    for group_id in state.damaged.groups:
        flow.state.contents.groups.reserve(group_id)
    for lease_id in state.damaged.leases:
        flow.state.leases.reserve(lease_id)


def miss_members(flow: Flow, state: StoredBuffer, store: Store) -> None:
    """Set the groups aside that have lost members: records that can't be read back.

    A payload without a record tells by its key whose it was; it takes a look at the uids of all
    payloads. Where there is no such payload, it may have been a member of any closed group that has
    fewer than it should.
    """
    if not state.damaged.any_records or flow.state.settings.group_by == "none":
        return
    known = {record.uid for record in state.records}
    # What has left and isn't archived yet still has its payload.
    for seq, row in store.departed_rows(flow.state.id):
        known |= {departed_name(seq)} | (
            {row.record.uid} if isinstance(row, DepartedRow) else set()
        )
    lost = [uid for uid in store.payload_uids(flow.state.id) if uid not in known]
    keys = [_group_keys(uid, flow.state.settings.group_by) for uid in lost]
    missing = {key: uid for uid, possible in zip(lost, keys, strict=True) for key in possible}
    known_keys = {group.row.key for group in flow.state.contents.groups}
    num_unexplained = len(state.damaged.records) - sum(not known_keys.isdisjoint(k) for k in keys)
    batch = flow.state.changes.batch()
    for group in _lacking(flow):
        if group.row.key in missing:
            what = f"the record of its member {missing[group.row.key]!r} can't be read back"
        elif num_unexplained > 0 and not group.is_open:
            what = (
                f"{num_unexplained} records of the buffer can't be read back, nor what they were of, "
                "and this group has fewer members than it should"
            )
        else:
            continue
        group.row.quarantined = True
        group.row.note = f"{what}; drop the group, or restore the store from a snapshot"
        batch.put_group(flow.state.id, group.row)
        _log.error(
            "buffer %r: set aside group %r: %s", flow.state.name, group.row.key, group.row.note
        )
    flow.state.changes.spawn(batch)


def _group_keys(uid: str, group_by: str) -> list[str]:
    """The keys of the groups that the experience with this uid may belong to.

    A uid ends with run, step and suffix; where its batch ends isn't known if its task may hold a
    `/`. Of one with another `/` in its suffix the keys are no group's.
    """
    text, run, step, _ = ("///" + uid).rsplit("/", 3)
    parts = text.removeprefix("///").split("/")
    last = {"task": "", "run": f"/{run}", "step": f"/{step}"}[group_by]
    return [
        EID("/".join(parts[:end]), "/".join(parts[end:])).tid + last for end in range(1, len(parts))
    ]


def _lacking(flow: Flow) -> list[Group]:
    """Groups that have fewer members than they should have, and won't wait for them."""
    return [
        group
        for group in flow.state.contents.groups
        if group.row.closed != "dropped"
        and not group.row.quarantined
        and (not group.row.size or (not group.is_open and group.num_members < group.row.size))
    ]
