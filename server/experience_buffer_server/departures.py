"""What leaves, as the consumers' limiters count it. Belongs to one buffer and its event loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from experience_buffer_server.catalog import key_of
from experience_buffer_server.consumers import Consumer
from experience_buffer_server.groups import Entry, groups_of
from experience_buffer_server.progress import Progress
from experience_buffer_server.sampling.limiter import LimiterPlan
from experience_buffer_server.store.base import WriteBatch


class Departures:
    """Tells the tallies of consumers with a limiter which units leave. Not thread-safe."""

    def __init__(self, consumers: Mapping[str, Consumer], progress: Progress) -> None:
        self._consumers = consumers
        self._progress = progress

    def give_up(self, entries: Sequence[Entry]) -> None:
        """Nobody is to get the entries any more but those who hold them."""
        for consumer, plan in self._limited() if entries else ():
            busy = (consumer.out, consumer.finished, consumer.quarantined)
            for key in {key_of(consumer.settings, entry) for entry in entries}:
                if not any(key in others for others in busy):
                    consumer.tally.give_up(key, plan)
            self._progress.note_behind(())

    def leaving(self, batch: WriteBatch, entries: Sequence[Entry], *, consumed: bool) -> None:
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

    def stay(self, entries: Sequence[Entry]) -> None:
        """The removal failed."""
        for entry in entries:
            for consumer in self._consumers.values():
                why = self._progress.why_quarantined(entry.record.seq, consumer.name)
                if why:
                    consumer.quarantined[key_of(consumer.settings, entry)] = why
        for consumer, _ in self._limited():
            for key in _units(consumer, entries):
                consumer.tally.stays(key)

    def left(self, entries: Sequence[Entry]) -> None:
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
