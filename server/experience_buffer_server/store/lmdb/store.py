"""The durable store over LMDB: the owner's side. Writing is done by a process of its own."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import msgpack

from experience_buffer_server.runtime.memory_arena import Place
from experience_buffer_server.store.interface import (
    StoreError,
    StoreFailedError,
    StoreFencedError,
    StoreFormatError,
    StoreFullError,
    StoreStats,
    WriteBatch,
)
from experience_buffer_server.store.lmdb import writer_protocol
from experience_buffer_server.store.lmdb.commit_backlog import Backlog, Load, Riders
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.disk_room import reserve_bytes
from experience_buffer_server.store.lmdb.disk.private_files import free_bytes
from experience_buffer_server.store.lmdb.fences import Ownership
from experience_buffer_server.store.lmdb.reader import CommittedRows
from experience_buffer_server.store.lmdb.writer_link import Outbox, WriterLink, start_writer
from experience_buffer_server.store.lmdb.writer_protocol import (
    CLAIM,
    PRUNE,
    PRUNE_LIMITS,
    Stamp,
    Status,
    Translation,
    Work,
)

GIBI = 1 << 30
_ERRORS: dict[int, type[StoreError]] = {
    Status.FULL: StoreFullError,
    Status.REFUSED: StoreError,
    Status.FAILED: StoreFailedError,
    Status.FORMAT: StoreFormatError,
    Status.BUSY: StoreFailedError,
    Status.FENCED: StoreFencedError,
}


class _Pending(NamedTuple):
    done: asyncio.Future[Any]
    load: Load
    answers: bool
    """The result is what the writer answers."""
    lent: Sequence[Place | None]
    """Its large values' places in the outbox."""


