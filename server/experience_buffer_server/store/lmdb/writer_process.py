"""The writer process of a store: `python -m experience_buffer_server.store.lmdb.writer_process`.

A process of its own, because an LMDB transaction releases and retakes the interpreter's lock at
every put and would starve beside a busy event loop. What arrives while a commit waits for the disk
goes into the next transaction together. It ends when its owner closes the socket, after committing
what it has completely received, or dies: what was answered is on disk then. Not for use by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import lmdb

from experience_buffer_server.runtime.memory import calm_collector, keep_large_blocks
from experience_buffer_server.store.interface import StoreFailedError, StoreFormatError
from experience_buffer_server.store.lmdb import writer_protocol
from experience_buffer_server.store.lmdb.disk import private_files
from experience_buffer_server.store.lmdb.engine import Engine
from experience_buffer_server.store.lmdb.writer_inbox import Inbox
from experience_buffer_server.store.lmdb.writer_protocol import Ready, Reply, Result, Status, Work

LOCK_NAME = "writer.lock"
READER_CHECK_SECONDS = 60.0
MEASURE_SECONDS = 0.5
"""After a commit: how full the store is then takes as long as a small commit's puts."""
_LOCK_POLL_SECONDS = 0.05
_LAST_SECONDS = 5.0
"""For its owner to take note that the store has failed."""
_PART_BYTES = 1 << 20
_NO_OUTBOX = memoryview(b"")


class StoreInUseError(StoreFailedError):
    """Another writer has the directory."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one owner; the exit status is 1 after an error that it was told of."""
    options = _parse(arguments)
    keep_large_blocks()
    # The owner decides when to stop: a signal to the whole process group must not cut the drain.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=options.fd) as connection:
        try:
            return _serve(connection, options)
        except (BrokenPipeError, ConnectionResetError):
            return 0  # The owner is gone; so is everyone who could be told.


def _serve(connection: socket.socket, options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        opened = _open(options, stack)
        if isinstance(opened, Ready):
            connection.sendall(writer_protocol.encode(opened))
            return 1
        try:
            outbox = attach(options.outbox)
        except OSError as error:
            why = f"can't have the memory that large payloads come in: {error}"
            connection.sendall(writer_protocol.encode(Ready(Status.FAILED, why)))
            return 1
        connection.sendall(writer_protocol.encode(Ready(Status.OK)))
        calm_collector()
        with closing(Inbox(connection)) as inbox:
            status = _Loop(
                connection, inbox, opened, options.sync_interval_seconds, outbox=outbox
            ).run()
        if status:
            _hear_out(connection)
        return status


def attach(descriptor: int) -> memoryview:
    """The outbox as the writer process has it; empty where there is none. The descriptor is closed."""
    if descriptor < 0:
        return _NO_OUTBOX
    try:
        return memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
    finally:
        os.close(descriptor)


def _hear_out(connection: socket.socket) -> None:
    """Take what the owner is still sending, until it has read to the end and closes the socket.

    A batch that it could not send would end its connection before it reads why the store has failed.
    """
    deadline = time.monotonic() + _LAST_SECONDS
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
        connection.shutdown(socket.SHUT_WR)
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(_PART_BYTES):
                return


def _open(options: argparse.Namespace, stack: ExitStack) -> Engine | Ready:
    """Lock and open the store until `stack` is closed, or say why not."""
    path: Path = options.path
    try:
        private_files.make_folder(path)
        stack.enter_context(hold_lock(path, options.lock_timeout_seconds))
        engine = Engine(
            path,
            sync=options.sync_interval_seconds == 0,
            initial_map_bytes=options.initial_map_bytes,
            max_map_bytes=options.max_map_bytes,
        )
    except StoreInUseError as error:
        return Ready(Status.BUSY, str(error))
    except StoreFormatError as error:
        return Ready(Status.FORMAT, str(error))
    except (lmdb.DiskError, lmdb.MapFullError) as error:
        return Ready(Status.FULL, f"no room to open the store at {path}: {error}")
    except (lmdb.Error, OSError) as error:
        return Ready(Status.FAILED, f"can't open the store at {path}: {error}")
    stack.callback(engine.close)
    return engine


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="experience_buffer_server.store.lmdb.writer_process")
    parser.add_argument("--fd", type=int, required=True, help="inherited stream socket")
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--initial-map-bytes", type=int, required=True)
    parser.add_argument("--max-map-bytes", type=int, required=True)
    parser.add_argument("--sync-interval-seconds", type=float, default=0.0, help="0: every commit")
    parser.add_argument("--lock-timeout-seconds", type=float, default=10.0)
    parser.add_argument("--outbox", type=int, default=-1, help="inherited memory of large payloads")
    return parser.parse_args(arguments)


