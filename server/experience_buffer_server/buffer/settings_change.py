"""Changing the settings of a buffer: what holds at once, and what waits until they are on disk.

Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from experience_buffer_server.buffer.delivery.leasing import row_of
from experience_buffer_server.buffer.flow import Flow
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.store.interface import ProgressRow, WriteBatch


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

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._state = flow.state
        self._contents = flow.state.contents
        self._changes = flow.state.changes

    def start(self, new: BufferSettings) -> asyncio.Future[None]:
        """Let settings hold, and store them; see `Buffer.change_settings`."""
        state, old = self._state, self._state.settings
        consumers = state.consumers
        kinds = {consumer.name: (consumer.unit, consumer.raw) for consumer in new.consumers}
        going = [
            name
            for name, consumer in consumers.items()
            if kinds.get(name) != (consumer.settings.unit, consumer.settings.raw)
        ]
        # Moments of another estimator are another quantity's.
        is_other = new.advantage.estimator != old.advantage.estimator
        batch = self._changes.batch()
        change = _Change(
            old=old,
            new=new,
            moments=state.row.moments,
            counted=[entry for entry in self._contents if entry.counted] if is_other else [],
            added=[name for name in kinds if name not in consumers],
            removed={name: self._note_removed(batch, name) for name in going},
        )
        if is_other:
            state.row.moments = ""
            for entry in change.counted:
                entry.counted = False
        self._hold(old, new)
        self._add_consumers(new, change.added)
        batch.put_buffer(state.row)
        self._state.num_pending_settings += 1

        def stored() -> None:
            state.num_pending_settings -= 1
            if not state.closed:
                self._carry_out(change)

        def failed(error: BaseException) -> None:
            state.num_pending_settings -= 1
            if not state.closed:
                self._take_back(change)
                state.store_row_again()

        return self._changes.submit(batch, stored, failed)

    def _hold(self, old: BufferSettings, new: BufferSettings) -> None:
        """What can be taken back by holding the old settings."""
        state, flow = self._state, self._flow
        state.settings = new
        state.row.config = new.model_dump_json()
        if new.advantage.estimator:
            flow.computing.computer.warm_up()
        if (new.group_deadline_seconds, new.on_group_deadline) != (
            old.group_deadline_seconds,
            old.on_group_deadline,
        ):
            # Those that are overdue already are judged by what holds now, too.
            for group in self._contents.groups:
                self._contents.groups.deadlines.schedule(group, new)
        if new.advantage != old.advantage:
            flow.computing.settings_changed()
            for entry in self._contents:
                self._contents.set_quarantine(entry, "")
                self._contents.set_missing(entry, state.missing_fields(entry))
        if (new.on_full, new.remover) != (old.on_full, old.remover):
            flow.eviction.settings_changed()
        if new.retention != old.retention:
            flow.retention.settings_changed()
        flow.push_room.look()
        if (new.on_future_version, new.on_missing_version) != (
            old.on_future_version,
            old.on_missing_version,
        ):
            self._flow.offers.release_held(None)

    def _add_consumers(self, settings: BufferSettings, names: Collection[str]) -> None:
        for consumer in settings.consumers:
            if consumer.name in names:
                self._flow.offers.offer_everything(self._state.add_consumer(consumer))

    def _carry_out(self, change: _Change) -> None:
        """The settings are on disk: do what can't be taken back."""
        for name, rows in change.removed.items():
            self._forget_consumer(name, rows)
        # Those that come back as another kind.
        self._add_consumers(change.new, change.removed)
        for settings in change.new.consumers:
            consumer = self._state.consumers.get(settings.name)
            if consumer is not None and self._flow.offers.change_consumer(settings):
                self._count_anew(consumer)
        if change.added or change.removed or change.old.advantage != change.new.advantage:
            self._look_again()

    def _take_back(self, change: _Change) -> None:
        """The settings could not be stored: the old ones hold again."""
        self._state.row.moments = change.moments
        for entry in change.counted:
            entry.counted = True
        self._hold(change.new, change.old)
        for name in change.added:
            self._forget_consumer(name, {})
        for name in change.removed:
            self._keep_consumer(name)
        self._look_again()

    # --- consumers that come and go

    def _count_anew(self, consumer: Consumer) -> None:
        """A limiter came, went, or has another ratio: what has left doesn't count for it."""
        self._flow.offers.count_anew(consumer)
        batch = self._changes.batch()
        noted = self._state.progress.note_uncounted(batch, consumer)
        self._state.progress.put_consumer(batch, consumer)
        self._spawn_or_owe(batch, noted)

    def _spawn_or_owe(self, batch: WriteBatch, seqs: Sequence[int]) -> None:
        """Rows of consumers, and of the progress of these, are stored now or later."""
        self._changes.spawn(batch, None, lambda error: self._state.progress.note_behind(seqs))

    def _note_removed(self, batch: WriteBatch, name: str) -> Mapping[int, ProgressRow]:
        """Add a consumer's removal to a batch: nothing more is delivered to it.

        Until that is on disk its leases, and what it keeps from leaving, are as before.

        Returns:
            Progress rows as they are stored, for `_forget_consumer`; `_keep_consumer` follows
            instead if the commit fails.
        """
        self._state.consumers[name].close()
        for lease in self._state.leases.of_consumer(name):
            if lease.state == "open":
                batch.put_lease(self._state.id, row_of(lease, state="nacked"))
        return self._state.progress.note_removed(batch, name)

    def _forget_consumer(self, name: str, rows: Mapping[int, ProgressRow]) -> None:
        """A consumer's removal is on disk."""
        # Stored again: what happened to them meanwhile may have overwritten that they ended.
        held = [lease.id for lease in self._state.leases.of_consumer(name)]
        self._flow.leasing.give_back(held, "consumer_removed")
        self._state.remove_consumer(name)
        batch = self._changes.batch()
        seqs = self._state.progress.forget_consumer(batch, name, rows)
        self._spawn_or_owe(batch, seqs)

    def _keep_consumer(self, name: str) -> None:
        """Its removal could not be stored: offer it also what came or came back meanwhile."""
        consumer = self._state.consumers[name]
        consumer.closed = False
        self._flow.offers.offer_everything(consumer)

    def _look_again(self) -> None:
        """What waited for a consumer that is gone leaves, what can be computed now is."""
        self._flow.removal.discard_done(self._contents)
        self._flow.advance([entry for entry in self._contents if entry.durable])
