"""The demo's processes besides the server: the trainer's ranks and the workers.

They are forked from one process that has imported what they need, which takes seconds once and not
for each of them. Ctrl-C, which a terminal sends to all, reaches none of them: whoever started them
ends them.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

from examples.demo.history import Update, Verdict
from examples.demo.settings import DemoSettings

EXIT_TIMEOUT_SECONDS = 90.0
"""How long a process may take to end; longer than its calls may be repeated."""
_CONTEXT = multiprocessing.get_context("forkserver")


class DemoError(RuntimeError):
    """A process of the demo ended that should not have, or didn't end that should have."""


@contextmanager
def no_interrupts() -> Iterator[None]:
    """Keep Ctrl-C from what is started meanwhile; for this process it waits until the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepare() -> None:
    """Begin to import what the processes need; returns at once."""
    _CONTEXT.set_forkserver_preload(["examples.demo.trainer", "examples.demo.worker"])
    # It allows interrupts when it has started, so it can't be started below.
    resource_tracker.ensure_running()
    with no_interrupts():
        forkserver.ensure_running()


class RankProcesses:
    """The ranks of the trainer, which live and die together. Not thread-safe."""

    def __init__(self, settings: DemoSettings) -> None:
        self._settings = settings
        self._num_lives = 0
        self._processes: list[BaseProcess] = []

    def start(self) -> None:
        """Start all ranks; they find their checkpoint by themselves."""
        self._num_lives += 1
        rendezvous = self._settings.folder / f"ranks-{self._num_lives}"
        self._first, end = _CONTEXT.Pipe()
        self._processes = [
            _CONTEXT.Process(
                target=_run_rank,
                args=(self._settings, rank, rendezvous, end if rank == 0 else None),
                name=f"rank {rank} of the trainer",
                daemon=True,
            )
            for rank in range(self._settings.num_ranks)
        ]
        _start(self._processes)
        # Held by the first rank alone, its end of the pipe closes when that rank ends.
        end.close()

    def receive(self, timeout_seconds: float) -> Update | Verdict | None:
        """Wait for the next news of the first rank; None when the time is over.

        Raises:
            EOFError: The first rank has ended.
        """
        try:
            if not self._first.poll(timeout_seconds):
                return None
            news: Update | Verdict = self._first.recv()
        except ConnectionError:
            raise EOFError from None
        return news

    def end(self) -> None:
        """Tell them that it is enough: they end after the update that they are at."""
        with suppress(ConnectionError):  # They have ended.
            self._first.send(None)

    def check(self) -> None:
        """Raise DemoError if one has failed."""
        for process in self._processes:
            if process.exitcode:
                raise _ended(process)

    def join(self) -> None:
        """Wait for their end; DemoError if one fails or is stuck."""
        _join(self._processes)

    def kill(self) -> None:
        """End all that still run with SIGKILL."""
        _kill(self._processes)


class WorkerProcesses:
    """The workers. Not thread-safe."""

    def __init__(self, settings: DemoSettings) -> None:
        self._stop = _CONTEXT.Event()
        self._processes: list[BaseProcess] = [
            _CONTEXT.Process(
                target=_run_worker,
                args=(settings, index, self._stop),
                name=f"worker {index}",
                daemon=True,
            )
            for index in range(settings.num_workers)
        ]

    def start(self) -> None:
        """Start all workers."""
        _start(self._processes)

    def check(self) -> None:
        """Raise DemoError if one has ended."""
        for process in self._processes:
            if not process.is_alive():
                raise _ended(process)

    def join(self) -> None:
        """Let them finish what they push, so that their journals are complete."""
        self._stop.set()
        _join(self._processes)

    def kill(self) -> None:
        """End all that still run with SIGKILL."""
        _kill(self._processes)


def _run_rank(
    settings: DemoSettings, rank: int, rendezvous: Path, parent: Connection | None
) -> None:
    # Imported in the processes alone: this one needs no torch.
    from examples.demo import trainer

    _leave_word_to_parent()
    trainer.run(settings, rank, rendezvous, parent)


def _run_worker(settings: DemoSettings, index: int, stop: Event) -> None:
    from examples.demo import worker

    _leave_word_to_parent()
    worker.run(settings, index, stop)


def _leave_word_to_parent() -> None:
    """Who killed the server says when it is away and back: the clients needn't, each for itself."""
    logging.getLogger("experience_buffer").setLevel(logging.ERROR)


def _start(processes: list[BaseProcess]) -> None:
    with no_interrupts():
        for process in processes:
            process.start()


def _join(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(EXIT_TIMEOUT_SECONDS)
        if process.exitcode != 0:
            raise _ended(process)


def _kill(processes: list[BaseProcess]) -> None:
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    for process in alive:
        process.join()


def how_it_ended(status: int) -> str:
    """Say in words how a process ended, by its exit status, which is negative for a signal."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


def _ended(process: BaseProcess) -> DemoError:
    status = process.exitcode
    return DemoError(f"{process.name} {'is stuck' if status is None else how_it_ended(status)}")
