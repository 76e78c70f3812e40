"""How experiences leave: consumed by every consumer, dropped, or deleted.

What leaves is remembered for a while, so that a repeated push is recognised and a late member of
a finished group is refused. What was acknowledged at a training step stays until the step is safe.
Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from experience_buffer_server.buffer.state.change import Changes
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.contents import Contents
from experience_buffer_server.buffer.state.group_table import Entry, Group, groups_of
from experience_buffer_server.buffer.state.progress import Progress
from experience_buffer_server.buffer.state.units import key_of
from experience_buffer_server.runtime import clock
from experience_buffer_server.sampling.limiter import LimiterPlan
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import WriteBatch

LeaveReason = Literal["consumed", "discarded", "deleted"]
"""Why an experience leaves; a deleted one can be pushed again."""


class Retirement:
    """Takes entries out of the contents and the store. Not thread-safe.

    `leave` adds the removal to a batch; `forget` follows once the batch is on disk, `stay` if it
    has failed.
    """

    def __init__(
        self,
        buffer_id: int,
        contents: Contents,
        consumers: Mapping[str, Consumer],
        progress: Progress,
        changes: Changes,
    ) -> None:
        self._id = buffer_id
        self._contents = contents
        self._consumers = consumers
        """A live view: the buffer's consumers now."""
        self._progress = progress
        self._changes = changes
        self._noted_seq = 0
        """Up to here the store knows without any record which seqs were given."""

    def problem_with(self, consumer: str, step: int) -> str:
        """Why a consumer can't acknowledge with this training step; empty if it can."""
        reader = self._consumers.get(consumer)
        # A removed one has no timeline, and its leases are on their way back.
        return "" if reader is None else reader.timeline.problem_with(step)

    def note_consumed(
        self, batch: WriteBatch, seqs: Sequence[int], consumer: str, *, step: int | None = None
    ) -> list[Entry]:
        """Note an ack of one consumer; what all have consumed for good, returned, leaves."""
        done = []
        if step is not None and consumer in self._consumers:
            self._consumers[consumer].timeline.acked(step, seqs)
            # Its last step is to be known also when none of these is stored any more.
            self._progress.put_consumer(batch, self._consumers[consumer])
        entries = self._contents.by_seqs(seqs)
        self._progress.note_acks(entries, consumer, step)
        for entry in dict.fromkeys(entries):
            if self._progress.is_done(entry):
                done.append(entry)
            else:
                self._progress.put(batch, entry)
                self._progress.ack_begun(entry, consumer)
        return self.leave(batch, done, "consumed")

    def done_among(self, seqs: Iterable[int]) -> list[Entry]:
        """Those of the experiences that all have consumed and that nobody removes yet."""
        entries = self._contents.by_seqs(dict.fromkeys(seqs))
        return [e for e in entries if not e.leaving and self._progress.is_done(e)]

    def _put_groups(self, batch: WriteBatch, groups: Sequence[Group]) -> None:
        for group in groups:
            if self._contents.groups.by_id(group.row.id) is not group:
                continue
            if any(not entry.leaving for entry in group.members):
                batch.put_group(self._id, group.row)
            else:
                # A row that is stored after its removal would stay for ever.
                self._changes.owe(self._put_groups, [group])

    def revert_consumed(
        self, seqs: Sequence[int], consumer: str, leaving: Sequence[Entry], *, step: int | None
    ) -> None:
        """The batch failed: it never was acknowledged."""
        if step is not None and consumer in self._consumers:
            self._consumers[consumer].timeline.forget(step, seqs)
        for entry in self._contents.by_seqs(seqs):
            self._progress.undo_failed_ack(entry, consumer, step)
        self._progress.ack_ended(seqs, consumer)
        # Another consumer's rows, stored meanwhile, say that it was.
        self._progress.note_behind(seqs)
        self.stay(leaving, "consumed")

    def blame_again(self, units: Iterable[Unit], consumer: str) -> None:
        """Deliveries before a failed ack count as before: without the one that goes on."""
        for unit in units:
            self._progress.set_deliveries(unit.seqs, consumer, unit.num_deliveries - 1)

    def pass_over(self, batch: WriteBatch, entries: Sequence[Entry], consumer: str) -> list[Entry]:
        """A consumer leaves entries out for good; what all have consumed, returned, leaves."""
        for entry in entries:
            self._progress.pass_over(entry, consumer)
        return self.leave_if_done(batch, entries)

    def leave_if_done(self, batch: WriteBatch, entries: Sequence[Entry]) -> list[Entry]:
        """Remove those of the entries that all have consumed, and store the others' progress."""
        done = []
        for entry in entries:
            if self._progress.is_done(entry):
                done.append(entry)
            else:
                self._progress.put(batch, entry)
        return self.leave(batch, done, "consumed")

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
        now = clock.now()
        counts = Counter(entry.group.row.id for entry in leaving if entry.group is not None)
        for group in groups_of(leaving):
            count = counts[group.row.id]
            if group.is_open:
                self._leave_open(batch, group, count, reason)
            else:
                leaving += self._leave_closed(batch, group, count, reason, now)
        self._note_leaving(batch, leaving, consumed=reason == "consumed")
        if any(entry.record.generation > self._noted_seq for entry in leaving):
            # After a crash none of them says any more that its number was given.
            self._noted_seq = self._contents.last_seq
            batch.put_last_seq(self._id, self._noted_seq)
        for entry in leaving:
            record = entry.record
            batch.remove(self._id, record)
            if reason != "deleted":
                batch.remember(self._id, "uid", record.uid, record.digest, now)
        return leaving

    def _leave_open(self, batch: WriteBatch, group: Group, count: int, reason: LeaveReason) -> None:
        """What is consumed still counts towards the size; without a size there is nothing to keep."""
        if reason == "consumed":
            group.row.num_consumed += count
        rest = any(not entry.leaving for entry in group.members)
        if not rest and not (group.row.size and group.row.num_consumed):
            batch.delete_group(self._id, group.row.id)
        elif reason == "consumed":
            batch.put_group(self._id, group.row)

    def _leave_closed(
        self, batch: WriteBatch, group: Group, count: int, reason: LeaveReason, now: float
    ) -> list[Entry]:
        """Its size is that of its members, unless some were consumed.

        With the last experience go the tombstones; how the group closed is remembered.
        """
        rest = [entry for entry in group.members if not entry.leaving]
        is_last = all(entry.record.tombstone and entry.durable for entry in rest)
        if reason != "consumed":
            group.row.size -= count + is_last * len(rest)
        if not is_last:
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
        self._note_left(leaving)
        for entry in leaving:
            self._remove(entry)
        self._progress.forget([entry.record.seq for entry in leaving])
        for group in groups_of(leaving):
            self._contents.groups.left(group)

    def stay(self, leaving: Sequence[Entry], reason: LeaveReason) -> None:
        """The batch failed: the entries are still here."""
        self._noted_seq = 0
        self._note_staying(leaving)
        self._progress.note_behind(())
        # The last of a group that left meanwhile may have taken its row along.
        self._changes.owe(self._put_groups, groups_of(leaving))
        for entry in leaving:
            entry.leaving = False
            if entry.group is None:
                continue
            if reason == "consumed" and entry.group.is_open:
                entry.group.row.num_consumed -= 1
            elif reason != "consumed" and not entry.group.is_open:
                entry.group.row.size += 1

    def _remove(self, entry: Entry) -> None:
        self._contents.remove(entry)
        if entry.group is not None:
            entry.group.members.remove(entry)
            entry.group.num_durable -= entry.durable

    # --- limiters and quarantines of consumers

    def give_up(self, entries: Sequence[Entry]) -> None:
        """Entries that can't leave yet are for nobody but those who hold them."""
        for consumer, plan in self._limited() if entries else ():
            busy = (consumer.out, consumer.finished, consumer.quarantined)
            for key in {key_of(consumer.settings, entry) for entry in entries}:
                if not any(key in others for others in busy):
                    consumer.tally.give_up(key, plan)
            self._progress.note_behind(())

    def _note_leaving(self, batch: WriteBatch, entries: Sequence[Entry], *, consumed: bool) -> None:
        """Entries are marked as leaving: so are units of which nothing is left."""
        for consumer in self._consumers.values():
            for key in _units(consumer, entries) if consumer.quarantined else ():
                consumer.quarantined.pop(key, None)
        for consumer, plan in self._limited():
            keys = _units(consumer, entries)
            for key in keys:
                # What it is done with has been used, whatever others were still to do with it.
                is_used = consumed or key in consumer.finished
                consumer.tally.leaving(key, plan, consumed=is_used)
            if keys:
                self._progress.put_consumer(batch, consumer)

    def _note_staying(self, entries: Sequence[Entry]) -> None:
        """The removal failed."""
        for entry in entries:
            for consumer in self._consumers.values():
                why = self._progress.why_quarantined(entry.record.seq, consumer.name)
                if why:
                    consumer.quarantined[key_of(consumer.settings, entry)] = why
        for consumer, _ in self._limited():
            for key in _units(consumer, entries):
                consumer.tally.stays(key)

    def _note_left(self, entries: Sequence[Entry]) -> None:
        """The removal is on disk."""
        self._progress.note_left(entries)
        for consumer in self._consumers.values():
            consumer.finished.difference_update(_units(consumer, entries))
        for consumer, _ in self._limited():
            for key in _units(consumer, entries):
                consumer.tally.left(key)

    def _limited(self) -> Iterator[tuple[Consumer, LimiterPlan]]:
        for consumer in self._consumers.values():
            if consumer.settings.limiter is not None:
                yield consumer, consumer.settings.limiter.plan


def _units(consumer: Consumer, entries: Sequence[Entry]) -> list[int]:
    """The consumer's units of which nothing stays."""
    if consumer.settings.unit == "item":
        return [entry.record.seq for entry in entries if not entry.record.tombstone]
    groups = groups_of(entries)
    return [g.row.id for g in groups if not any(not e.leaving for e in g.votes)]
