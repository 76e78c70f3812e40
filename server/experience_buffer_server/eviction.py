"""Making room in a full buffer: which units leave before anybody asked for it.

Whole groups leave where there are groups, and only closed ones: an open group would be torn apart.
What is leased, kept for a rewind, or on its way somewhere stays. Belongs to one buffer and its
event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from experience_buffer_server.buffer_settings import BufferSettings
from experience_buffer_server.catalog import Catalog, value_of
from experience_buffer_server.consumer_settings import ConsumerSettings
from experience_buffer_server.contents import Contents
from experience_buffer_server.groups import Entry
from experience_buffer_server.metrics import Metrics
from experience_buffer_server.progress import Progress
from experience_buffer_server.removal import Removal
from experience_buffer_server.sampling.selectors import Selector, make_selector
from experience_buffer_server.tasks import Tasks

_LOOKS_PER_TICK = 500
"""Units that couldn't leave and are looked at again, per tick of the clock."""


class Owner(Protocol):
    """The buffer in which room is made."""

    settings: BufferSettings

    @property
    def name(self) -> str:
        """Its name."""


@dataclass(slots=True)
class Freed:
    """What leaves."""

    num_items: int = 0
    num_bytes: int = 0


class Eviction:
    """Chooses and removes units. Not thread-safe."""

    def __init__(
        self,
        owner: Owner,
        contents: Contents,
        progress: Progress,
        removal: Removal,
        metrics: Metrics,
        tasks: Tasks,
    ) -> None:
        self._owner = owner
        self._contents = contents
        self._progress = progress
        self._removal = removal
        self._metrics = metrics
        self._tasks = tasks
        self._catalog = Catalog(contents)
        self._units: Selector | None = None
        """By number, all units there are, and some that have left already."""
        self._stuck: deque[int] = deque()
        """Units that couldn't leave when they were chosen: not looked at with every push."""
        self.num_items = 0
        """Experiences on their way out that still count as stored."""
        self.num_bytes = 0
        """Their payload bytes."""

    def settings_changed(self) -> None:
        """Begin anew with the units there are."""
        self._units = None
        self._stuck.clear()
        if self._owner.settings.on_full == "evict":
            self._units = make_selector(self._owner.settings.remover.plan)
            self.stored(list(self._contents))

    def stored(self, entries: Sequence[Entry]) -> None:
        """Entries are on disk, and their groups are whole or will say so later."""
        if self._units is None:
            return
        for entry in entries:
            key = self._key(entry)
            torn = entry.group is not None and not entry.group.is_whole
            if key in self._units or entry.record.tombstone or torn:
                continue
            self._units.add(key, self._value(key))

    def revalue(self, entries: Sequence[Entry]) -> None:
        """What entries are chosen by has changed."""
        for entry in entries:
            if self._units is not None and (key := self._key(entry)) in self._units:
                self._units.update(key, self._value(key))

    def make_room(self, num_items: int, num_bytes: int) -> Freed:
        """Remove units until so many experiences and bytes are freed; none if that can't be.

        They are on their way out when this returns, before whatever is stored next.
        """
        freed = Freed()
        chosen: list[int] = []
        victims: list[Entry] = []
        while self._units and (freed.num_items < num_items or freed.num_bytes < num_bytes):
            key = self._units.choose().key
            self._units.remove(key)
            entries = self._members(key)
            if not all(self._may_leave(entry) for entry in entries):
                self._stuck.append(key)
                continue
            chosen.append(key)
            victims += entries
            freed.num_items += len(entries)
            freed.num_bytes += sum(entry.record.payload_bytes for entry in entries)
        if freed.num_items < num_items or freed.num_bytes < num_bytes:
            self._put_back(chosen)
            return Freed()
        if victims:
            self._metrics.dropped(self._owner.name, "evicted", len(victims))
            self.num_items += freed.num_items
            self.num_bytes += freed.num_bytes
            gone = self._removal.remove_now(victims)
            self._tasks.spawn(self._gone(freed, gone))
        return freed

    def tick(self) -> None:
        """Look again at some of the units that couldn't leave, the longest known first."""
        for _ in range(min(_LOOKS_PER_TICK, len(self._stuck))):
            self._put_back([self._stuck.popleft()])

    def _put_back(self, keys: Iterable[int]) -> None:
        for key in keys:
            if self._units is not None and key not in self._units and self._members(key):
                self._units.add(key, self._value(key))

    async def _gone(self, freed: Freed, gone: Awaitable[None]) -> None:
        try:
            await gone
        finally:
            self.num_items -= freed.num_items
            self.num_bytes -= freed.num_bytes

    def _may_leave(self, entry: Entry) -> bool:
        if not entry.durable or entry.computing or entry.changing:
            return False
        if entry.group is not None and not entry.group.is_whole:
            return False
        return not self._removal.is_leased(entry) and not self._progress.is_retained(entry)

    def _key(self, entry: Entry) -> int:
        return entry.record.seq if entry.group is None else entry.group.row.id

    def _members(self, key: int) -> list[Entry]:
        return self._catalog.entries(self._unit(), key)

    def _value(self, key: int) -> float:
        entries = self._members(key)
        return value_of(self._owner.settings.remover, entries) if entries else 0.0

    def _unit(self) -> ConsumerSettings:
        """Units as a consumer of this kind would get them."""
        grouped = self._owner.settings.group_by != "none"
        return ConsumerSettings(name="remover", unit="group" if grouped else "item")