@contextmanager
def hold_lock(path: Path, timeout_seconds: float) -> Iterator[None]:
    """Keep other writers out; wait for one that is finishing.

    Raises:
        StoreInUseError: It hasn't finished in time.
    """
    deadline = time.monotonic() + timeout_seconds
    with open(path / LOCK_NAME, "a+", encoding="ascii", opener=private_files.opener) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StoreInUseError(_explain_holder(path, timeout_seconds)) from None
                time.sleep(_LOCK_POLL_SECONDS)
        file.truncate(0)
        file.write(f"{os.getpid()} {os.getppid()}\n")
        file.flush()
        yield


def _explain_holder(path: Path, timeout_seconds: float) -> str:
    pids = (path / LOCK_NAME).read_text(encoding="ascii", errors="replace").split()
    writer, server = pids if len(pids) == 2 else ("unknown", "unknown")
    return (
        f"{path} is in use by another server (pid {server}, its writer process pid {writer}) and "
        f"was not released within {timeout_seconds:g} s; stop that server or use another directory"
    )


class _Loop:
    """Commits many batches at once, and replies."""

    def __init__(
        self,
        connection: socket.socket,
        inbox: Inbox,
        engine: Engine,
        interval_seconds: float,
        *,
        outbox: memoryview = _NO_OUTBOX,
    ) -> None:
        self._connection = connection
        self._outbox = outbox
        self._inbox = inbox
        self._engine = engine
        self._interval_seconds = interval_seconds
        self._next_sync = float("inf")
        self._next_measure = float("inf")
        self._next_reader_check = time.monotonic() + READER_CHECK_SECONDS

    def run(self) -> int:
        """Serve until the owner closes the socket, or dies; 1 if the store can't go on."""
        try:
            return self._serve()
        except (BrokenPipeError, ConnectionResetError):
            # Nobody is left to hear of it, but what was answered before is still due on the disk.
            return 0 if self._keep_house(last=True) else 1

    def _serve(self) -> int:
        open_ = True
        while open_:
            wake = min(self._next_sync, self._next_measure, self._next_reader_check)
            turn, open_ = self._inbox.take(wake - time.monotonic())
            requests = [
                writer_protocol.decode_request(frame.document, frame.large, self._outbox)
                for frame in turn
            ]
            while requests and not self._engine.failed:
                results, work = self._engine.write(requests)
                self._note_written()
                self._connection.sendall(writer_protocol.encode(Reply(results, work)))
                del requests[: len(results)]
            if self._engine.failed or not self._keep_house(last=not open_):
                return 1
        return 0

    def _note_written(self) -> None:
        now = time.monotonic()
        self._next_measure = min(self._next_measure, now + MEASURE_SECONDS)
        if self._interval_seconds:
            self._next_sync = min(self._next_sync, now + self._interval_seconds)

    def _keep_house(self, *, last: bool) -> bool:
        """What nobody waits for, or is due by the clock; false if the store can't go on."""
        now = time.monotonic()
        if now >= self._next_reader_check:
            self._engine.check_readers()
            self._next_reader_check = now + READER_CHECK_SECONDS
        is_idle = not last and self._inbox.is_idle
        if now >= self._next_measure:
            self._next_measure = float("inf")
            sizes = Reply([], self._engine.measure())
            if is_idle:  # Else the next reply says it.
                self._connection.sendall(writer_protocol.encode(sizes))
        if now >= self._next_sync or (last and self._next_sync != float("inf")):
            self._next_sync = float("inf")
            try:
                self._engine.sync()
            except (lmdb.Error, OSError) as error:
                return self._give_up(f"acknowledged data may be lost: {error}")
        elif is_idle:
            try:
                self._engine.make_ready()
            except OSError as error:
                return self._give_up(f"the disk fails, what was acknowledged is on it: {error}")
        return True

    def _give_up(self, why: str) -> bool:
        failure = Result(0, Status.FAILED, why)
        self._connection.sendall(writer_protocol.encode(Reply([failure], Work())))
        return False


if __name__ == "__main__":
    sys.exit(main())
