"""How experiences leave: consumed by every consumer, dropped, or deleted.

What leaves is remembered for a while, so that a repeated push is recognised and a late member of
a finished group is refused. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from experience_buffer_server.contents import Contents
from experience_buffer_server.groups import Entry, Group, groups_of
from experience_buffer_server.sampling.queue import Unit
from experience_buffer_server.store.base import ProgressRow, WriteBatch

LeaveReason = Literal["consumed", "discarded", "deleted"]
"""Why an experience leaves; a deleted one can be pushed again."""


class Retirement:
    """Takes entries out of the contents and the store. Not thread-safe.

    `leave` adds the removal to a batch; `forget` follows once the batch is on disk, `stay` if it
    has failed.
    """

    def __init__(self, buffer_id: int, contents: Contents, consumers: Collection[str]) -> None:
        self._id = buffer_id
        self._contents = contents
        self._consumers = consumers
        """A live view: the names of the buffer's consumers now."""
        self._progress: dict[int, ProgressRow] = {}

    def restore(self, rows: Iterable[ProgressRow]) -> None:
        """Take over the progress as stored."""
        for row in rows:
            entry = self._contents.by_seq(row.seq)
            if entry is not None:
                entry.acked = frozenset(row.acked)
                self._progress[row.seq] = row

    def num_deliveries(self, seq: int, consumer: str) -> int:
        """Deliveries of an experience to a consumer that ended without an ack."""
        row = self._progress.get(seq)
        return 0 if row is None else row.num_deliveries.get(consumer, 0)

    def note_delivery(self, batch: WriteBatch, unit: Unit, consumer: str) -> None:
        """Count a delivery that ended without an ack."""
        for entry in self._contents.by_seqs(unit.seqs):
            row = self._row(entry)
            row.num_deliveries[consumer] = unit.num_deliveries
            batch.put_progress(self._id, row)

    def is_done(self, entry: Entry) -> bool:
        """Every consumer has consumed it."""
        return entry.acked.issuperset(self._consumers)

    def note_consumed(self, batch: WriteBatch, seqs: Iterable[int], consumer: str) -> list[Entry]:
        """Mark as consumed by one consumer; what all have consumed, returned, leaves."""
        done = []
        for entry in self._contents.by_seqs(seqs):
            entry.acked |= {consumer}
            if self.is_done(entry):
                done.append(entry)
            else:
                row = self._row(entry)
                row.acked = sorted(entry.acked)
                batch.put_progress(self._id, row)
        return self.leave(batch, done, "consumed")

    def revert_consumed(self, seqs: Iterable[int], consumer: str, leaving: Sequence[Entry]) -> None:
        """The batch failed: unmark."""
        for entry in self._contents.by_seqs(seqs):
            entry.acked -= {consumer}
            self._row(entry).acked = sorted(entry.acked)
        self.stay(leaving, "consumed")

    def leave(
        self, batch: WriteBatch, entries: Sequence[Entry], reason: LeaveReason
    ) -> list[Entry]:
        """Remove entries, and with a group's last experience its tombstones and its row.

        Returns:
            All that leaves with this batch: not what another batch removes already.
        """
        leaving = [entry for entry in entries if not entry.leaving]
        for entry in leaving:
            entry.leaving = True
        now = time.time()
        for group in groups_of(leaving):
            if group.is_open:
                self._leave_open(batch, group, leaving, reason)
            else:
                self._note_leaving(group, leaving, reason)
                leaving += self._leave_closed(batch, group, reason, now)
        for entry in leaving:
            record = entry.record
            batch.remove(self._id, record)
            if reason != "deleted":
                batch.remember(self._id, "uid", record.uid, record.digest, now)
        return leaving

    @staticmethod
    def _note_leaving(group: Group, leaving: Sequence[Entry], reason: LeaveReason) -> None:
        """A closed group's size is that of its members, unless some were consumed."""
        if reason == "consumed":
            group.has_consumed = True
        else:
            gone = [entry for entry in leaving if entry.group is group]
            group.row.size -= sum(not entry.record.tombstone for entry in gone)

    def _leave_open(
        self, batch: WriteBatch, group: Group, leaving: Sequence[Entry], reason: LeaveReason
    ) -> None:
        """What is consumed still counts towards the size; without a size there is nothing to keep."""
        if reason == "consumed":
            group.row.num_consumed += sum(entry.group is group for entry in leaving)
        rest = any(not entry.leaving for entry in group.members)
        if not rest and not (group.row.size and group.row.num_consumed):
            batch.delete_group(self._id, group.row.id)
        elif reason == "consumed":
            batch.put_group(self._id, group.row)

    def _leave_closed(
        self, batch: WriteBatch, group: Group, reason: LeaveReason, now: float
    ) -> list[Entry]:
        """With the last experience go the tombstones; how the group closed is remembered."""
        rest = [entry for entry in group.members if not entry.leaving]
        if not all(entry.record.tombstone and entry.durable for entry in rest):
            if reason != "consumed":
                batch.put_group(self._id, group.row)
            return []
        for entry in rest:
            entry.leaving = True
        batch.delete_group(self._id, group.row.id)
        if reason != "deleted":
            batch.remember(self._id, "group", group.row.key, group.row.closed.encode(), now)
        return rest

    def forget(self, leaving: Sequence[Entry]) -> None:
        """The batch is on disk: the entries, and groups that are over, are gone."""
        for entry in leaving:
            self._remove(entry)
        for group in groups_of(leaving):
            if group.is_over:
                self._contents.groups.remove(group)

    def stay(self, leaving: Sequence[Entry], reason: LeaveReason) -> None:
        """The batch failed: the entries are still here."""
        for entry in leaving:
            entry.leaving = False
            if entry.group is None:
                continue
            if reason == "consumed" and entry.group.is_open:
                entry.group.row.num_consumed -= 1
            elif reason != "consumed" and not entry.group.is_open:
                entry.group.row.size += not entry.record.tombstone

    def _remove(self, entry: Entry) -> None:
        self._contents.remove(entry)
        self._progress.pop(entry.record.seq, None)
        if entry.group is not None:
            entry.group.members.remove(entry)
            entry.group.num_durable -= entry.durable

    def _row(self, entry: Entry) -> ProgressRow:
        seq = entry.record.seq
        return self._progress.setdefault(seq, ProgressRow(seq=seq, acked=sorted(entry.acked)))
