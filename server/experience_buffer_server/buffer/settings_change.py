"""Changing the settings of a buffer: what holds at once, and what waits until they are on disk.

Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from experience_buffer_server.buffer.compute.scheduler import Computer
from experience_buffer_server.buffer.compute.submission import Computing
from experience_buffer_server.buffer.delivery.delivery import Desk
from experience_buffer_server.buffer.intake.push import Ingest
from experience_buffer_server.buffer.leaving.eviction import Eviction
from experience_buffer_server.buffer.leaving.removal import Removal
from experience_buffer_server.buffer.leaving.retention import Retention
from experience_buffer_server.buffer.state.buffer_row import StoredRow
from experience_buffer_server.buffer.state.contents import Contents
from experience_buffer_server.buffer.state.group_table import Entry
from experience_buffer_server.runtime.tasks import Tasks
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.store.interface import BufferRow, ProgressRow, Store, StoreFullError


class Owner(Protocol):
    """The buffer whose settings change."""

    row: BufferRow
    settings: BufferSettings
    closed: bool
    computing: Computing
    eviction: Eviction
    ingest: Ingest
    removal: Removal
    retention: Retention

    def missing_fields(self, entry: Entry) -> tuple[str, ...]:
        """Fields that the estimator needs and an entry lacks."""

    def advance(self, entries: Sequence[Entry]) -> None:
        """Bring durable entries and their groups as far as they can go."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Settings on their way to the disk, and what they replace."""

    old: BufferSettings
    new: BufferSettings
    moments: str
    counted: Sequence[Entry]
    """Entries whose rewards another estimator's running moments counted."""
    added: Sequence[str]
    """Consumers."""
    removed: Mapping[str, Mapping[int, ProgressRow]]
    """Consumers, with the progress rows that are stored without them."""


class SettingsChanges:
    """Takes over settings. Not thread-safe."""

    def __init__(
        self,
        owner: Owner,
        contents: Contents,
        desk: Desk,
        store: Store,
        computer: Computer,
        tasks: Tasks,
        stored_row: StoredRow,
    ) -> None:
        self._owner = owner
        self._contents = contents
        self._desk = desk
        self._store = store
        self._computer = computer
        self._tasks = tasks
        self._stored_row = stored_row
        self._num_pending = 0

    @property
    def is_pending(self) -> bool:
        """Whether settings hold that aren't on disk yet."""
        return bool(self._num_pending)

    def start(self, new: BufferSettings) -> asyncio.Task[None]:
        """Let settings hold, and store them; see `Buffer.change_settings`."""
        owner, old = self._owner, self._owner.settings
        consumers = self._desk.delivery.consumers
        kinds = {consumer.name: (consumer.unit, consumer.raw) for consumer in new.consumers}
        going = [
            name
            for name, consumer in consumers.items()
            if kinds.get(name) != (consumer.settings.unit, consumer.settings.raw)
        ]
        # Moments of another estimator are another quantity's.
        is_other = new.advantage.estimator != old.advantage.estimator
        batch = self._store.batch()
        change = _Change(
            old=old,
            new=new,
            moments=owner.row.moments,
            counted=self._counted() if is_other else [],
            added=[name for name in kinds if name not in consumers],
            removed={name: self._desk.note_removed(batch, name) for name in going},
        )
        if is_other:
            owner.row.moments = ""
            for entry in change.counted:
                entry.counted = False
        self._hold(old, new)
        self._add_consumers(new, change.added)
        batch.put_buffer(owner.row)
        self._num_pending += 1
        return self._tasks.start(self._finish(change, self._store.commit(batch)))

    async def _finish(self, change: _Change, stored: Awaitable[None]) -> None:
        try:
            await stored
        except BaseException as error:
            self._num_pending -= 1
            if not self._owner.closed:
                self._take_back(change)
                if isinstance(error, StoreFullError):
                    self._stored_row.taken_back()
            raise
        self._num_pending -= 1
        if not self._owner.closed:
            self._carry_out(change)

    def _hold(self, old: BufferSettings, new: BufferSettings) -> None:
        """What can be taken back by holding the old settings."""
        owner = self._owner
        owner.settings = new
        owner.row.config = new.model_dump_json()
        if new.advantage.estimator:
            self._computer.warm_up()
        if _deadline(new) != _deadline(old):
            # Those that are overdue already are judged by what holds now, too.
            for group in self._contents.groups:
                self._contents.groups.deadlines.schedule(group, new)
        if new.advantage != old.advantage:
            owner.computing.settings_changed()
            for entry in self._contents:
                self._contents.set_quarantine(entry, "")
                self._contents.set_missing(entry, owner.missing_fields(entry))
        if (new.on_full, new.remover) != (old.on_full, old.remover):
            owner.eviction.settings_changed()
        if new.retention != old.retention:
            owner.retention.settings_changed()
        owner.ingest.line.look()
        if new.on_future_version != old.on_future_version:
            self._desk.delivery.release_held(None)

    def _add_consumers(self, settings: BufferSettings, names: Collection[str]) -> None:
        for consumer in settings.consumers:
            if consumer.name in names:
                self._desk.offering.everything(self._desk.delivery.add_consumer(consumer))

    def _carry_out(self, change: _Change) -> None:
        """The settings are on disk: do what can't be taken back."""
        for name, rows in change.removed.items():
            self._desk.forget_consumer(name, rows)
        # Those that come back as another kind.
        self._add_consumers(change.new, change.removed)
        delivery = self._desk.delivery
        for settings in change.new.consumers:
            if settings.name in delivery.consumers and delivery.change_consumer(settings):
                self._desk.count_anew(delivery.consumers[settings.name])
        if change.added or change.removed or change.old.advantage != change.new.advantage:
            self._look_again()

    def _take_back(self, change: _Change) -> None:
        """The settings could not be stored: the old ones hold again."""
        self._owner.row.moments = change.moments
        for entry in change.counted:
            entry.counted = True
        self._hold(change.new, change.old)
        for name in change.added:
            self._desk.forget_consumer(name, {})
        for name in change.removed:
            self._desk.keep_consumer(name)
        self._look_again()

    def _look_again(self) -> None:
        """What waited for a consumer that is gone leaves, what can be computed now is."""
        self._owner.removal.discard_done(self._contents)
        self._owner.advance([entry for entry in self._contents if entry.durable])

    def _counted(self) -> list[Entry]:
        return [entry for entry in self._contents if entry.counted]


def _deadline(settings: BufferSettings) -> tuple[object, ...]:
    return settings.group_deadline_seconds, settings.on_group_deadline
