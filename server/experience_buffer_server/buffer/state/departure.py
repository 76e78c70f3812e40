"""How experiences leave: consumed by every consumer, dropped, or deleted.

What leaves is remembered for a while, so that a repeated push is recognised and a late member of
a finished group is refused. What was acknowledged at a training step stays until the step is safe.
`leave` adds a removal to a batch; `forget` follows once the batch is on disk, `stay` if it has failed.
Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from experience_buffer_server.archive.note import Note
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.entries import Entry, Group, key_of
from experience_buffer_server.buffer.state.group_table import groups_of
from experience_buffer_server.runtime import clock
from experience_buffer_server.sampling.limiter import LimiterPlan
from experience_buffer_server.store.interface import WriteBatch


class Cause(NamedTuple):
    """Why experiences leave: "consumed", "deleted" (those can be pushed again), or as drops are counted."""

    reason: str
    message: str = ""
    """More about it, in words."""
    consumer: str = ""
    """Whose ack it was, where an ack lets them leave at once."""
    step: int | None = None
    """Its training step."""

    @property
    def is_consumed(self) -> bool:
        """Every consumer has done with them."""
        return self.reason == "consumed"


CONSUMED: Final = Cause("consumed")


def note_consumed(
    state: BufferState,
    batch: WriteBatch,
    seqs: Sequence[int],
    consumer: str,
    *,
    step: int | None = None,
) -> list[Entry]:
    """Note an ack of one consumer; what all have consumed for good, returned, leaves."""
    if step is not None and consumer in state.consumers:
        state.consumers[consumer].timeline.acked(step, seqs)
        # Its last step is to be known also when none of these is stored any more.
        state.progress.put_consumer(batch, state.consumers[consumer])
    entries = state.contents.by_seqs(seqs)
    state.progress.note_acks(entries, consumer, step)
    cause = Cause("consumed", consumer=consumer, step=step)
    return leave_if_done(state, batch, dict.fromkeys(entries), cause)


def revert_consumed(
    state: BufferState,
    seqs: Sequence[int],
    consumer: str,
    leaving: Sequence[Entry],
    *,
    step: int | None,
) -> None:
    """The batch failed: it never was acknowledged."""
    if step is not None and consumer in state.consumers:
        state.consumers[consumer].timeline.forget(step, seqs)
    for entry in state.contents.by_seqs(seqs):
        state.progress.undo_failed_ack(entry, consumer, step)
    state.progress.ack_ended(seqs, consumer)
    # Another consumer's rows, stored meanwhile, say that it was.
    state.progress.note_behind(seqs)
    stay(state, leaving, CONSUMED)


def leave_if_done(
    state: BufferState, batch: WriteBatch, entries: Iterable[Entry], cause: Cause = CONSUMED
) -> list[Entry]:
    """Remove those of the entries that all have consumed, and store the others' progress.

    Where the cause names a consumer, its ack of them is in the batch, and `Progress.ack_ended` follows.
    """
    done = []
    is_noted = bool(cause.consumer) and state.settings.archive is not None
    for entry in entries:
        if state.progress.is_done(entry):
            done.append(entry)
        else:
            if is_noted:
                state.progress.note_trained(entry, cause.consumer, cause.step)
            state.progress.put(batch, entry)
            if cause.consumer:
                state.progress.ack_begun(entry, cause.consumer)
    return leave(state, batch, done, cause)


def leave(
    state: BufferState, batch: WriteBatch, entries: Sequence[Entry], cause: Cause
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
            _leave_open(state, batch, group, count, cause)
        else:
            leaving += _leave_closed(state, batch, group, count, cause, now)
    _note_leaving(state, batch, leaving, consumed=cause.is_consumed)
    if any(entry.record.generation > state.noted_seq for entry in leaving):
        # After a crash none of them says any more that its number was given.
        state.noted_seq = state.contents.last_seq
        batch.put_last_seq(state.id, state.noted_seq)
    archive = state.settings.archive
    note = _note(state, cause, now) if archive and archive.keeps(cause.reason) else b""
    for entry in leaving:
        record = entry.record
        if note and not record.tombstone:
            state.outbox.depart(batch, record, note)
        else:
            batch.remove(state.id, record)
        if cause.reason != "deleted":
            batch.remember(state.id, "uid", record.uid, record.digest, now)
    return leaving


def _note(state: BufferState, cause: Cause, now: float) -> bytes:
    """What the archive says of how experiences have left."""
    return Note(
        cause.reason,
        cause.message,
        now,
        cause.consumer,
        cause.step,
        state.settings.group_by,
        state.row.policy_version,
    ).encode()


def _leave_open(
    state: BufferState, batch: WriteBatch, group: Group, count: int, cause: Cause
) -> None:
    """What is consumed still counts towards the size; without a size there is nothing to keep."""
    if cause.is_consumed:
        group.row.num_consumed += count
    rest = any(not entry.leaving for entry in group.members)
    if not rest and not (group.row.size and group.row.num_consumed):
        batch.delete_group(state.id, group.row.id)
    elif cause.is_consumed:
        batch.put_group(state.id, group.row)


def _leave_closed(
    state: BufferState, batch: WriteBatch, group: Group, count: int, cause: Cause, now: float
) -> list[Entry]:
    """Its size is that of its members, unless some were consumed.

    With the last experience go the tombstones; how the group closed is remembered.
    """
    rest = [entry for entry in group.members if not entry.leaving]
    is_last = all(entry.record.tombstone and entry.durable for entry in rest)
    if not cause.is_consumed:
        group.row.size -= count + is_last * len(rest)
    if not is_last:
        if not cause.is_consumed:
            batch.put_group(state.id, group.row)
        return []
    for entry in rest:
        entry.leaving = True
    batch.delete_group(state.id, group.row.id)
    if cause.reason != "deleted":
        batch.remember(state.id, "group", group.row.key, group.row.closed.encode(), now)
    return rest


def forget(state: BufferState, leaving: Sequence[Entry], cause: Cause) -> None:
    """The batch is on disk: the entries, and groups that are over, are gone."""
    archive = state.settings.archive
    state.telemetry.left(
        leaving,
        reason=cause.reason,
        message=cause.message,
        unused=_note_left(state, leaving),
        is_archived=archive is not None and archive.keeps(cause.reason),
        now=clock.now(),
    )
    for entry in leaving:
        state.outbox.left(entry.record)
        state.contents.remove(entry)
        if entry.group is not None:
            entry.group.members.remove(entry)
            entry.group.num_durable -= entry.durable
    state.progress.forget([entry.record.seq for entry in leaving])
    for group in groups_of(leaving):
        state.contents.groups.left(group)


def stay(state: BufferState, leaving: Sequence[Entry], cause: Cause) -> None:
    """The batch failed: the entries are still here."""
    state.noted_seq = 0
    _note_staying(state, leaving)
    state.progress.note_behind(())
    # The last of a group that left meanwhile may have taken its row along.
    state.owe_groups(groups_of(leaving))
    for entry in leaving:
        state.outbox.stayed(entry.record)
        entry.leaving = False
        if entry.group is None:
            continue
        if cause.is_consumed and entry.group.is_open:
            entry.group.row.num_consumed -= 1
        elif not cause.is_consumed and not entry.group.is_open:
            entry.group.row.size += 1


# --- limiters and quarantines of consumers


def give_up(state: BufferState, entries: Sequence[Entry]) -> None:
    """Entries that can't leave yet are for nobody but those who hold them."""
    for consumer, plan in _limited(state) if entries else ():
        busy = (consumer.out, consumer.finished, consumer.quarantined)
        for key in {key_of(consumer.settings, entry) for entry in entries}:
            if not any(key in others for others in busy):
                consumer.tally.give_up(key, plan)
        state.progress.note_behind(())


