"""All buffers of the server by name: created, changed, found, deleted, loaded at the start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from experience_buffer import errors
from experience_buffer_server.archive.archivist import Archivist
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.compute.scheduler import Computer
from experience_buffer_server.buffer.deletion import Deletion
from experience_buffer_server.buffer.flow import Flow
from experience_buffer_server.buffer.intake.admission import PayloadReader
from experience_buffer_server.buffer.restore import restore
from experience_buffer_server.buffer.settings_checks import (
    changed_settings,
    check_name,
    contrast,
    differences,
)
from experience_buffer_server.runtime import clock, memory
from experience_buffer_server.runtime.callers import current_caller
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.runtime.tasks import Tasks
from experience_buffer_server.settings.buffer import NO_ARCHIVE, BufferSettings
from experience_buffer_server.settings.server import ConfigurationError, Settings, explain
from experience_buffer_server.store.interface import BufferRow, DepartedRow, Store, StoredBuffer

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Leaving:
    """A buffer that nobody finds any more, but whose rows are still on disk."""

    buffer: Buffer
    num_items: int
    """Experiences that it held."""
    on_disk: Deletion
    deletion: asyncio.Task[None] = field(init=False)
    """Under way, or refused for lack of room."""


class Registry:
    """The buffers. Not thread-safe; belongs to the server's event loop."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        computer: Computer,
        metrics: Metrics,
        archivist: Archivist | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._computer = computer
        self.archivist = archivist or Archivist(None, None)
        """Keeps readable what has left."""
        self.metrics = metrics
        """Where its buffers count what happens."""
        self._tasks = Tasks()
        self.payloads = PayloadReader(settings.server.payload_limits, metrics)
        """Reads what is pushed to any buffer."""
        self._buffers: dict[str, Buffer] = {}
        self._coming: dict[str, asyncio.Task[Buffer]] = {}
        """Buffers whose rows aren't on disk yet."""
        self._leaving: dict[str, _Leaving] = {}
        self._last_id = 0
        self._stopping = asyncio.Event()
        self._num_deleted = 0
        """Buffers since what deleted ones have left was collected."""
        self._update_turn = asyncio.Lock()

    async def load(self) -> None:
        """Restore what the store holds, then create configured buffers that don't exist.

        With `server.update_buffers` those that exist take over the settings given for them.

        Raises:
            ConfigurationError: The settings of a stored buffer can't be used; the usual reason is an
                estimator of the operator's own that isn't declared any more. Or it can't take over
                those that are configured, as `server.update_buffers` asks.
        """
        deleted: list[StoredBuffer] = []
        for state in self._store.load():
            if state.row.is_deleted:
                deleted.append(state)
                continue
            try:
                buffer = self._open(state.row)
            except ValidationError as error:
                raise ConfigurationError(
                    f"stored buffer {state.row.name!r}: {explain(error)}; if it is an estimator of "
                    "your own, declare [estimators.NAME] as it was: the buffer can then be changed "
                    "or deleted"
                ) from error
            restore(buffer, state, self._store)
            if problem := buffer.settings.impossible():
                _log.warning("stored buffer %r: %s", buffer.name, problem)
        self._last_id = max(self._last_id, self._store.last_buffer_id)
        await asyncio.gather(*(self._store.claim(buffer.id) for buffer in self._buffers.values()))
        for state in deleted:
            self._tasks.spawn(self._delete_rest(state))
        overrides = self._overrides()
        for name, settings in self._settings.buffers.items():
            if name not in self._buffers:
                await self.create(name, settings)
        for name, changes in overrides.items():
            await self.update(name, changes)
            _log.info("buffer %r has taken over the configured %s", name, ", ".join(changes))

    def _overrides(self) -> dict[str, dict[str, Any]]:
        """What stored buffers take over of the settings given for them; logs what they don't.

        Raises:
            ConfigurationError: One of them can't; no buffer is changed.
        """
        overrides: dict[str, dict[str, Any]] = {}
        for name, given in self._settings.buffers.items():
            buffer = self._buffers.get(name)
            changes = {} if buffer is None else differences(buffer.settings, given)
            if buffer is None or not changes:
                continue
            if not self._settings.server.update_buffers:
                _log.warning(
                    "buffer %r keeps its stored settings, the configured ones differ in %s; "
                    "serve --update-buffers lets it take them over",
                    name, ", ".join(changes),
                )  # fmt: skip
                continue
            try:
                changed_settings(buffer, changes)
            except errors.ExperienceBufferError as error:
                raise ConfigurationError(f"--update-buffers: buffers.{name}: {error}") from error
            overrides[name] = changes
        return overrides

    def get(self, name: str) -> Buffer:
        """The buffer with this name.

        Raises:
            BufferNotFoundError: There is none.
        """
        buffer = self._buffers.get(name)
        if buffer is None:
            raise errors.BufferNotFoundError(
                f"no buffer {name!r}; create it with create_buffer or in the configuration; "
                f"there are {sorted(filter(current_caller().covers, self._buffers))}",
                subject=name,
            )
        return buffer

    def all(self) -> list[Buffer]:
        """All buffers, by name."""
        return [self._buffers[name] for name in sorted(self._buffers)]

    async def create(
        self, name: str, settings: BufferSettings, *, exist_ok: bool = False
    ) -> Buffer:
        """Create a buffer, which is found once it is on disk.

        Raises:
            InvalidRequestError: The name isn't one.
            AlreadyExistsError: The name is taken (with `exist_ok`: by a buffer of other settings).
            ResourceExhaustedError: There are too many buffers, or the disk has no room to delete
                one that had the name.
            StoreFullError: It can't be stored; there is no such buffer.
        """
        check_name(name)
        self._check_archive(settings)
        await self._settle(name)
        existing = self._buffers.get(name)
        if existing is not None:
            if exist_ok and existing.settings == settings:
                return existing
            cure = "; take another name, or say with exist_ok that it may be there already"
            if exist_ok:
                cure = (
                    f" with other settings: {contrast(existing.settings, settings)}; create it with "
                    "the settings that it has, change it with update_buffer, or take another name"
                )
            raise errors.AlreadyExistsError(f"buffer {name!r} exists{cure}", subject=name)
        num_buffers = len(self._buffers) + len(self._coming)
        if num_buffers >= self._settings.server.max_buffers:
            self.metrics.call_refused("max_buffers")
            raise errors.ResourceExhaustedError(
                f"there are {num_buffers} buffers, the limit server.max_buffers is "
                f"{self._settings.server.max_buffers}; delete some, or raise the limit",
                subject=name,
            )
        coming = self._coming[name] = self._tasks.start(self._create(name, settings))
        return await asyncio.shield(coming)

    async def _create(self, name: str, settings: BufferSettings) -> Buffer:
        self._last_id += 1
        row = BufferRow(
            id=self._last_id,
            name=name,
            config=settings.model_dump_json(),
            policy_version=None,
            create_time=clock.now(),
        )
        try:
            buffer = self._made(row)
            batch = self._store.batch()
            batch.put_buffer(row)
            await self._store.commit(batch)
            await self._store.claim(row.id)
            self._serve(buffer)
        finally:
            del self._coming[name]
        return buffer

    def _check_archive(self, settings: BufferSettings) -> None:
        if settings.archive is not None and self._store.reader_spec is None:
            raise errors.InvalidRequestError(f"archive: {NO_ARCHIVE}", subject="config.archive")

    async def update(self, name: str, changes: Mapping[str, object]) -> Buffer:
        """Change fields of a buffer's settings; they hold from now on.

        Raises:
            InvalidRequestError: The settings don't fit together.
            WrongStateError: The grouping changes while experiences are stored.
            StoreFullError: They can't be stored; nothing is changed.
        """
        return await self._tasks.finish(self._update(name, changes))

    async def _update(self, name: str, changes: Mapping[str, object]) -> Buffer:
        # One after the other: what the next starts from may not turn out to be refused.
        async with self._update_turn:
            buffer = self.get(name)
            # No push comes between the check and the change.
            settings = changed_settings(buffer, changes)
            self._check_archive(settings)
            await buffer.change_settings(settings)
            return buffer

    async def delete(self, name: str, *, force: bool) -> int:
        """Remove a buffer with everything in it; returns how many experiences it held.

        If that is refused for lack of room, nobody finds the buffer any more, but after a restart
        it may be there again; delete it once more. Others' commits come between the parts of a
        large one.

        Raises:
            BufferNotFoundError: There is none.
            WrongStateError: It holds experiences and `force` is not set.
            StoreFullError: The disk has no room to do so.
            UnavailableError: The server stops; the buffer is gone, and what is left of it on the disk
                goes when the server starts again.
        """
        leaving = self._leaving.get(name)
        if leaving is None:
            leaving = self._take_out(self.get(name), force=force)
        if leaving.deletion.done():
            leaving.deletion = self._tasks.start(self._delete(leaving))
        await asyncio.shield(leaving.deletion)
        return leaving.num_items

    def _take_out(self, buffer: Buffer, *, force: bool) -> _Leaving:
        name, num_items = buffer.name, buffer.state.contents.num_items
        if num_items and not force:
            raise errors.WrongStateError(
                f"buffer {name!r} holds {num_items} experiences; set force to delete them too",
                subject=name,
            )
        del self._buffers[name]
        buffer.close()
        on_disk = Deletion(self._store, buffer.row)
        leaving = self._leaving[name] = _Leaving(buffer, num_items, on_disk)
        leaving.deletion = self._tasks.start(self._delete(leaving))
        return leaving

    async def _delete(self, leaving: _Leaving) -> None:
        buffer = leaving.buffer
        # What is under way for it must not be stored after it has gone.
        await buffer.drain()
        records = [entry.record for entry in buffer.state.contents]
        group_ids = [group.row.id for group in buffer.state.contents.groups]
        departed = buffer.state.outbox.drop_all()
        if not await leaving.on_disk.run(records, group_ids, self._stopping, departed=departed):
            raise errors.UnavailableError(
                f"buffer {buffer.name!r} is deleted, but the server stops before all of it is off "
                "the disk; the rest goes when it starts again",
                subject=buffer.name,
            )
        await self.archivist.forget(buffer.id, buffer.create_time)
        del self._leaving[buffer.name]
        buffer.forget()
        self.metrics.forget_buffer(buffer.name)
        self._num_deleted += 1
        num_entries = sum(len(one.state.contents) for one in self._buffers.values())
        if memory.sweep(num_leftovers=self._num_deleted, num_entries=num_entries):
            self._num_deleted = 0

    async def _delete_rest(self, state: StoredBuffer) -> None:
        """Go on with a deletion that an earlier life of the server has begun."""
        departed = [
            (seq, row.record.uid if isinstance(row, DepartedRow) else "")
            for seq, row in self._store.departed_rows(state.row.id)
        ]
        group_ids = [group.id for group in state.groups]
        on_disk = Deletion(self._store, state.row)
        await on_disk.run(state.records, group_ids, self._stopping, departed=departed)
        await self.archivist.forget(state.row.id, state.row.create_time)

    async def _settle(self, name: str) -> None:
        """Wait until no buffer of this name is being created or deleted.

        Of two on disk with one name, only one would be found after a crash.

        Raises:
            ResourceExhaustedError: The disk has no room to delete one.
        """
        while (under_way := self._under_way(name)) is not None:
            await asyncio.wait([under_way])
        if name in self._leaving:
            raise errors.ResourceExhaustedError(
                f"buffer {name!r} was deleted, but the disk has no room to say so; free space on "
                "it, delete the buffer again, then create it",
                subject=name,
            )

    def _under_way(self, name: str) -> asyncio.Task[Any] | None:
        if (coming := self._coming.get(name)) is not None:
            return coming
        leaving = self._leaving.get(name)
        return None if leaving is None or leaving.deletion.done() else leaving.deletion

    def tick(self, now: float) -> None:
        """Do what time asks for, in every buffer."""
        for buffer in self._buffers.values():
            buffer.tick(now)
        # Calls that waited in a deleted one may have ended, and been counted, after it.
        self.metrics.keep_buffers(self._buffers.keys() | self._leaving.keys())

    async def drain(self) -> None:
        """Wait for what is under way in any buffer; large deletions go on after the next start."""
        self._stopping.set()
        await self._tasks.drain()
        for buffer in self.all():
            await buffer.drain()

    def _open(self, row: BufferRow) -> Buffer:
        self._last_id = max(self._last_id, row.id)
        buffer = self._made(row)
        self._serve(buffer)
        return buffer

    def _made(self, row: BufferRow) -> Buffer:
        flow = Flow(
            row,
            store=self._store,
            computer=self._computer,
            metrics=self.metrics,
            payloads=self.payloads,
            limits=self._settings.server,
        )
        return Buffer(flow)

    def _serve(self, buffer: Buffer) -> None:
        """Let a buffer be found, and what leaves it be archived."""
        self._buffers[buffer.name] = buffer
        state = buffer.state
        self.archivist.follow(
            state.name,
            state.outbox,
            lambda: state.settings.archive,
            create_time=state.row.create_time,
        )
