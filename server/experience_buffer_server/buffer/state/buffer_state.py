"""What one buffer knows, and what it stands on: handed down to its rooms, each of which changes its part.

Its row on disk has its settings, its policy version and its running moments. Belongs to one buffer and
its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from experience_buffer import errors
from experience_buffer_server.archive.outbox import Outbox
from experience_buffer_server.buffer.state.change import Changes
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.contents import Contents
from experience_buffer_server.buffer.state.entries import Entry, Group, key_of
from experience_buffer_server.buffer.state.events import BufferEvents
from experience_buffer_server.buffer.state.legal_states import illegal
from experience_buffer_server.buffer.state.progress import Progress
from experience_buffer_server.buffer.telemetry.telemetry import Telemetry
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.runtime.tasks import Tasks
from experience_buffer_server.sampling.leases import LeaseTable
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.settings.consumer import ConsumerSettings
from experience_buffer_server.settings.server import ServerSection
from experience_buffer_server.store.interface import BufferRow, Store, WriteBatch


class BufferState:
    """The state of one buffer. Not thread-safe."""

    def __init__(
        self,
        row: BufferRow,
        limits: ServerSection,
        *,
        events: BufferEvents,
        store: Store,
        metrics: Metrics,
    ) -> None:
        self.row = row
        """As it is stored, or is about to be."""
        self.limits = limits
        """The server's."""
        self.events = events
        """Hears of what concerns more than one room."""
        self.store = store
        self.metrics = metrics
        self.tasks = Tasks()
        """Of this buffer, in the background; whoever drains them waits for its changes, too."""
        self.changes = changes = Changes(store, self.tasks)
        """What is under way to the disk, or owed to it."""
        self._row_turn = asyncio.Lock()
        self.settings = BufferSettings.model_validate_json(row.config)
        self.num_pending_settings = 0
        """Changes of the settings that hold and aren't on disk yet."""
        self.closed = False
        """Deleted: what is still under way for it has no effect."""
        self.version_changed = asyncio.Event()
        """Set, and replaced, when a policy version is published or the buffer is deleted."""
        self.num_jobs = 0
        """Groups, or experiences where there are none, that are being computed."""
        self.telemetry = Telemetry(clock.now(), row.id)
        """What has happened, as the rooms tell it."""
        self.contents = Contents(on_less=events.room_made, on_removed=events.removed)
        self.consumers: dict[str, Consumer] = {}
        """By name; rooms have views of it."""
        self.progress = Progress(row.id, self.contents, self.consumers, changes)
        self.noted_seq = 0
        """Up to here the store knows without any record which seqs were given."""
        self.outbox = Outbox(row.id, store, on_lost=self._note_lost)
        """What has left and is to be archived."""
        self.leases = LeaseTable()
        self.leases.reserve(row.lease_floor)

    @property
    def id(self) -> int:
        """Its id in the store."""
        return self.row.id

    @property
    def name(self) -> str:
        """Its name."""
        return self.row.name

    def _note_lost(self, count: int) -> None:
        self.metrics.archive_lost(self.name, count)

    def announce_version(self) -> None:
        """Wake those who wait for another policy version, or for the end of the buffer."""
        changed, self.version_changed = self.version_changed, asyncio.Event()
        changed.set()

    def check(self) -> None:
        """See that the state is legal, by the rules of `legal_states`; takes a look at everything.

        Raises:
            AssertionError: It isn't; the message says in words what contradicts what.
        """
        if problems := list(illegal(self.contents, self.consumers.values(), self.leases)):
            raise AssertionError(f"buffer {self.name!r}: " + "; ".join(problems))

    # --- the row: all that changes it stores it as a whole

    async def publish(self, version: int) -> int | None:
        """Note the policy version that the trainer has published; returns the one before.

        It is judged by at once, and told to those who wait for it once it is on disk.

        Raises:
            InvalidRequestError: It is below 0.
            StoreFullError: It can't be stored; the one before holds again.
            BufferNotFoundError: The buffer was deleted meanwhile.
        """
        if version < 0:
            raise errors.InvalidRequestError(
                f"version {version} must be at least 0", subject="version"
            )
        return await self.tasks.finish(self._publish(version))

    async def _publish(self, version: int) -> int | None:
        # One after the other: the one before may not turn out to be refused.
        async with self._row_turn:
            self.check_open()
            previous, self.row.policy_version = self.row.policy_version, version
            batch = self.changes.batch()
            batch.put_buffer(self.row)

            def stored() -> int | None:
                if not self.closed:
                    self.events.published(version)
                return previous

            def failed(error: BaseException) -> None:
                self.row.policy_version = previous
                self.store_row_again()

            return await self.changes.submit(batch, stored, failed)

    def store_row_again(self) -> None:
        """A change of the row was refused: the disk may have it all the same, with another one."""
        self.changes.store_again(self._put_row, [self.id])

    def _put_row(self, batch: WriteBatch, _: Sequence[int]) -> None:
        batch.put_buffer(self.row)

    def owe_groups(self, groups: Iterable[Group]) -> None:
        """The rows of groups are to be stored again, of those that aren't leaving."""
        self.changes.owe(self._put_groups, groups)

    def _put_groups(self, batch: WriteBatch, groups: Sequence[Group]) -> None:
        for group in groups:
            if self.contents.groups.by_id(group.row.id) is not group:
                continue
            if any(not entry.leaving for entry in group.members):
                batch.put_group(self.id, group.row)
            else:
                # A row that is stored after its removal would stay for ever.
                self.owe_groups([group])

    # --- consumers

    def consumer(self, name: str) -> Consumer:
        """The consumer with this name.

        Raises:
            ConsumerNotFoundError: There is none.
            BufferNotFoundError: The buffer was deleted.
        """
        self.check_open()
        consumer = self.consumers.get(name)
        if consumer is None or consumer.closed:
            names = sorted(other.name for other in self.consumers.values() if not other.closed)
            raise errors.ConsumerNotFoundError(
                f"buffer {self.name!r} has no consumer {name!r}; it has {names}; add one with "
                "update_buffer",
                subject=name,
            )
        return consumer

    def check_open(self) -> None:
        """See that the buffer is there: what were stored of a deleted one now would stay for ever.

        Raises:
            BufferNotFoundError: It was deleted.
        """
        if self.closed:
            raise errors.BufferNotFoundError(f"buffer {self.name!r} was deleted", subject=self.name)

    def add_consumer(self, settings: ConsumerSettings) -> Consumer:
        """Add a consumer that has been offered nothing yet."""
        consumer = self.consumers[settings.name] = Consumer(settings)
        return consumer

    def remove_consumer(self, name: str) -> None:
        """Remove a consumer; calls that wait for it end."""
        self.consumers.pop(name).close()
        self.telemetry.steps.forget(name)

    # --- units

    def withdraw(self, entries: Sequence[Entry], *, keep_raw: bool = False) -> None:
        """Take back the units that hold any of the entries; a leased one isn't offered again."""
        for consumer in self.consumers.values():
            if keep_raw and consumer.settings.raw:
                continue
            for key in {key_of(consumer.settings, entry) for entry in entries}:
                consumer.withdraw(key)

    # --- what is known of an entry

    def missing_fields(self, entry: Entry) -> tuple[str, ...]:
        """Fields that the estimator needs and an entry lacks; none where it can be sampled."""
        needs = self.settings.advantage.needs
        if needs is None or entry.record.tombstone or entry.available:
            return ()
        return needs.missing(entry.record.fields)

    def staleness(self, entry: Entry) -> int | None:
        """Published policy version minus the entry's lowest; None when either is unknown."""
        published, lowest = self.row.policy_version, entry.record.min_version
        return None if published is None or lowest is None else published - lowest

    def magnitude(self, entry: Entry) -> float | None:
        """Mean of |advantage| over an entry's response tokens; None where none were computed."""
        is_computed = entry.available and bool(self.settings.advantage.estimator)
        return entry.magnitude if is_computed else None

    def is_leased(self, entry: Entry, *, to_raw: bool = True) -> bool:
        """True if a consumer holds the experience, or is about to; raw ones count or not."""
        return any(
            key_of(consumer.settings, entry) in consumer.out
            for consumer in self.consumers.values()
            if to_raw or not consumer.settings.raw
        )

    def is_idle(self, entry: Entry) -> bool:
        """True if it is on disk and nobody holds it, computes it or changes it."""
        busy = entry.computing or entry.changing or entry.leaving
        return entry.durable and not busy and not self.is_leased(entry)

    def is_wanted(self, entry: Entry, *, but_for: str = "") -> bool:
        """Whether a rewind, of any consumer but one, may bring it back, or has and it wasn't consumed since."""
        progress = self.progress
        return progress.is_retained(entry) or progress.was_rewound(entry, but_for=but_for)

    def has_delivered(self, entry: Entry) -> bool:
        """True if a consumer that isn't raw holds the entry, or has consumed it."""
        return self.is_leased(entry, to_raw=False) or any(
            not consumer.settings.raw and consumer.name in entry.acked
            for consumer in self.consumers.values()
        )
