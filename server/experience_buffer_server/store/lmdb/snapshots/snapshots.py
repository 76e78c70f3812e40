"""Snapshots of the store while the server serves: on request and by the clock, one at a time.

A process of its own does all the work (`copy_process`); here it is started, waited for, and ended
with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pydantic import ValidationError

from experience_buffer import errors
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.settings.server import SnapshotsSection
from experience_buffer_server.store.lmdb.snapshots.copy_process import Answer
from experience_buffer_server.store.lmdb.snapshots.folder import LABEL, SnapshotFolder
from experience_buffer_server.store.lmdb.snapshots.manifest import SnapshotBusyError

_log = logging.getLogger(__name__)
_MODULE = "experience_buffer_server.store.lmdb.snapshots.copy_process"
_BUSY_SECONDS = 1.0
"""After which a caller that comes while a snapshot is taken asks again."""


class Snapshots:
    """Takes snapshots of one store. Not thread-safe; belongs to the server's event loop."""

    def __init__(self, settings: SnapshotsSection, store: Path, metrics: Metrics) -> None:
        self._settings = settings
        self._store = store
        self._metrics = metrics
        self._newest_time = 0.0
        """Of the newest snapshot, seconds since the Unix epoch; 0: there is none."""
        self._running: asyncio.Task[Answer] | None = None
        self._started = 0.0
        self._clock: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Remove what an earlier life has left, and begin to take snapshots by the clock."""
        path = self._settings.path
        if path is None:
            return
        await asyncio.to_thread(self._look, path)
        if self._settings.interval_seconds:
            self._clock = asyncio.get_running_loop().create_task(self._repeat())

    async def take(self, label: str = "") -> Answer:
        """Take a snapshot. It goes on to its end even if nobody waits for it any more.

        Args:
            label: Ends its name; empty: a number does.

        Raises:
            WrongStateError: Snapshots are off.
            InvalidRequestError: The label isn't one.
            ResourceExhaustedError: One is being taken (come again), or there is no room.
            DataLossError: The store is damaged; nothing was published.
            UnavailableError: The server is stopping.
            InternalServerError: It couldn't be taken.
        """
        path = self._settings.path
        if path is None:
            raise errors.WrongStateError(
                "snapshots are off; set snapshots.path (EXPERIENCE_BUFFER_SNAPSHOTS__PATH) to a "
                "folder and start the server again",
                subject="snapshots.path",
            )
        if label and LABEL.fullmatch(label) is None:
            raise errors.InvalidRequestError(
                f"label {label[:100]!r}: give 1 to 64 letters, digits, '.', '_' and '-'",
                subject="label",
            )
        if self._closed:
            raise errors.UnavailableError("the server is stopping", retry_delay_seconds=1.0)
        if self._running is not None:
            seconds = time.monotonic() - self._started
            raise errors.ResourceExhaustedError(
                f"a snapshot has been under way for {seconds:.0f} s, and there is one at a time; "
                "call again when it is done",
                retry_delay_seconds=_BUSY_SECONDS,
            )
        self._started = time.monotonic()
        self._running = asyncio.get_running_loop().create_task(self._take(path, label))
        self._running.add_done_callback(self._ended)
        try:
            answer = await asyncio.shield(self._running)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise errors.UnavailableError(
                "the server is stopping; the snapshot was given up", retry_delay_seconds=1.0
            ) from None
        raise_for(answer)
        return answer

    async def close(self) -> None:
        """Give up the snapshot under way; nothing of it stays. Idempotent."""
        self._closed = True
        tasks = [task for task in (self._running, self._clock) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _take(self, path: Path, label: str) -> Answer:
        answer = await run_copy(
            self._store, path, label=label, keep=self._settings.keep, nice=self._settings.nice
        )
        if answer.outcome == "taken":
            self._newest_time = answer.create_time
            self._metrics.snapshot_taken(
                seconds=answer.seconds, num_bytes=answer.num_bytes, create_time=answer.create_time
            )
            facts = answer.model_dump(exclude={"outcome", "message", "name"})
            _log.info("snapshot taken", extra={"snapshot": answer.name} | facts)
            if answer.message:
                _log.warning("snapshot %s: %s", answer.name, answer.message)
        else:
            self._metrics.snapshot_failed(answer.outcome)
            _log.error("no snapshot was taken: %s", answer.message)
        return answer

    def _ended(self, task: asyncio.Task[Answer]) -> None:
        self._running = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a snapshot was lost: %r", error, exc_info=error)

    async def _repeat(self) -> None:
        interval = self._settings.interval_seconds
        # Servers that start often must take some, too; a clock that was set back delays none.
        due_seconds = self._newest_time + interval - time.time()
        await asyncio.sleep(min(max(due_seconds, 0.0), interval))
        while True:
            with contextlib.suppress(errors.ExperienceBufferError):  # It was logged and counted.
                await self.take()
            await asyncio.sleep(interval)

    def _look(self, path: Path) -> None:
        """See what there is, and remove what isn't whole. Runs in a thread."""
        if not path.is_dir():
            return
        folder = SnapshotFolder(path)
        try:
            with folder.locked():
                for name in folder.clean():
                    _log.warning("removed what an interrupted snapshot has left: %s", name)
            for problem in folder.problems:
                _log.warning("%s", problem)
            whole = [one for one in folder.snapshots() if not one.problem]
        except (OSError, SnapshotBusyError) as error:
            _log.warning("can't look through the snapshots in %s: %s", path, error)
            return
        if whole and whole[-1].manifest is not None:
            manifest = whole[-1].manifest
            self._newest_time = manifest.create_time.timestamp()
            self._metrics.snapshot_found(
                num_bytes=manifest.num_bytes, create_time=self._newest_time
            )


