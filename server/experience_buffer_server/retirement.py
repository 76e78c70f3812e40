"""How experiences leave: consumed by every consumer, dropped, or deleted.

What leaves is remembered for a while, so that a repeated push is recognised and a late member of
a finished group is refused. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from experience_buffer_server.contents import Contents
from experience_buffer_server.groups import Entry, groups_of
from experience_buffer_server.sampling.queue import Unit
from experience_buffer_server.store.base import ProgressRow, WriteBatch


class Retirement:
    """Takes entries out of the contents and the store. Not thread-safe.

    `leave` adds the removal to a batch; `forget` follows once the batch is on disk.
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

    def note_consumed(self, batch: WriteBatch, seqs: Iterable[int], consumer: str) -> None:
        """Mark as consumed by one consumer; what all have consumed leaves with this batch."""
        done = []
        for entry in self._contents.by_seqs(seqs):
            entry.acked |= {consumer}
            if self.is_done(entry):
                done.append(entry)
            else:
                row = self._row(entry)
                row.acked = sorted(entry.acked)
                batch.put_progress(self._id, row)
        self.leave(batch, done)

    def apply_consumed(self, seqs: Iterable[int]) -> None:
        """The batch is on disk: forget what left with it."""
        self.forget([entry for entry in self._contents.by_seqs(seqs) if self.is_done(entry)])

    def revert_consumed(self, seqs: Iterable[int], consumer: str) -> None:
        """The batch failed: unmark."""
        for entry in self._contents.by_seqs(seqs):
            entry.acked -= {consumer}

    def leave(
        self, batch: WriteBatch, entries: Sequence[Entry], *, remember_uids: bool = True
    ) -> None:
        """Remove entries, and with a group's last experience its tombstones and its row."""
        now = time.time()
        leaving = {id(entry) for entry in entries}
        buried = [
            (group, [e for e in group.members if e.record.tombstone and id(e) not in leaving])
            for group in groups_of(entries)
        ]
        for group, tombstones in buried:
            rest = sum(id(entry) not in leaving for entry in group.members)
            if group.is_open or rest > len(tombstones):
                tombstones.clear()
                continue
            batch.delete_group(self._id, group.row.id)
            batch.remember(self._id, "group", group.row.key, group.row.closed.encode(), now)
        for entry in chain(entries, *(tombstones for _, tombstones in buried)):
            record = entry.record
            batch.remove(self._id, record)
            if remember_uids:
                batch.remember(self._id, "uid", record.uid, record.digest, now)

    def forget(self, entries: Sequence[Entry]) -> None:
        """The batch is on disk: the entries, and groups that are left empty, are gone."""
        for entry in entries:
            self._remove(entry)
        for group in groups_of(entries):
            if not group.is_open and not group.votes:
                for entry in list(group.members):
                    self._remove(entry)
            if not group.members:
                self._contents.groups.remove(group)

    def _remove(self, entry: Entry) -> None:
        if self._contents.by_seq(entry.record.seq) is not entry:
            return
        self._contents.remove(entry)
        self._progress.pop(entry.record.seq, None)
        if entry.group is not None:
            entry.group.members.remove(entry)
            entry.group.num_durable -= entry.durable

    def _row(self, entry: Entry) -> ProgressRow:
        seq = entry.record.seq
        return self._progress.setdefault(seq, ProgressRow(seq=seq, acked=sorted(entry.acked)))
