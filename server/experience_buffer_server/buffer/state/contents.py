"""What one buffer holds in memory: entries by uid and by arrival, groups, their sizes, and units of them.

Changed by the buffer's rooms only, on its event loop. No rules, no I/O.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator

from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.entries import Entry, Group, key_of
from experience_buffer_server.buffer.state.group_table import GroupTable
from experience_buffer_server.sampling.versions import Versions
from experience_buffer_server.settings.consumer import ConsumerSettings
from experience_buffer_server.store.interface import Record
from experience_buffer_server.store.record import Interner


class Contents:
    """The entries and groups of one buffer. Not thread-safe.

    Args:
        on_less: Called when there is less than before.
        on_removed: Called with an entry that was removed, while its group still has it.
    """

    def __init__(
        self,
        on_less: Callable[[], None] = lambda: None,
        on_removed: Callable[[Entry], None] = lambda _: None,
    ) -> None:
        self.groups = GroupTable()
        self.num_items = 0
        """Experiences, tombstones not counted."""
        self.num_bytes = 0
        """Payload bytes."""
        self.lacking: dict[int, Entry] = {}
        """By seq, oldest first, the entries that lack a field the estimator needs."""
        self.quarantined: dict[int, Entry] = {}
        """By seq, the entries whose advantages can't be computed."""
        self.versions = Versions()
        """Seqs by lowest policy version, where it is known; retention takes out what it looks at."""
        self._by_uid: dict[str, Entry] = {}
        self._by_seq = Arrivals()
        self._last_seq = 0
        self._interner = Interner()
        self._on_less = on_less
        self._on_removed = on_removed

    def __iter__(self) -> Iterator[Entry]:
        """All entries, oldest first."""
        return iter(self._by_seq)

    def __len__(self) -> int:
        return len(self._by_seq)

    def since(self, seq: int) -> Iterator[Entry]:
        """The entries with larger numbers, oldest first."""
        return self._by_seq.since(seq)

    def parts(self, after: int, *, newest_first: bool) -> Iterator[list[Entry]]:
        """Neighbours, never none, those behind a number, in one order or the other.

        Anything may happen between two of them: what has left isn't among those that follow, nor is
        what has come since the first.
        """
        return self._by_seq.parts(after, newest_first=newest_first)

    @property
    def last_seq(self) -> int:
        """The number that was given last."""
        return self._last_seq

    def reserve(self, seq: int) -> None:
        """Give numbers above this one only: it was given, to what isn't here any more."""
        self._last_seq = max(self._last_seq, seq)

    def next_seq(self) -> int:
        """A number above all before: for a new entry, or for a new priority of an old one."""
        self._last_seq += 1
        return self._last_seq

    def add(self, entry: Entry) -> None:
        """Add an entry under its uid and seq."""
        record = entry.record
        if not entry.durable:
            # It was pushed: what the store reads back has been interned.
            self._interner.intern(record)
        self._by_uid[record.uid] = entry
        self._by_seq.add(record.seq, entry)
        self.add_version(entry)
        self._last_seq = max(self._last_seq, record.generation)
        self.num_items += not record.tombstone
        self.num_bytes += record.payload_bytes

    def remove(self, entry: Entry) -> None:
        """Remove an entry; its group is the caller's concern."""
        record = entry.record
        del self._by_uid[record.uid]
        self._by_seq.remove(record.seq)
        self._discard_version(record)
        self.lacking.pop(record.seq, None)
        self.quarantined.pop(record.seq, None)
        self.num_items -= not record.tombstone
        self.num_bytes -= record.payload_bytes
        self._on_removed(entry)
        self._on_less()

    def add_version(self, entry: Entry) -> None:
        """Let an entry be found by its version, if that is known."""
        if entry.record.min_version is not None:
            self.versions.add(entry.record.min_version, entry.record.seq)

    def _discard_version(self, record: Record) -> None:
        if record.min_version is not None:
            self.versions.discard(record.min_version, record.seq)

    def clear(self) -> None:
        """Forget everything: the buffer was deleted.

        Entries and their groups hold each other, and what has been there for long isn't looked
        through by the collector (`memory.calm_collector`): what isn't let go here would stay.
        """
        self.groups.clear()
        self._by_uid.clear()
        self._by_seq = Arrivals()
        self.versions = Versions()
        self._interner = Interner()
        self.lacking.clear()
        self.quarantined.clear()
        self.num_items = self.num_bytes = 0

    def set_missing(self, entry: Entry, fields: tuple[str, ...]) -> None:
        """Note which fields an entry lacks."""
        if not fields and not entry.missing:
            return
        entry.missing = fields
        if fields and self._by_seq.get(entry.record.seq) is entry:
            self.lacking[entry.record.seq] = entry
        else:
            self.lacking.pop(entry.record.seq, None)

    def set_quarantine(self, entry: Entry, reason: str) -> None:
        """Note why an entry can't be delivered; empty: it can, unless it was set aside."""
        entry.quarantine = reason or entry.damage
        if entry.quarantine and self._by_seq.get(entry.record.seq) is entry:
            self.quarantined[entry.record.seq] = entry
        else:
            self.quarantined.pop(entry.record.seq, None)

    def describe_quarantined(self) -> str:
        """What can't be delivered until somebody sees to it; empty when all can."""
        if not self.quarantined:
            return ""
        return (
            f"{len(self.quarantined)} experiences can't be computed or read and are quarantined; "
            "list says why: annotate or delete them"
        )

    def replace_record(self, entry: Entry, record: Record) -> None:
        """Give an entry another record of the same uid and seq, unless it has gone."""
        if self._by_seq.get(record.seq) is not entry:
            return
        self.num_bytes += record.payload_bytes - entry.record.payload_bytes
        self._discard_version(entry.record)
        entry.record = record
        self.add_version(entry)
        self._on_less()

    def by_uid(self, uid: str) -> Entry | None:
        """The entry with this uid."""
        return self._by_uid.get(uid)

    def by_seq(self, seq: int) -> Entry | None:
        """The entry with this arrival number."""
        return self._by_seq.get(seq)

    def by_seqs(self, seqs: Iterable[int]) -> list[Entry]:
        """Those of the entries that are still here."""
        found = (self._by_seq.get(seq) for seq in seqs)
        return [entry for entry in found if entry is not None]

    def members_of(self, settings: ConsumerSettings, key: int) -> list[Entry]:
        """The experiences of a unit that are staying; none where it has left, or was set aside."""
        if settings.unit == "item":
            entry = self.by_seq(key)
            if entry is None or not entry.is_staying or entry.damage:
                return []
            return [entry]
        group = self.groups.by_id(key)
        if group is None or group.damage:
            return []
        return [entry for entry in group.votes if entry.is_staying]


