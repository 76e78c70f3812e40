"""Has archived what waits in the outboxes, and asks the archive: by processes of their own.

One writes files, one reads them; each is started when it is first needed, and again when it has ended.
Whatever fails there, pushes go on: what can't be written waits in the store until it is too much.
Belongs to the server's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from experience_buffer import errors
from experience_buffer_server.archive.layout import folder_name
from experience_buffer_server.archive.outbox import Files, Outbox
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.child_process import Child, ChildGoneError
from experience_buffer_server.settings.buffer import ArchiveSettings

_log = logging.getLogger(__name__)
_WRITER: Final = "experience_buffer_server.archive.writer_process"
_READER: Final = "experience_buffer_server.archive.reader_process"
_LOOK_SECONDS: Final = 0.1
"""Between looks at the outboxes."""
_RETRY_SECONDS: Final = 2.0
"""After a write that failed."""
_TIDY_SECONDS: Final = 30.0
"""Between looks at what is too old, where nothing is written."""
SEGMENT_ROWS: Final = 4096
"""Experiences in a file, when it is first written."""
SEGMENT_BYTES: Final = 32 << 20
"""Payload bytes in it, about."""
_NO_LIMITS: Final = ArchiveSettings(max_age_seconds=0, max_bytes=2**62)
"""Of what was archived before the archive was turned off: it stays."""
_MOST_READS: Final = 8
"""Reads under way and in line: those beyond are refused."""


@dataclass(slots=True, eq=False)
class _Client:
    """One buffer, as it is archived."""

    name: str
    outbox: Outbox
    settings: Callable[[], ArchiveSettings | None]
    retry_time: float = 0.0
    tidy_time: float = 0.0
    is_counted: bool = False
    num_full: int = 0
    """Appends that the store had no room for, when it was last looked at."""

    def is_due(self, now: float) -> bool:
        """Whether something is to be written now."""
        box, settings = self.outbox, self.settings()
        if now < self.retry_time:
            return False
        if settings is None:
            return bool(box)  # What waits was to be archived when it left.
        if now >= self.tidy_time or len(box) >= SEGMENT_ROWS or box.num_bytes >= SEGMENT_BYTES:
            return True
        oldest = box.oldest_time if box else now
        if box.refused:
            oldest = min(oldest, box.refused[0].time)
        return now - oldest >= settings.segment_seconds


class Archivist:
    """The archives of one server. Not thread-safe.

    Args:
        folder: Where they are; None: there are none.
        reader_spec: With which other processes read the store; None: they can't.
    """

    def __init__(self, folder: Path | None, reader_spec: str | None) -> None:
        self._folder = folder
        self._spec = reader_spec
        self._clients: dict[int, _Client] = {}
        self._names: dict[int, str] = {}
        """By the buffer's id, its folder."""
        self._children: dict[str, Child] = {}
        self._starting = asyncio.Lock()
        self._reads = asyncio.Semaphore(1)
        self._num_reads = 0
        self._write_turn = asyncio.Lock()
        self._runner: asyncio.Task[None] | None = None

    @property
    def has_place(self) -> bool:
        """Whether there can be archives."""
        return self._folder is not None and self._spec is not None

    def start(self) -> None:
        """Begin to archive."""
        if self.has_place:
            self._runner = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Archive what waits already, as far as it goes at once, and end. Idempotent."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
            self._runner = None
        children, self._children = list(self._children.values()), {}
        for child in children:
            await child.close()

    def follow(
        self,
        name: str,
        outbox: Outbox,
        settings: Callable[[], ArchiveSettings | None],
        *,
        create_time: float,
    ) -> None:
        """Archive what waits in a buffer's outbox, from now on.

        Args:
            name: The buffer's.
            outbox: What has left it.
            settings: Those that hold; None: it has no archive any more.
            create_time: When it was created, seconds since the Unix epoch.
        """
        self._names[outbox.buffer_id] = folder_name(outbox.buffer_id, create_time)
        self._clients[outbox.buffer_id] = _Client(name, outbox, settings)

    async def forget(self, buffer_id: int, create_time: float) -> None:
        """A buffer was deleted: its files go."""
        self._clients.pop(buffer_id, None)
        self._names[buffer_id] = folder_name(buffer_id, create_time)
        if self.has_files(buffer_id):
            async with self._write_turn:
                with contextlib.suppress(ChildGoneError, OSError):
                    await self._ask(_WRITER, {"kind": "remove_all", "buffer": buffer_id})

    # --- writing

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = clock.now()
            for client in list(self._clients.values()):
                await self._bound(client)
                if client.is_due(now):
                    await self._write(client, now)

    async def _bound(self, client: _Client) -> None:
        """Let go of what is too much: also where a push has found no room in the store."""
        box, settings = client.outbox, client.settings()
        num_full = box.store.stats.num_full
        is_short, client.num_full = num_full > client.num_full, num_full
        if settings is not None:
            if not client.is_counted:
                client.is_counted = True
                box.on_lost(0)  # From now on it can be seen that none was.
            box.max_pending_bytes = settings.max_pending_bytes
        if num_lost := await box.shed(everything=is_short and bool(box)):
            why = "the store needs the room" if is_short else "more waited than may"
            if box.files.trouble:
                why += f"; the last write failed: {box.files.trouble}"
            _log.warning(
                "buffer %r: %d experiences have left without being archived: %s",
                client.name, num_lost, why,
            )  # fmt: skip

    async def flush(self, buffer_id: int) -> None:
        """Write what waits now: for tests, and for who is about to look at the files."""
        client = self._clients[buffer_id]
        while client.outbox or client.outbox.refused:
            await self._write(client, clock.now())

    async def _write(self, client: _Client, now: float) -> None:
        """Write one file, and see to what is too old; a failure is tried again later."""
        async with self._write_turn:
            await self._write_one(client, now)

    async def _write_one(self, client: _Client, now: float) -> None:
        box, settings = client.outbox, client.settings() or _NO_LIMITS
        taken, refused = box.take(SEGMENT_ROWS, SEGMENT_BYTES), box.refused[:SEGMENT_ROWS]
        client.tidy_time = now + _TIDY_SECONDS
        try:
            answer = await self._ask(
                _WRITER,
                {
                    "kind": "write",
                    "buffer": box.buffer_id,
                    "name": client.name,
                    "seqs": taken,
                    "refused": [tuple(one) for one in refused],
                    "max_age_seconds": settings.max_age_seconds,
                    "max_bytes": settings.max_bytes,
                    "now": now,
                },
            )
        except (ChildGoneError, OSError) as error:
            answer = {"error": f"the process that archives has ended: {error}"}
        except asyncio.CancelledError:
            box.not_written(taken)
            raise
        if "error" in answer:
            box.not_written(taken)
            client.retry_time = now + _RETRY_SECONDS
            if answer["error"] != box.files.trouble:
                _log.error("buffer %r: can't archive: %s", client.name, answer["error"])
            box.files.trouble = answer["error"]
            return
        if box.files.trouble:
            _log.info("buffer %r: archives again", client.name)
        box.files = Files(**answer["files"])
        del box.refused[: len(refused)]
        if taken:
            await box.written(taken)

    # --- reading

    async def read(self, request: dict[str, Any]) -> Any:
        """Ask the process that reads; `kind` and what it takes are in `reader_process`.

        Raises:
            ResourceExhaustedError: Too many ask.
            UnavailableError: The process has ended, or can't start.
            DataLossError: The files can't be read.
        """
        if self._num_reads >= _MOST_READS:
            raise errors.ResourceExhaustedError(
                f"{self._num_reads} calls look into the archive, the most at a time; try again",
                subject="archive",
                retry_delay_seconds=1.0,
            )
        self._num_reads += 1
        try:
            async with self._reads:
                answer = await self._ask(_READER, request)
        except (ChildGoneError, OSError) as error:
            raise errors.UnavailableError(
                f"the process that reads the archive has ended: {error}; try again",
                subject="archive",
            ) from error
        finally:
            self._num_reads -= 1
        if "error" in answer:
            raise errors.DataLossError(
                f"the archive can't be read: {answer['error']}", subject="archive"
            )
        return answer

    async def change(self, request: dict[str, Any]) -> Any:
        """Ask the process that writes, in turn with what it archives.

        Raises:
            UnavailableError: It has ended, or can't start.
            WrongStateError: It can't write.
        """
        try:
            async with self._write_turn:
                answer = await self._ask(_WRITER, request)
        except (ChildGoneError, OSError) as error:
            raise errors.UnavailableError(
                f"the process that writes the archive has ended: {error}; try again",
                subject="archive",
            ) from error
        if "error" in answer:
            raise errors.WrongStateError(
                f"the archive can't be written: {answer['error']}; free space, or see to its folder",
                subject="archive",
            )
        return answer

    async def _ask(self, module: str, request: dict[str, Any]) -> Any:
        child = self._children.get(module)
        if child is None or child.gone:
            async with self._starting:
                child = self._children.get(module)
                if child is None or child.gone:
                    if child is not None:
                        await child.close()
                    child = await Child.start(module, str(self._folder), str(self._spec))
                    self._children[module] = child
        return await child.request(request | {"folder": self._names[request["buffer"]]})

    def has_files(self, buffer_id: int) -> bool:
        """Whether there are files of a buffer, perhaps of a time when it had an archive."""
        name = self._names.get(buffer_id)
        return self._folder is not None and name is not None and (self._folder / name).exists()

    def note_files(self, buffer_id: int, files: dict[str, Any]) -> None:
        """A change has told which files there are."""
        if (client := self._clients.get(buffer_id)) is not None:
            client.outbox.files = Files(**files)

    def pids(self) -> Sequence[int]:
        """Of the processes that run: for tests that end them."""
        return [child.pid for child in self._children.values()]
