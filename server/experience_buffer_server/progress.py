"""How far the consumers are with each experience: deliveries, acknowledgements, steps, quarantine.

Most experiences have no progress worth a row: it begins with the first thing that has to be known
after a restart. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from experience_buffer_server.catalog import key_of
from experience_buffer_server.consumers import Consumer
from experience_buffer_server.contents import Contents
from experience_buffer_server.groups import Entry
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.base import ConsumerRow, ProgressRow, WriteBatch


class Progress:
    """The progress rows of one buffer. Not thread-safe.

    Verbs that take a batch change the memory at once and add the rows to the batch.
    """

    def __init__(
        self, buffer_id: int, contents: Contents, consumers: Mapping[str, Consumer]
    ) -> None:
        self._id = buffer_id
        self._contents = contents
        self._consumers = consumers
        """A live view: the buffer's consumers now."""
        self._rows: dict[int, ProgressRow] = {}

    def restore(self, rows: Iterable[ProgressRow], consumers: Iterable[ConsumerRow]) -> None:
        """Take over the progress as stored."""
        for row in consumers:
            if (consumer := self._consumers.get(row.name)) is not None:
                consumer.tally.departed_inserts = row.departed_inserts
                consumer.tally.departed_samples = row.departed_samples
                if row.last_step is not None:
                    consumer.timeline.rewind(row.last_step)
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
            for name, reason in progress.quarantined.items():
                if (consumer := self._consumers.get(name)) is not None:
                    consumer.quarantined[key_of(consumer.settings, entry)] = reason

    def history(self, unit: Unit, consumer: str) -> None:
        """Fill in what is known of a unit's earlier deliveries to a consumer."""
        row = self._rows.get(unit.seqs[0])
        if row is not None:
            unit.num_deliveries = row.num_deliveries.get(consumer, 0)
            unit.times_sampled = row.times_sampled.get(consumer, 0)

    def times_sampled(self, seq: int, consumer: str) -> int:
        """Acknowledged deliveries of an experience to a consumer, as far as they count."""
        row = self._rows.get(seq)
        return 0 if row is None else row.times_sampled.get(consumer, 0)

    def note_delivery(self, batch: WriteBatch, unit: Unit, consumer: str) -> None:
        """Count a delivery that ended without an ack."""
        for entry in self._contents.by_seqs(unit.seqs):
            row = self._row(entry)
            row.num_deliveries[consumer] = unit.num_deliveries
            batch.put_progress(self._id, row)

    def quarantine(self, batch: WriteBatch, unit: Unit, consumer: Consumer, reason: str) -> None:
        """Keep a unit from a consumer."""
        consumer.quarantined[unit.key] = reason
        for entry in self._contents.by_seqs(unit.seqs):
            row = self._row(entry)
            row.quarantined[consumer.name] = reason
            batch.put_progress(self._id, row)

    def release(self, batch: WriteBatch, consumer: Consumer, entries: Sequence[Entry]) -> None:
        """Take units out of the quarantine; their deliveries count from 0."""
        for entry in entries:
            consumer.quarantined.pop(key_of(consumer.settings, entry), None)
            row = self._row(entry)
            row.quarantined.pop(consumer.name, None)
            row.num_deliveries.pop(consumer.name, None)
            batch.put_progress(self._id, row)

    # --- acknowledged

    def is_done(self, entry: Entry) -> bool:
        """Every consumer has consumed it, and none can be rewound to where it hadn't."""
        return entry.acked.issuperset(self._consumers) and not self.is_retained(entry)

    def is_retained(self, entry: Entry) -> bool:
        """A consumer may be rewound to before it had consumed it."""
        row = self._rows.get(entry.record.seq)
        return row is not None and any(row.steps.get(name) for name in self._consumers)

    def note_ack(self, entry: Entry, consumer: str, step: int | None) -> None:
        """Count an ack; a consumer that doesn't replay has consumed the experience with it."""
        settings = self._consumers[consumer].settings if consumer in self._consumers else None
        times = 0
        if settings is not None and settings.replay:
            row = self._row(entry)
            times = row.times_sampled[consumer] = row.times_sampled.get(consumer, 0) + 1
        if step is not None:
            self._row(entry).steps.setdefault(consumer, []).append(step)
        if (known := self._rows.get(entry.record.seq)) is not None:
            known.num_deliveries.pop(consumer, None)
        if settings is None or not settings.replay or 0 < settings.max_times_sampled <= times:
            entry.acked |= {consumer}

    def undo_ack(self, entry: Entry, consumer: str, step: int | None) -> None:
        """Take an ack back: it couldn't be stored, or its step was rewound."""
        entry.acked -= {consumer}
        row = self._row(entry)
        if row.times_sampled.get(consumer):
            row.times_sampled[consumer] -= 1
        if step is not None and step in row.steps.get(consumer, ()):
            row.steps[consumer].remove(step)

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
        entry.acked |= {consumer}

    def put(self, batch: WriteBatch, entry: Entry) -> None:
        """Add an experience's row to a batch."""
        row = self._row(entry)
        row.acked = sorted(entry.acked)
        batch.put_progress(self._id, row)

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

    def forget(self, seq: int) -> None:
        """An experience has left."""
        self._rows.pop(seq, None)

    def forget_consumer(self, batch: WriteBatch, name: str) -> None:
        """A consumer was removed: its steps keep nothing any more, what it consumed stays known."""
        batch.delete_consumer(self._id, name)
        for seq, row in self._rows.items():
            had_steps, was_quarantined = row.steps.pop(name, None), row.quarantined.pop(name, None)
            entry = self._contents.by_seq(seq)
            if entry is not None and (had_steps or was_quarantined):
                self.put(batch, entry)

    def _row(self, entry: Entry) -> ProgressRow:
        seq = entry.record.seq
        return self._rows.setdefault(seq, ProgressRow(seq=seq, acked=sorted(entry.acked)))