def num_deliverable(contents: Contents, consumer: Consumer) -> int:
    """The consumer's units in the buffer, also those that aren't whole, computed or consumed yet.

    Not those whose advantages can't be computed, that can't be read, or whose group was dropped:
    nobody gets them, so pushes must not wait until they are sampled.
    """
    by_item = consumer.settings.unit == "item"
    num_present = contents.num_items if by_item else len(contents.groups)
    return num_present - _num_out_of_reach(contents, consumer)


def _num_out_of_reach(contents: Contents, consumer: Consumer) -> int:
    """Those that it can't get, but for what it is done with, or is kept from: that counts elsewhere.

    What it has consumed may be found damaged when another consumer is to get it.
    """
    keys = {key_of(consumer.settings, entry) for entry in contents.quarantined.values()}
    keys.discard(0)
    for group in contents.groups.dropped_groups:
        # Somebody else may still hold some of it.
        of_group = _units_of(consumer.settings, group)
        keys.update(key for key in of_group if key not in consumer.out)
    idle = (consumer.finished, consumer.held, consumer.quarantined)
    return sum(not any(key in others for others in idle) for key in keys)


def _units_of(settings: ConsumerSettings, group: Group) -> list[int]:
    """The numbers of the units that a group's experiences make up."""
    if settings.unit == "group":
        return [group.row.id]
    return [entry.record.seq for entry in group.votes]


_BITS = 6
_SIZE = 1 << _BITS
_MASK = _SIZE - 1


class Arrivals:
    """A map from seq to entry. Not thread-safe.

    A list of `_SIZE` places goes with its last entry, so what stays for long among much that
    leaves costs at most one list each.
    """

    def __init__(self) -> None:
        self._lists: dict[int, list[Entry | None]] = {}
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    def __iter__(self) -> Iterator[Entry]:
        """In the order of their numbers; no changes meanwhile."""
        for neighbours in self._lists.values():
            for entry in neighbours:
                if entry is not None:
                    yield entry

    def since(self, seq: int) -> Iterator[Entry]:
        """Those with larger numbers, in the order of their numbers; no changes meanwhile."""
        first = (seq + 1) >> _BITS
        for number, neighbours in self._lists.items():
            if number < first:
                continue
            skip = (seq + 1) & _MASK if number == first else 0
            for entry in neighbours[skip:]:
                if entry is not None:
                    yield entry

    def parts(self, after: int, *, newest_first: bool) -> Iterator[list[Entry]]:
        """Those behind a number, in the order of their numbers or the other way, some at a time."""
        numbers = list(self._lists)
        first = after >> _BITS
        if newest_first:
            numbers = numbers[: bisect_right(numbers, first)][::-1]
        else:
            numbers = numbers[bisect_left(numbers, first) :]
        for number in numbers:
            found = [entry for entry in self._lists.get(number, ()) if entry is not None]
            if number == first:
                found = [
                    entry
                    for entry in found
                    if (entry.record.seq < after if newest_first else entry.record.seq > after)
                ]
            if found:
                yield found[::-1] if newest_first else found

    def get(self, seq: int) -> Entry | None:
        """The entry with this number."""
        neighbours = self._lists.get(seq >> _BITS)
        return None if neighbours is None else neighbours[seq & _MASK]

    def add(self, seq: int, entry: Entry) -> None:
        """Add an entry; its number is above all before."""
        neighbours = self._lists.get(seq >> _BITS)
        if neighbours is None:
            neighbours = self._lists[seq >> _BITS] = [None] * _SIZE
        neighbours[seq & _MASK] = entry
        self._num_entries += 1

    def remove(self, seq: int) -> None:
        """Remove an entry; KeyError where there is none."""
        neighbours = self._lists.get(seq >> _BITS)
        if neighbours is None or neighbours[seq & _MASK] is None:
            raise KeyError(seq)
        neighbours[seq & _MASK] = None
        self._num_entries -= 1
        if not any(neighbours):
            del self._lists[seq >> _BITS]
