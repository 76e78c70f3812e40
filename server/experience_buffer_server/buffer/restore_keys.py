"""The keys of groups that a server stored which wrote a task into them as it was.

There `EID("0/eval", 1)` and `EID(0, "eval/1")` had one key, and one group.
"""

from __future__ import annotations

import logging
from collections import defaultdict

from experience_buffer.eid import text_of_key
from experience_buffer_server.buffer.flow import Flow
from experience_buffer_server.buffer.state.group_keys import group_key
from experience_buffer_server.store.interface import StoredBuffer

_log = logging.getLogger(__name__)


def name_groups(flow: Flow, state: StoredBuffer) -> None:
    """Give such groups the keys that their members have now, so that later members find them.

    One with members of several tasks is set aside: what was or would be computed of it compares
    answers to different prompts. One without members keeps its key.
    """
    group_by = flow.state.settings.group_by
    num_slashes = 1 if group_by == "task" else 2
    odd = {
        row.id: row
        for row in state.groups
        if (row.key.count("/") > num_slashes or "%2" in row.key)
        and row.closed != "dropped"
        and not row.quarantined
    }
    if not odd or group_by == "none":
        return
    keys: defaultdict[int, set[str]] = defaultdict(set)
    for record in state.records:
        if record.group_id in odd:
            keys[record.group_id].add(group_key(record, group_by))
    batch, num_changed = flow.state.changes.batch(), 0
    for group_id, found in keys.items():
        row = odd[group_id]
        if found == {row.key} or {text_of_key(key) for key in found} != {row.key}:
            continue
        if len(found) == 1:
            row.key = found.pop()
        else:
            row.quarantined = True
            row.note = (
                f"an earlier version took the tasks {', '.join(map(repr, sorted(found)))} for one; "
                "drop the group"
            )
            _log.error("buffer %r: set aside group %r: %s", flow.state.name, row.key, row.note)
        batch.put_group(flow.state.id, row)
        num_changed += 1
    if num_changed:
        flow.state.changes.spawn(batch)