class LmdbStore(CommittedRows):
    """A store in a directory, for one owner; see `experience_buffer_server.store.interface.Store`.

    Durability: with "commit", a batch is on disk (fsync) before its commit ends: it survives the
    death of any process, of the machine and of its power. With "interval", a commit ends when the
    batch is in the operating system's cache and the disk follows within the interval: it survives
    the death of any process; if the machine itself dies, the last interval is lost, and on a file
    system that writes blocks out of order the store may be damaged beyond opening.

    Belongs to one event loop's thread; other threads may read (`CommittedRows`).
    """

    def __init__(
        self, path: Path, limit_bytes: int, on_written: Callable[[int, int, float], None] | None
    ) -> None:
        """Use `LmdbStore.open`."""
        super().__init__(path)
        self.place = str(path)
        self.reader_spec: str | None = self.place
        """For `LmdbReader`."""
        self.limit_bytes = limit_bytes
        self.append_limit_bytes = limit_bytes - reserve_bytes(limit_bytes)
        self._owned: dict[int, Ownership] = {}
        """By the buffer's id, our epoch and the number that was given last."""
        self._pack = msgpack.Packer().pack
        self._pending: dict[int, _Pending] = {}
        self._last_number = 0
        self._closing = False
        self._drained = asyncio.Event()
        self._lost = asyncio.Event()
        """The connection to the writer has ended."""
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.WriteTransport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox = Outbox()
        self.failed = asyncio.Event()
        """Set when the store can't go on; watch it to shut down. `failure` says why."""
        self.failure: StoreFailedError | None = None
        self._riders = Riders(self._submit_batch)
        self.backlog = Backlog()
        """What was submitted and has not ended."""
        self.stats = StoreStats()
        self._on_written = on_written

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        durability: Literal["commit", "interval"] = "commit",
        interval_seconds: float = 1.0,
        initial_map_bytes: int = GIBI,
        max_map_bytes: int = 1024 * GIBI,
        lock_timeout_seconds: float = 10.0,
        on_written: Callable[[int, int, float], None] | None = None,
    ) -> Self:
        """Open the store at `path`, or make one.

        Args:
            path: Its directory; made if there is none.
            durability: What a commit waits for; see the class.
            interval_seconds: The longest time between commit and fsync with "interval", above 0.
            initial_map_bytes: Address space set aside at first; it doubles when it is full.
            max_map_bytes: The most that the store may take, a reserve for removals included.
            lock_timeout_seconds: How long to wait for an earlier owner's writer to finish.
            on_written: Called after each turn of the writer, with what it did since the last: its
                transactions, the batches in them, and its seconds. 0 of all three when it only
                tells how full the store is.

        Raises:
            StoreFormatError: The directory holds something else, or another format version.
            StoreFullError: The disk is full.
            StoreFailedError: The directory is in use, or can't be opened.
        """
        if durability == "interval" and not interval_seconds > 0:
            raise ValueError(f"interval_seconds is {interval_seconds}; it must be above 0")
        store = cls(path, max_map_bytes, on_written)
        try:
            process, connection = start_writer(
                path,
                initial_map_bytes=initial_map_bytes,
                max_map_bytes=max_map_bytes,
                sync_interval_seconds=interval_seconds if durability == "interval" else 0.0,
                lock_timeout_seconds=lock_timeout_seconds,
                outbox=store._outbox.descriptor,
            )
            store._process = process
            link = WriterLink(store._on_frame, store._on_lost)
            store._transport = await link.connect(connection)
            await store._ready
            store._begin_reading()
        except BaseException:
            await store.close()
            raise
        return store

    def batch(self) -> WriteBatch:
        """Start a batch of changes."""
        return WriteBatch(self._pack)

    def commit(self, batch: WriteBatch) -> Awaitable[None]:
        """Submit a batch now; see `interface.Store.commit`."""
        self._number(batch)
        if not batch.has_appends:
            self._riders.dismount()
            return self._submit_batch(batch)
        riders = self._riders.board(batch)
        submitted = self._submit_batch(batch)
        for rider in riders:
            submitted.add_done_callback(rider.arrive)
        return submitted

    def ride(self, batch: WriteBatch) -> Awaitable[None]:
        """Commit a small batch with the next append; see `interface.Store.ride`."""
        if batch.has_appends:
            raise TypeError(
                "a batch without appends is needed; others ride along with one that has some"
            )
        if not self.is_taking_in:
            return self.commit(batch)
        self._number(batch)
        return self._riders.wait(batch)

    def _number(self, batch: WriteBatch) -> None:
        """Give it the next number of each claimed buffer that it changes."""
        if self._owned:
            for buffer_id in {operation[1] for operation in batch.operations}:
                owned = self._owned.get(buffer_id)
                if owned is not None:
                    self._owned[buffer_id] = owned._replace(number=owned.number + 1)
                    batch.numbers[buffer_id] = owned.number + 1

    @property
    def is_taking_in(self) -> bool:
        """Whether experiences are being appended now."""
        return self._riders.are_picked_up

    def prune(self, buffer_id: int, before_time: float, *, limit: int = 1000) -> Awaitable[int]:
        """Forget up to `limit` values remembered before `before_time`; how many were forgotten."""
        return self._ask(PRUNE, buffer_id, PRUNE_LIMITS.pack(before_time, limit))

    async def claim(self, buffer_id: int) -> int:
        """Own a buffer from now on; its new epoch. See `interface.Store.claim`."""
        epoch = await self._raise_epoch(buffer_id)
        number = self.ownership(buffer_id).number
        self._owned[buffer_id] = Ownership(epoch, number)
        return epoch

    def _raise_epoch(self, buffer_id: int) -> Awaitable[int]:
        return self._ask(CLAIM, buffer_id, b"")

    def _ask(self, code: int, buffer_id: int, value: bytes) -> Awaitable[int]:
        """Submit what the writer has an answer to."""
        self._riders.dismount()
        asking = Translation(())
        asking.operations.append((code, disk.buffer_key(buffer_id), value))
        return self._submit(asking, answers=True)

    async def last_number(self, buffer_id: int) -> int:
        """The number of the last commit that is stored; see `interface.Store.last_number`."""
        return (await asyncio.to_thread(self.ownership, buffer_id)).number

    def _submit_batch(self, batch: WriteBatch) -> asyncio.Future[Any]:
        owned = self._owned
        stamps = [Stamp(id_, owned[id_].epoch, number) for id_, number in batch.numbers.items()]
        return self._submit(Translation(batch.operations), stamps)

    def _submit(
        self, batch: Translation, stamps: Sequence[Stamp] = (), *, answers: bool = False
    ) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        failure = self.failure
        if self._closing or self._transport is None:
            failure = StoreFailedError(f"the store at {self._path} is closed")
        if failure is not None or self._transport is None:
            done.set_exception(failure or StoreFailedError("not open"))
            return done
        self._last_number += 1
        lent = self._outbox.put_all(batch.large)
        try:
            pieces = writer_protocol.encode_request(
                self._last_number,
                batch.append_bytes,
                batch.operations,
                large=batch.large,
                lent=lent,
                checksums=batch.checksums,
                stamps=stamps,
                pack=self._pack,
            )
        except BaseException:
            self._outbox.take_out(lent)
            raise
        num_bytes = sum(map(len, pieces)) + writer_protocol.lent_bytes(lent)
        load = Load(num_bytes, batch.direct_bytes)
        self._pending[self._last_number] = _Pending(done, load, answers, lent)
        self.backlog.add(load, is_small=not batch.append_bytes)
        self._transport.writelines(pieces)
        return done

    def _on_frame(self, body: bytes) -> None:
        if not self._ready.done():
            ready = writer_protocol.decode_ready(body)
            if ready.status == Status.OK:
                self._ready.set_result(None)
            else:
                self._ready.set_exception(_ERRORS[ready.status](ready.message))
            return
        reply = writer_protocol.decode_reply(body)
        self._count(reply.work)
        for result in reply.results:
            if result.status == Status.FAILED:
                self._fail(result.message)
            pending = self._pending.pop(result.number, None)
            if pending is None:
                continue
            self.backlog.remove(pending.load)
            self._outbox.take_out(pending.lent)
            self.stats.num_full += result.status == Status.FULL
            if pending.done.done():
                continue  # Nobody waits any more.
            if result.status == Status.OK:
                pending.done.set_result(result.answer if pending.answers else None)
            else:
                pending.done.set_exception(_ERRORS[result.status](result.message))
        if not self._pending:
            self._drained.set()

    def _count(self, work: Work) -> None:
        stats = self.stats
        stats.num_transactions += work.num_transactions
        stats.num_batches += work.num_batches
        stats.num_operations += work.num_operations
        stats.apply_seconds += work.apply_seconds
        stats.commit_seconds += work.commit_seconds
        if work.num_transactions:
            self.backlog.committed(work.commit_seconds / work.num_transactions)
        if work.map_bytes:
            stats.live_bytes = work.live_bytes
            stats.file_bytes = work.file_bytes
            stats.map_bytes = work.map_bytes
        if self._on_written is not None:
            seconds = work.apply_seconds + work.commit_seconds
            self._on_written(work.num_transactions, work.num_batches, seconds)

    def _on_lost(self) -> None:
        pid = self._process.pid if self._process is not None else 0
        gone = f"the writer process of {self._path} (pid {pid}) is gone; restart the server"
        if not self._ready.done():
            self._ready.set_exception(StoreFailedError(gone))
        if not self._closing or self._pending:
            self._fail(gone)
        error = self.failure or StoreFailedError(gone)
        for pending in self._pending.values():
            if not pending.done.done():
                pending.done.set_exception(error)
        self._pending.clear()
        self.backlog.clear()
        self._drained.set()
        self._lost.set()

    def _fail(self, message: str) -> None:
        if self.failure is None:
            self.failure = StoreFailedError(message)
        self.failed.set()

    @property
    def pending_bytes(self) -> int:
        """Of the batches that were submitted and have not ended."""
        return self.backlog.num_bytes

    async def until_short(self) -> None:
        """Wait until an append would not wait for long; see `interface.Store.until_short`."""
        await self.backlog.until_short()

    def disk_free_bytes(self) -> int:
        """Free space on the store's disk. From any thread."""
        return free_bytes(self._path)

    async def close(self) -> None:
        """Finish what was submitted, end the writer process and release the store. Idempotent.

        `failure` says afterwards whether the writer's last sync has failed.
        """
        self._riders.dismount()
        self._closing = True
        if self._transport is not None and self._pending:
            self._drained.clear()
            await self._drained.wait()
        if self._transport is not None and not self._transport.is_closing():
            # It syncs then, and may still have something to say.
            self._transport.write_eof()
        # Before the writer ends: a new owner in this process opens the store right after.
        self._end_reading()
        if self._transport is not None:
            await self._lost.wait()
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
        self._outbox.close()
