"""The LMDB environment opened for writing: its format, its growth, its transactions.

Runs in the writer process. Knows nothing of sockets or of what the rows mean.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

import lmdb

from experience_buffer_server.store.interface import StoreFormatError
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk import private_files
from experience_buffer_server.store.lmdb.disk.commit_number import commit_problem, sign_commit
from experience_buffer_server.store.lmdb.disk.disk_room import FULL_CODES, Room
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.disk.opening import CURE, check_format, open_environment
from experience_buffer_server.store.lmdb.fences import FencedError, Fences
from experience_buffer_server.store.lmdb.large.writes import (
    LargeWrites,
    check_no_payloads,
    large_bytes,
)
from experience_buffer_server.store.lmdb.operations import apply
from experience_buffer_server.store.lmdb.writer_protocol import Request, Result, Status, Work

_ADVANCE_BYTES = 256 * 1024
_BATCH_ERRORS = (
    lmdb.MapFullError, lmdb.TxnFullError, lmdb.BadValsizeError, lmdb.KeyExistsError, FencedError
)  # fmt: skip
"""Of a batch that is too large, or of one of its rows."""
_PROBE_BYTES = 1 << 20


class _TheEndError(Exception):
    """The store can't go on after an error.

    Args:
        cause: The error.
    """

    def __init__(self, cause: lmdb.Error | OSError) -> None:
        super().__init__(cause)
        self.cause = cause


class Engine:
    """The one writer of a store. Belongs to one thread."""

    def __init__(
        self, path: Path, *, sync: bool, initial_map_bytes: int, max_map_bytes: int
    ) -> None:
        """Open the store at `path`, or make one where there is none.

        Args:
            path: An existing directory.
            sync: Every commit is on disk when it ends.
            initial_map_bytes: The map's size at first; it doubles when it is full.
            max_map_bytes: The map does not grow beyond this.

        Raises:
            StoreFormatError: It holds something else, or another format version.
            lmdb.Error: It can't be opened.
        """
        self._path = path
        self._max_map_bytes = _whole_pages(max_map_bytes)
        self._env = open_environment(
            path,
            map_size=min(_whole_pages(initial_map_bytes), self._max_map_bytes),
            mode=private_files.FILE_MODE,
            sync=sync,
        )
        self._env.reader_check()
        self._tables = self._open_tables()
        with self._env.begin(buffers=True) as txn:
            if problem := commit_problem(txn, self._tables[Table.META], path):
                raise StoreFormatError(f"{path}: {problem}; {CURE}")
        self._fences = Fences(self._tables[Table.META])
        # What a writer with `sync=False` has answered and, killed, has left to the system.
        self._large = LargeWrites(
            self._env, self._tables, path, syncs=sync, most_bytes=self._max_map_bytes
        )
        self._env.sync(True)
        # A new file survives a power failure only once its directory is on disk, too.
        private_files.sync(path)
        private_files.sync(path.resolve().parent)
        self._room = Room(
            path / "data.mdb", max_map_bytes=self._max_map_bytes, measure=self._live_bytes
        )
        self._page_bytes = int(self._env.stat()["psize"])
        self._note_size()
        self._room.measure()
        self._syncs = sync
        self._append_bytes = 0
        """Estimate of what the last transaction's appends took; 0 where it failed."""
        self.failed = False
        """An error that the store can't go on after."""
        self._work = Work()

    def _open_tables(self) -> list[lmdb._Database]:
        with self._env.begin(write=True) as txn:
            if txn.stat()["entries"] == 0:
                check_no_payloads(self._path)
                meta = self._env.open_db(Table.META.disk_name, txn=txn)
                txn.put(disk.FORMAT_KEY, disk.FORMAT_VALUE, db=meta)
            else:
                try:
                    meta = self._env.open_db(Table.META.disk_name, txn=txn, create=False)
                except (lmdb.NotFoundError, lmdb.IncompatibleError):
                    check_format(None, self._path)
                    raise
                check_format(txn.get(disk.FORMAT_KEY, db=meta), self._path)
            return [self._env.open_db(table.disk_name, txn=txn) for table in Table]

    def write(self, requests: Sequence[Request]) -> tuple[list[Result], Work]:
        """Commit the batches in order, in one transaction if they all fit.

        After one that was refused none is committed before the owner could hear of it: of a commit in
        doubt, the number of the last one that is stored tells what became of it.

        Returns:
            A result for each of the first batches, in order, and what was done.
        """
        self._work = Work()
        results: dict[int, Result] = {}
        admitted: list[Request] = []
        planned_bytes = planned_large_bytes = 0
        for place, request in enumerate(requests):
            refusal = ""
            if request.append_bytes:
                num_bytes = planned_bytes + request.append_bytes
                num_large_bytes = planned_large_bytes + _large_bytes(request)
                try:
                    refusal = self._refusal(num_bytes, num_large_bytes)
                except lmdb.Error as error:
                    return self._fail(requests, error), self._with_sizes(self._work)
            if refusal:
                results[request.number] = Result(request.number, Status.FULL, refusal)
                continue
            if results:
                requests = requests[:place]
                break
            admitted.append(request)
            if request.append_bytes:
                planned_bytes, planned_large_bytes = num_bytes, num_large_bytes
        written = self._write_admitted(admitted)
        self._work = self._work._replace(num_batches=len(written))
        if len(written) == len(admitted):
            written += [results[request.number] for request in requests[len(admitted) :]]
        return written, self._with_sizes(self._work)

    def _refusal(self, num_bytes: int, num_large_bytes: int) -> str:
        """Why appends don't fit, see `Room.refusal`, even if what was freed is taken back.

        Raises:
            lmdb.Error: The store can't go on.
        """
        refusal = self._room.refusal(num_bytes, num_large_bytes)
        if refusal:
            self._env.reader_check()
        while refusal and self._large.can_reclaim:
            try:
                with self._env.begin(write=True) as txn:
                    self._large.reclaim(txn)
                    sign_commit(txn, self._tables[Table.META])
            except lmdb.Error as error:
                self._large.rollback()
                if self._is_the_end(error):
                    raise
                return refusal
            self._large.commit()
            self._note_size()
            refusal = self._room.refusal(num_bytes, num_large_bytes)
        return refusal

    def _write_admitted(self, requests: Sequence[Request]) -> list[Result]:
        if len(requests) > 1:
            try:
                return self._transact(requests)
            except _TheEndError as end:
                return self._fail(requests, end.cause)
            except (lmdb.Error, OSError):
                pass  # One of them is at fault: alone, it fails alone.
        results: list[Result] = []
        for place, request in enumerate(requests):
            try:
                results += self._transact([request])
            except _TheEndError as end:
                return results + self._fail(requests[place:], end.cause)
            except (lmdb.Error, OSError) as error:
                return [*results, _refusal(request, error)]
        return results

    def _is_the_end(self, error: lmdb.Error | OSError) -> bool:
        """Whether nothing may be acknowledged any more: it isn't a batch's fault, nor lack of room.

        After a failed sync, above all: the system may have forgotten what it could not write, and
        the next sync finds nothing to do and succeeds.
        """
        if isinstance(error, OSError):  # Of large payloads.
            return error.errno not in FULL_CODES
        if isinstance(error, _BATCH_ERRORS):
            return False
        if self._is_in_doubt():
            return True
        if error.code in FULL_CODES:
            return False
        # A write cut short by a full disk is reported as an I/O error, too.
        return error.code != errno.EIO or self._room.allocate(_PROBE_BYTES)

    def _is_in_doubt(self) -> bool:
        """Whether the last commit failed at its last page: it may be on the disk, none follows."""
        try:
            self._env.begin(write=True).abort()
        except lmdb.Error:
            return True
        return False

    def _fail(self, requests: Sequence[Request], error: lmdb.Error | OSError) -> list[Result]:
        self.failed = True
        message = (
            f"{self._path}: {error}; what was acknowledged before is on disk. Check the disk (the "
            "system's log says more), then start the server again"
        )
        return [Result(request.number, Status.FAILED, message) for request in requests]

    def _transact(self, requests: Sequence[Request]) -> list[Result]:
        """One transaction, again in a larger map while there is no room."""
        extra = False
        while True:
            try:
                return self._transact_once(requests)
            except lmdb.MapFullError:
                size = self._env.info()["map_size"]
                if size < self._max_map_bytes:
                    self._env.set_mapsize(min(2 * size, self._max_map_bytes))
                elif not extra:
                    extra = True
                    self._free_pending()
                else:
                    raise

    def _transact_once(self, requests: Sequence[Request]) -> list[Result]:
        started = time.monotonic()
        self._append_bytes = 0
        txn = self._env.begin(write=True)
        try:
            answers = [
                apply(txn, self._tables, self._large, self._fences, request) for request in requests
            ]
            self._fences.write(txn)
            sign_commit(txn, self._tables[Table.META])
            applied = time.monotonic()
            self._large.write()
            txn.commit()
        except BaseException as error:
            txn.abort()
            if isinstance(error, lmdb.Error | OSError) and self._is_the_end(error):
                # No room is given back: the next start may find that the commit has succeeded.
                raise _TheEndError(error) from error
            self._large.rollback()
            self._fences.rollback()
            raise
        self._large.commit()
        self._fences.commit()
        ended = time.monotonic()
        self._note_size()
        self._append_bytes = sum(r.append_bytes - _large_bytes(r) for r in requests)
        self._work = self._work._replace(
            num_transactions=self._work.num_transactions + 1,
            num_operations=self._work.num_operations + sum(len(r.operations) for r in requests),
            apply_seconds=self._work.apply_seconds + applied - started,
            commit_seconds=self._work.commit_seconds + ended - applied,
        )
        return [
            Result(request.number, Status.OK, "", answer)
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _free_pending(self) -> None:
        """Make the pages that were freed last reusable.

        LMDB reuses a page only two transactions after the one that freed it, and not while a reader
        may see it. In a full map a transaction of no use is what lets the next one succeed; the few
        pages that it takes must never be refused, so it alone may pass the limit.
        """
        self._env.reader_check()
        for grow_bytes in (0, _ADVANCE_BYTES):
            if grow_bytes:
                self._env.set_mapsize(self._env.info()["map_size"] + grow_bytes)
            try:
                with self._env.begin(write=True) as txn:
                    sign_commit(txn, self._tables[Table.META])
            except lmdb.MapFullError:
                continue
            self._note_size()
            return

    def measure(self) -> Work:
        """How full the store is; `write` says it as it was when this was last asked."""
        self._room.measure()
        return self._with_sizes(Work())

    def _with_sizes(self, work: Work) -> Work:
        return work._replace(
            live_bytes=self._room.live_bytes,
            file_bytes=self._room.file_bytes,
            map_bytes=self._map_bytes,
        )

    def _live_bytes(self) -> int:
        pages = 2
        with self._env.begin() as txn:
            for stat in (txn.stat(), *(txn.stat(db) for db in self._tables)):
                pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return pages * self._page_bytes

    def _note_size(self) -> None:
        info = self._env.info()
        self._map_bytes = int(info["map_size"])
        self._room.update(
            file_bytes=(info["last_pgno"] + 1) * self._page_bytes,
            large_bytes=self._large.used_bytes,
            large_pending_bytes=self._large.pending_bytes,
            large_file_bytes=self._large.file_bytes,
        )

    def make_ready(self) -> None:
        """Do ahead what the next append would have to wait for; for when nobody waits.

        Raises:
            OSError: The disk fails.
        """
        if self._syncs and self._append_bytes:
            self._room.write_ahead(self._append_bytes)

    def sync(self) -> None:
        """Put on disk what was committed since the last time.

        Raises:
            lmdb.Error: It can't be written; what was acknowledged since may be lost.
            OSError: The same.
        """
        self._large.sync()
        self._env.sync(True)
        self._large.note_synced()

    def check_readers(self) -> None:
        """Free the slots of readers that died; they would keep removed pages from being reused."""
        self._env.reader_check()

    def close(self) -> None:
        """Release the store."""
        self._large.close()
        self._room.close()
        self._env.close()


def _large_bytes(request: Request) -> int:
    """What a batch takes in the file of large payloads."""
    return sum([large_bytes(value) for _, _, value in request.operations])


def _refusal(request: Request, error: lmdb.Error | OSError) -> Result:
    """How a batch ended that could not be stored, and that others are not affected by."""
    if isinstance(error, lmdb.BadValsizeError):
        return Result(request.number, Status.REFUSED, f"a key or value is too long: {error}")
    if isinstance(error, FencedError):
        return Result(request.number, Status.FENCED, str(error))
    if isinstance(error, lmdb.KeyExistsError):
        return Result(request.number, Status.REFUSED, f"a number was given twice: {error}")
    if isinstance(error, lmdb.MapFullError | lmdb.TxnFullError):
        return Result(request.number, Status.FULL, f"no room in the map for the batch: {error}")
    return Result(request.number, Status.FULL, f"the disk is full: {error}")


def _whole_pages(num_bytes: int) -> int:
    page_bytes = os.sysconf("SC_PAGESIZE")
    return max(1, num_bytes // page_bytes) * page_bytes
