"""Starts the demo's processes, watches them, and judges what came of them."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from examples.demo import task, trainer, weights, worker
from examples.demo.display import Display
from examples.demo.history import History
from examples.demo.journal import Audit, audit
from examples.demo.model import Policy, accuracy
from examples.demo.plot import write_plot
from examples.demo.server import Server
from examples.demo.settings import BUFFER, CONSUMER, DemoSettings
from experience_buffer import (
    AdvantageConfig,
    BufferConfig,
    Client,
    ConsumerConfig,
    DeadlineExceededError,
    UnavailableError,
)

NUM_JUDGED = 1000
"""Held-out problems that decide whether the run succeeded."""
DEPTH_INTERVAL_SECONDS = 0.25
EXIT_TIMEOUT_SECONDS = 90.0
"""How long a process may take to end; longer than a push may be repeated."""


class DemoError(RuntimeError):
    """A process of the demo ended that should not have, or didn't end that should have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run went."""

    accuracy: float
    """Of the last policy on `NUM_JUDGED` held-out problems, 0 to 1."""
    audit: Audit
    history: History
    target_accuracy: float

    @property
    def is_success(self) -> bool:
        """True when the policy is good enough and nothing acknowledged is lost."""
        return self.accuracy >= self.target_accuracy and self.audit.is_clean


class Runner:
    """One run of the demo. To be used once, from the main thread."""

    def __init__(self, settings: DemoSettings, server: Server, *, kill_server: bool) -> None:
        self._settings = settings
        self._server = server
        self._kill_version = settings.num_updates // 2 if kill_server else None
        self._history = History()
        self._last_depth_time = 0.0
        context = multiprocessing.get_context("spawn")
        self._reports, trainer_end = context.Pipe(duplex=False)
        self._trainer_end: Connection = trainer_end
        self._stop = context.Event()
        self._trainer: BaseProcess = context.Process(
            target=trainer.run, args=(settings, trainer_end), name="trainer", daemon=True
        )
        self._workers: list[BaseProcess] = [
            context.Process(
                target=worker.run,
                args=(settings, index, self._stop),
                name=f"worker {index}",
                daemon=True,
            )
            for index in range(settings.num_workers)
        ]

    def run(self, display: Display, *, plot_path: Path) -> Outcome:
        """Run to the end; leaves no process behind, whatever happens.

        Raises:
            DemoError: A process died, or one is stuck.
            ServerError: The server doesn't start.
        """
        settings = self._settings
        try:
            seconds = self._server.start()
            display.say(f"server on {settings.address}, serving after {seconds:.1f} s")
            with (
                Client(settings.address) as client,
                # Short-tempered, so that a killed server doesn't hold up the watch.
                Client(settings.address, timeout=1.0) as observer,
            ):
                client.create_buffer(buffer_config(settings))
                self._start_processes()
                self._watch(display, observer)
                self._end_processes()
                stored = [summary.uid for summary in client.list(buffer=BUFFER, page_size=1000)]
            self._server.stop()
        finally:
            self._abandon()
        write_plot(self._history, plot_path, target_accuracy=settings.target_accuracy)
        return self._judge(stored)

    def _start_processes(self) -> None:
        for process in (self._trainer, *self._workers):
            process.start()
        # Held by the trainer alone, its end of the pipe closes when the trainer ends.
        self._trainer_end.close()

    def _watch(self, display: Display, observer: Client) -> None:
        """Follow the training until the trainer closes its end of the pipe."""
        end_time = time.monotonic() + self._settings.max_seconds + EXIT_TIMEOUT_SECONDS
        while True:
            if self._reports.poll(DEPTH_INTERVAL_SECONDS / 2):
                try:
                    update = self._reports.recv()
                except EOFError:
                    return
                self._history.updates.append(update)
                display.show(update, self._history)
            if self._kill_version is not None and self._history.version >= self._kill_version:
                self._kill_version = None
                self._kill_and_restart(display)
            self._note_depth(observer)
            self._check_alive()
            if time.monotonic() > end_time:
                raise DemoError("the training is stuck")

    def _kill_and_restart(self, display: Display) -> None:
        killed_time = time.monotonic()
        self._history.kill_time = time.time()
        display.say("killing the server (SIGKILL); workers and trainer are not told")
        self._server.kill()
        self._server.start()
        self._history.recovery_seconds = time.monotonic() - killed_time
        display.say(f"serving again {self._history.recovery_seconds:.1f} s after the kill")

    def _note_depth(self, observer: Client) -> None:
        if not self._history.updates:
            return
        if time.monotonic() - self._last_depth_time < DEPTH_INTERVAL_SECONDS:
            return
        self._last_depth_time = time.monotonic()
        try:
            (stats,) = observer.get_stats(BUFFER).buffers
        except (UnavailableError, DeadlineExceededError):
            # A gap in the curve, no more.
            return
        self._history.depths.append((time.time(), stats.num_items))

    def _check_alive(self) -> None:
        for process in self._workers:
            if not process.is_alive():
                raise DemoError(f"{process.name} ended with exit status {process.exitcode}")
        if self._server.has_ended:
            raise DemoError("the server ended by itself, see its server.log")

    def _end_processes(self) -> None:
        """Let the workers finish what they push, so that their journals are complete."""
        self._stop.set()
        for process in (self._trainer, *self._workers):
            process.join(EXIT_TIMEOUT_SECONDS)
            if process.exitcode != 0:
                raise DemoError(f"{process.name} ended with exit status {process.exitcode}")

    def _abandon(self) -> None:
        """End whatever still runs; nothing does after a run without errors."""
        for process in (self._trainer, *self._workers):
            if process.is_alive():
                process.kill()
                process.join()
        self._server.kill()

    def _judge(self, stored: list[str]) -> Outcome:
        settings = self._settings
        torch.set_num_threads(1)
        policy = Policy()
        weights.load(policy, path=settings.weights_path)
        problems = task.held_out_problems(NUM_JUDGED, seed=settings.seed + 1)
        acked = [settings.acked_path(index) for index in range(settings.num_workers)]
        return Outcome(
            accuracy=accuracy(policy, problems),
            audit=audit(acked, trained=settings.trained_path, in_buffer=stored),
            history=self._history,
            target_accuracy=settings.target_accuracy,
        )


def buffer_config(settings: DemoSettings) -> BufferConfig:
    """Describe the buffer: whole groups for the trainer, GRPO, a bound on what waits."""
    # Twice what the workers' pacing lets wait: they pause long before the server refuses.
    max_groups = 2 * (settings.max_rounds_ahead + 1) * settings.groups_per_update
    return BufferConfig(
        BUFFER,
        group_by="task",
        group_size=settings.group_size,
        consumers=(ConsumerConfig(CONSUMER, unit="group"),),
        advantage=AdvantageConfig("grpo"),
        max_items=max_groups * settings.group_size,
    )
