"""How far the consumers are with each experience: deliveries, acknowledgements, steps, quarantine.

Most experiences have no progress worth a row: it begins with the first thing that has to be known
after a restart. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final

from experience_buffer_server.buffer.state.change import Changes
from experience_buffer_server.buffer.state.consumers import Consumer, Usage
from experience_buffer_server.buffer.state.contents import Contents
from experience_buffer_server.buffer.state.entries import Entry, key_of
from experience_buffer_server.runtime import clock
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import ConsumerRow, ProgressRow, WriteBatch

_NOTHING: Final = ProgressRow(seq=0)
"""Of experiences that have no row. Nobody changes it."""


class Progress:
    """The progress rows of one buffer. Not thread-safe.

    Verbs that take a batch change the memory at once and add the rows to the batch.
    """

    def __init__(
        self,
        buffer_id: int,
        contents: Contents,
        consumers: Mapping[str, Consumer],
        changes: Changes,
    ) -> None:
        self._id = buffer_id
        self._contents = contents
        self._consumers = consumers
        """A live view: the buffer's consumers now."""
        self._changes = changes
        self._rows: dict[int, ProgressRow] = {}
        self._acking: dict[int, set[str]] = {}
        """By seq, the consumers whose ack is on its way to the disk."""
        self._first_acks: set[tuple[int, str]] = set()
        """Of these, by seq and consumer, its first ack with a step."""
        self.usage = Usage()

    def clear(self) -> None:
        """Forget everything: the buffer was deleted."""
        for known in (self._rows, self._acking, self._first_acks):
            known.clear()

    def restore(self, rows: Iterable[ProgressRow], consumers: Iterable[ConsumerRow]) -> None:
        """Take over the progress as stored."""
        for row in consumers:
            if (consumer := self._consumers.get(row.name)) is not None:
                consumer.tally.departed_inserts = row.departed_inserts
                consumer.tally.departed_samples = row.departed_samples
                if row.last_step is not None:
                    consumer.timeline.reach(row.last_step)
                if row.safe_step is not None:
                    consumer.timeline.declare_safe(row.safe_step)
        for progress in rows:
            entry = self._contents.by_seq(progress.seq)
            if entry is None:
                continue
            entry.acked = frozenset(progress.acked)
            self._rows[progress.seq] = progress
            for name, steps in progress.steps.items():
                if (consumer := self._consumers.get(name)) is not None:
                    consumer.timeline.restore((progress.seq, step) for step in steps)
            for name in progress.uncounted:
                if (consumer := self._consumers.get(name)) is not None:
                    consumer.tally.was_taken_off(key_of(consumer.settings, entry))
            for name, reason in progress.quarantined.items():
                if (consumer := self._consumers.get(name)) is not None:
                    consumer.quarantined[key_of(consumer.settings, entry)] = reason

    def history(self, unit: Unit, consumer: str) -> None:
        """Fill in what is known of a unit's earlier deliveries to a consumer."""
        row = self.known(unit.seqs[0])
        unit.num_deliveries = row.num_deliveries.get(consumer, 0)
        unit.times_sampled = row.times_sampled.get(consumer, 0)

    def known(self, seq: int) -> ProgressRow:
        """What is known of an experience, to be read only; nothing where it has no row."""
        return self._rows.get(seq, _NOTHING)

    def times_acked(self, entry: Entry) -> int:
        """Deliveries that were acknowledged, over all consumers."""
        known = self.known(entry.record.seq)
        once = entry.acked.difference(known.times_sampled, known.passed_over)
        return len(once) + sum(known.times_sampled.values())

    def note_delivery(self, batch: WriteBatch, unit: Unit, consumer: str) -> None:
        """Count a delivery that ended badly."""
        self.set_deliveries(unit.seqs, consumer, unit.num_deliveries)
        for entry in self._contents.by_seqs(unit.seqs):
            self.put(batch, entry)

    def set_deliveries(self, seqs: Sequence[int], consumer: str, num_deliveries: int) -> None:
        """Count the deliveries of experiences that ended badly; 0 needs no row."""
        for entry in self._contents.by_seqs(seqs) if num_deliveries else ():
            self._row(entry).num_deliveries[consumer] = num_deliveries

    def quarantine(self, batch: WriteBatch, unit: Unit, consumer: Consumer, reason: str) -> None:
        """Keep a unit from a consumer."""
        consumer.quarantined[unit.key] = reason
        for entry in self._contents.by_seqs(unit.seqs):
            row = self._row(entry)
            row.quarantined[consumer.name] = reason
            self.put(batch, entry)

    def release(self, batch: WriteBatch, consumer: str, entries: Iterable[Entry]) -> None:
        """Take experiences out of a consumer's quarantine; their deliveries count from 0."""
        for entry in entries:
            row = self._row(entry)
            row.quarantined.pop(consumer, None)
            row.num_deliveries.pop(consumer, None)
            self.put(batch, entry)

    def keep(self, consumer: str, entries: Iterable[Entry], reason: str, times: int) -> None:
        """That couldn't be stored."""
        for entry in self._contents.by_seqs(entry.record.seq for entry in entries):
            row = self._row(entry)
            row.quarantined[consumer] = reason
            row.num_deliveries[consumer] = times
            self._changes.owe(self._put_again, [entry.record.seq])

    # --- acknowledged

    def is_done(self, entry: Entry) -> bool:
        """Every consumer has consumed it, and none can be rewound to where it hadn't.

        An ack whose commit is under way may still fail: it doesn't count but for its own batch.
        """
        acked = entry.acked
        if acking := self._acking.get(entry.record.seq):
            acked = acked.difference(acking)
        return acked.issuperset(self._consumers) and not self.is_retained(entry)

    def is_retained(self, entry: Entry) -> bool:
        """A consumer may be rewound to before it had consumed it."""
        steps = self.known(entry.record.seq).steps
        return bool(steps) and any(steps.get(name) for name in self._consumers)

    def was_rewound(self, entry: Entry, *, but_for: str = "") -> bool:
        """A consumer, other than one, had consumed it and was rewound: it is to get it again."""
        steps = self.known(entry.record.seq).steps
        return bool(steps) and any(
            not steps.get(name, True) and not consumer.settings.replay
            for name, consumer in self._consumers.items()
            if name not in entry.acked and name != but_for
        )

    def ack_begun(self, entry: Entry, consumer: str) -> None:
        """An ack is on its way to the disk, and `ack_ended` will follow."""
        self._acking.setdefault(entry.record.seq, set()).add(consumer)

    def ack_ended(self, seqs: Iterable[int], consumer: str) -> None:
        """The commit of a consumer's ack has ended."""
        for seq in seqs if self._acking or self._first_acks else ():
            self._first_acks.discard((seq, consumer))
            if (consumers := self._acking.get(seq)) is not None:
                consumers.discard(consumer)
                if not consumers:
                    del self._acking[seq]

    def note_acks(
        self, entries: Iterable[Entry], consumer: str, step: int | None, *, forgives: bool = True
    ) -> None:
        """Count an ack of each; a consumer that doesn't replay has consumed them with it.

        With `forgives`, deliveries before it that ended badly don't count any more; without, it was
        undone before, and that couldn't be stored.
        """
        settings = self._consumers[consumer].settings if consumer in self._consumers else None
        consumes = settings is None or not settings.replay
        most = 0 if settings is None else settings.max_times_sampled
        raw, own = self._raw_names(), frozenset((consumer,))
        for entry in entries:
            was_used = self._is_used(entry, raw)
            sampled, times = self.known(entry.record.seq).times_sampled, 0
            # One that has replayed it before goes on counting: a rewind takes that off again.
            if not consumes or consumer in sampled:
                times = sampled.get(consumer, 0) + 1
                self._row(entry).times_sampled[consumer] = times
            if step is not None:
                steps = self._row(entry).steps
                if consumer not in steps:
                    self._first_acks.add((entry.record.seq, consumer))
                steps.setdefault(consumer, []).append(step)
            known = self._rows.get(entry.record.seq)
            if known is not None and forgives:
                self._forgive(known, entry, consumer)
            if consumes or 0 < most <= times:
                entry.acked = entry.acked | own if entry.acked else own
            self.usage.num_used += not was_used and self._is_used(entry, raw)

    def _forgive(self, row: ProgressRow, entry: Entry, consumer: str) -> None:
        """Deliveries that ended badly don't count any more."""
        row.num_deliveries.pop(consumer, None)
        if row.quarantined.pop(consumer, None) and consumer in self._consumers:
            reader = self._consumers[consumer]
            reader.quarantined.pop(key_of(reader.settings, entry), None)

    def note_trained(self, entry: Entry, consumer: str, step: int | None) -> None:
        """Keep for the archive who has acknowledged an experience that stays, and when."""
        self._row(entry).note_trained(consumer, step, clock.now())

    def undo_ack(self, entry: Entry, consumer: str, step: int | None) -> None:
        """Take an ack back: its step was rewound."""
        was_used = self.is_used(entry)
        row = self._row(entry)
        times = max(row.times_sampled.get(consumer, 0) - 1, 0)
        if consumer in row.times_sampled:
            row.times_sampled[consumer] = times
        reader = self._consumers.get(consumer)
        if reader is None or not 0 < reader.settings.max_times_sampled <= times:
            entry.acked -= {consumer}
            row.passed_over = [name for name in row.passed_over if name != consumer]
        if consumer in row.uncounted:
            row.uncounted.remove(consumer)
        row.take_back(consumer, step)
        self.usage.num_undone += was_used and not self.is_used(entry)
        if step is not None and step in row.steps.get(consumer, ()):
            row.steps[consumer].remove(step)

    def note_uncounted(self, batch: WriteBatch, consumer: Consumer) -> list[int]:
        """A limiter counts anew: note what it doesn't count until it is rewound; returns the seqs."""
        seqs = [seq for seq, row in self._rows.items() if row.steps.get(consumer.name)]
        retained = self._contents.by_seqs(seqs)
        past = [e for e in retained if key_of(consumer.settings, e) in consumer.finished]
        for entry in past:
            self.take_off(entry, consumer.name)
            self.put(batch, entry)
        return [entry.record.seq for entry in past]

    def take_off(self, entry: Entry, consumer: str) -> None:
        """A limiter doesn't count an experience until it is rewound."""
        if consumer not in (uncounted := self._row(entry).uncounted):
            uncounted.append(consumer)

    def undo_failed_ack(self, entry: Entry, consumer: str, step: int | None) -> None:
        """Take back an ack that couldn't be stored: nobody was rewound by that."""
        self.undo_ack(entry, consumer, step)
        steps = self._row(entry).steps
        if (entry.record.seq, consumer) in self._first_acks and not steps.get(consumer, True):
            del steps[consumer]

    def note_safe(self, entry: Entry, consumer: str, step: int) -> None:
        """An ack can't be rewound any more."""
        row = self._row(entry)
        if step in row.steps.get(consumer, ()):
            row.steps[consumer].remove(step)

    def note_unsafe(self, entry: Entry, consumer: str, step: int) -> None:
        """That couldn't be stored."""
        self._row(entry).steps.setdefault(consumer, []).append(step)

    def pass_over(self, entry: Entry, consumer: str) -> None:
        """A consumer doesn't want it; nothing was delivered."""
        if consumer not in entry.acked:
            entry.acked |= {consumer}
            row = self._row(entry)
            row.times_sampled.setdefault(consumer, 0)
            row.passed_over.append(consumer)

    def was_passed_over(self, entry: Entry, consumer: Consumer) -> bool:
        """Whether a consumer didn't want an experience: it isn't to get it, and hasn't used it up."""
        return consumer.name in self.known(entry.record.seq).passed_over

    def is_used(self, entry: Entry) -> bool:
        """A consumer that isn't raw has acknowledged it, and that wasn't rewound."""
        return self._is_used(entry, self._raw_names())

    def _is_used(self, entry: Entry, raw: Set[str]) -> bool:
        names = entry.acked
        for name, times in self.known(entry.record.seq).times_sampled.items():
            names = names | {name} if times else names - {name}
        return not names <= raw

    def _raw_names(self) -> Set[str]:
        return {name for name, consumer in self._consumers.items() if consumer.settings.raw}

    def put(self, batch: WriteBatch, entry: Entry) -> None:
        """Add an experience's row to a batch, unless an earlier one removes the experience."""
        if entry.leaving:
            # Stored after its removal it would be the row of nothing; if that fails, it is missing.
            self._changes.owe(self._put_again, [entry.record.seq])
            return
        row = self._row(entry)
        row.acked = sorted(entry.acked)
        batch.put_progress(self._id, row)

    def note_behind(self, seqs: Iterable[int]) -> None:
        """The disk may have other rows of these experiences, and of the consumers: it is owed them."""
        self._changes.owe(self._put_again, seqs)
        self._changes.owe(self._put_consumers, [self._id])

    def _put_again(self, batch: WriteBatch, seqs: Sequence[int]) -> None:
        for entry in self._contents.by_seqs(seqs):
            self.put(batch, entry)

    def _put_consumers(self, batch: WriteBatch, _: Sequence[int]) -> None:
        for consumer in self._consumers.values():
            self.put_consumer(batch, consumer)

    def put_consumer(self, batch: WriteBatch, consumer: Consumer) -> None:
        """Add a consumer's row to a batch."""
        timeline, tally = consumer.timeline, consumer.tally
        row = ConsumerRow(
            name=consumer.name,
            safe_step=timeline.safe_step,
            last_step=timeline.last_step,
            departed_inserts=tally.departed_inserts,
            departed_samples=tally.departed_samples,
        )
        batch.put_consumer(self._id, row)

    # --- leaving

    def note_left(self, entries: Iterable[Entry]) -> set[int]:
        """Experiences have left: count those that nobody used; returns their seqs."""
        raw = self._raw_names()
        unused = {
            entry.record.seq
            for entry in entries
            if not (entry.record.tombstone or self._is_used(entry, raw))
        }
        self.usage.num_unused += len(unused)
        return unused

    def forget(self, seqs: Iterable[int]) -> None:
        """Experiences have left: no rewind brings them back."""
        retained: dict[tuple[str, int], list[int]] = {}
        for seq in seqs:
            row = self._rows.pop(seq, None)
            for name, steps in row.steps.items() if row is not None else ():
                for step in steps if name in self._consumers else ():
                    retained.setdefault((name, step), []).append(seq)
            self._acking.pop(seq, None)
        # One call per step: each walks through what the step retains.
        for (name, step), gone in retained.items():
            self._consumers[name].timeline.forget(step, gone)
            self._consumers[name].timeline.reach(step)

    def note_removed(self, batch: WriteBatch, name: str) -> dict[int, ProgressRow]:
        """Store that a consumer is removed: its steps keep nothing, what it consumed stays known.

        Returns:
            The rows as they are stored, by seq, for `forget_consumer` once they are on disk.
        """
        batch.delete_consumer(self._id, name)
        stored = {}
        for seq, row in self._rows.items():
            entry = self._contents.by_seq(seq)
            if entry is None or entry.leaving:
                continue
            if name in row.steps or name in row.quarantined:
                stored[seq] = rest = dataclasses.replace(
                    row,
                    acked=sorted(entry.acked),
                    steps={key: steps for key, steps in row.steps.items() if key != name},
                    quarantined={key: why for key, why in row.quarantined.items() if key != name},
                )
                batch.put_progress(self._id, rest)
        return stored

    def forget_consumer(
        self, batch: WriteBatch, name: str, stored: Mapping[int, ProgressRow]
    ) -> list[int]:
        """A consumer's removal is on disk; what was stored of it since is stored again without it.

        Returns:
            The seqs of the rows that are stored again.
        """
        batch.delete_consumer(self._id, name)
        again = []
        for seq, row in self._rows.items():
            had_steps, was_quarantined = row.steps.pop(name, None), row.quarantined.pop(name, None)
            entry = self._contents.by_seq(seq)
            if entry is None or entry.leaving or (had_steps is None and not was_quarantined):
                continue
            row.acked = sorted(entry.acked)
            if stored.get(seq) != row:
                self.put(batch, entry)
                again.append(seq)
        return again

    def _row(self, entry: Entry) -> ProgressRow:
        seq = entry.record.seq
        return self._rows.setdefault(seq, ProgressRow(seq=seq, acked=sorted(entry.acked)))
