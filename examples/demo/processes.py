"""The demo's processes besides the server: the trainer's ranks and the workers."""

from __future__ import annotations

import multiprocessing
from multiprocessing.process import BaseProcess

from examples.demo import trainer, worker
from examples.demo.settings import DemoSettings
from examples.demo.trainer import Update

EXIT_TIMEOUT_SECONDS = 90.0
"""How long a process may take to end; longer than its calls may be repeated."""
_CONTEXT = multiprocessing.get_context("spawn")


class DemoError(RuntimeError):
    """A process of the demo ended that should not have, or didn't end that should have."""


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
        self._reports, first_end = _CONTEXT.Pipe(duplex=False)
        self._processes = [
            _CONTEXT.Process(
                target=trainer.run,
                args=(self._settings, rank, rendezvous, first_end if rank == 0 else None),
                name=f"rank {rank} of the trainer",
                daemon=True,
            )
            for rank in range(self._settings.num_ranks)
        ]
        for process in self._processes:
            process.start()
        # Held by the first rank alone, its end of the pipe closes when that rank ends.
        first_end.close()

    def receive(self, timeout_seconds: float) -> Update | None:
        """Wait for the next update; None when the time is over.

        Raises:
            EOFError: The first rank has ended.
        """
        if not self._reports.poll(timeout_seconds):
            return None
        update: Update = self._reports.recv()
        return update

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
                target=worker.run,
                args=(settings, index, self._stop),
                name=f"worker {index}",
                daemon=True,
            )
            for index in range(settings.num_workers)
        ]

    def start(self) -> None:
        """Start all workers."""
        for process in self._processes:
            process.start()

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


def _ended(process: BaseProcess) -> DemoError:
    how = "is stuck" if process.is_alive() else f"ended with exit status {process.exitcode}"
    return DemoError(f"{process.name} {how}")