def raise_for(answer: Answer) -> None:
    """Raise the error that tells a caller why a snapshot wasn't taken; nothing if it was.

    Raises:
        ExperienceBufferError: The one that `Snapshots.take` names.
    """
    match answer.outcome:
        case "busy":
            raise errors.ResourceExhaustedError(answer.message, retry_delay_seconds=_BUSY_SECONDS)
        case "full":
            raise errors.ResourceExhaustedError(answer.message)
        case "damaged":
            raise errors.DataLossError(answer.message)
        case "failed":
            raise errors.InternalServerError(answer.message)


async def run_copy(
    data: Path, to: Path, *, label: str = "", keep: int = 0, nice: int = 0
) -> Answer:
    """Take a snapshot in a process of its own; cancelled, it ends and nothing of it stays.

    Args:
        data: The store's directory; a server may be using it.
        to: The folder of snapshots.
        label: Ends the snapshot's name, see `LABEL`.
        keep: How many stay; 0: all.
        nice: The process's niceness.
    """
    try:
        return await _copied(data, to, label=label, keep=keep, nice=nice)
    except (OSError, RuntimeError) as error:
        # No file descriptor, memory or thread is left: the next one may find some.
        message = f"can't start the process that takes it: {error}"
        return Answer(outcome="failed", message=message)


async def _copied(data: Path, to: Path, *, label: str, keep: int, nice: int) -> Answer:
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", _MODULE, f"--data={data}", f"--to={to}"),
            *(f"--label={label}", f"--keep={keep}", f"--nice={nice}"),
        ],
        # It ends when this end of its standard input closes, as with the death of this process.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ctrl-C in a terminal reaches every process of the session's foreground group.
        start_new_session=True,
    )
    ending = asyncio.get_running_loop().create_task(asyncio.to_thread(_last_words, process))
    try:
        said = await asyncio.shield(ending)
    finally:
        if process.returncode is None or process.returncode < 0:
            # With the process that checks the copy, if there is one.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait([ending])
            if process.returncode is None:
                # No thread was left to wait for it: it was killed, so that takes no time.
                with process:
                    pass
            await asyncio.to_thread(_tidy, to)
    try:
        return Answer.model_validate_json(said)
    except ValidationError:
        message = f"the process that took the snapshot ended with status {process.returncode}"
        return Answer(outcome="failed", message=message)


def _last_words(process: subprocess.Popen[bytes]) -> bytes:
    """What the process says until its end. Blocks."""
    with process:
        assert process.stdout is not None
        return process.stdout.read()


def _tidy(to: Path) -> None:
    """Remove what the process has left."""
    folder = SnapshotFolder(to)
    with contextlib.suppress(OSError, SnapshotBusyError), folder.locked():
        folder.clean()