def _note_leaving(
    state: BufferState, batch: WriteBatch, entries: Sequence[Entry], *, consumed: bool
) -> None:
    """Entries are marked as leaving: so are units of which nothing is left."""
    for consumer in state.consumers.values():
        for key in _units(consumer, entries) if consumer.quarantined else ():
            consumer.quarantined.pop(key, None)
    for consumer, plan in _limited(state):
        keys = _units(consumer, entries)
        for key in keys:
            # What it is done with has been used, whatever others were still to do with it.
            is_used = consumed or key in consumer.finished
            consumer.tally.leaving(key, plan, consumed=is_used)
        if keys:
            state.progress.put_consumer(batch, consumer)


def _note_staying(state: BufferState, entries: Sequence[Entry]) -> None:
    """The removal failed."""
    for entry in entries:
        for consumer in state.consumers.values():
            why = state.progress.known(entry.record.seq).quarantined.get(consumer.name)
            if why:
                consumer.quarantined[key_of(consumer.settings, entry)] = why
    for consumer, _ in _limited(state):
        for key in _units(consumer, entries):
            consumer.tally.stays(key)


def _note_left(state: BufferState, entries: Sequence[Entry]) -> set[int]:
    """The removal is on disk; returns the seqs of the experiences that nobody was trained on."""
    unused = state.progress.note_left(entries)
    for consumer in state.consumers.values():
        consumer.finished.difference_update(_units(consumer, entries))
    for consumer, _ in _limited(state):
        for key in _units(consumer, entries):
            consumer.tally.left(key)
    return unused


def _limited(state: BufferState) -> Iterator[tuple[Consumer, LimiterPlan]]:
    for consumer in state.consumers.values():
        if consumer.settings.limiter is not None:
            yield consumer, consumer.settings.limiter.plan


def _units(consumer: Consumer, entries: Sequence[Entry]) -> list[int]:
    """The consumer's units of which nothing stays."""
    if consumer.settings.unit == "item":
        return [entry.record.seq for entry in entries if not entry.record.tombstone]
    groups = groups_of(entries)
    return [g.row.id for g in groups if not any(not e.leaving for e in g.votes)]
