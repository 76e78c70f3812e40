"""Runs the demo: starts and kills its processes, watches them, and judges what came of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.demo import task, weights
from examples.demo.display import Display
from examples.demo.history import Depth, History, Kill
from examples.demo.journal import Audit, audit
from examples.demo.model import Policy, accuracy
from examples.demo.plot import write_plot
from examples.demo.processes import EXIT_TIMEOUT_SECONDS, DemoError, RankProcesses, WorkerProcesses
from examples.demo.server import Server
from examples.demo.settings import BUFFER, CONSUMER, DemoSettings
from examples.demo.trainer import Update
from experience_buffer import (
    AdvantageConfig,
    BufferConfig,
    Client,
    ConsumerConfig,
    DeadlineExceededError,
    Pacing,
    Staleness,
    UnavailableError,
)

NUM_JUDGED = 1000
"""Held-out problems that decide whether the run succeeded."""
DEPTH_INTERVAL_SECONDS = 0.25
KILL_SERVER_AFTER, KILL_TRAINER_AFTER = 0.4, 0.7
"""Parts of the updates."""


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
    """One run of the demo. To be used once, from the main thread.

    Args:
        settings: The run's.
        server: Not started yet.
        kills: Whether the server and, later, the trainer are killed on the way.
    """

    def __init__(self, settings: DemoSettings, server: Server, *, kills: bool) -> None:
        self._settings = settings
        self._server = server
        self._history = History()
        self._last_depth_time = 0.0
        self._ranks = RankProcesses(settings)
        self._workers = WorkerProcesses(settings)
        self._planned = ["server", "trainer"] if kills else []
        """What is still to be killed, in order."""

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
                self._ranks.start()
                self._workers.start()
                self._watch(display, observer)
                self._ranks.join()
                self._workers.join()
                stored = [summary.uid for summary in client.list(buffer=BUFFER, page_size=1000)]
            self._server.stop()
        finally:
            # Nothing runs any more after a run without errors.
            self._ranks.kill()
            self._workers.kill()
            self._server.kill()
        write_plot(self._history, plot_path, target_accuracy=settings.target_accuracy)
        return self._judge(stored)

    def _watch(self, display: Display, observer: Client) -> None:
        """Follow the training until the trainer ends."""
        num_lives = 1 + len(self._planned)
        end_time = time.monotonic() + num_lives * self._settings.max_seconds + EXIT_TIMEOUT_SECONDS
        while True:
            try:
                update = self._ranks.receive(DEPTH_INTERVAL_SECONDS / 2)
            except EOFError:
                return
            if update is not None:
                self._note_update(update, display)
            self._kill_what_is_due(display)
            self._note_depth(observer)
            self._ranks.check()
            self._workers.check()
            if self._server.has_ended:
                raise DemoError("the server ended by itself, see its server.log")
            if time.monotonic() > end_time:
                raise DemoError("the training is stuck")

    def _note_update(self, update: Update, display: Display) -> None:
        history = self._history
        history.updates.append(update)
        last = history.kills[-1] if history.kills else None
        if last is not None and last.recovery_seconds is None:
            last.recovery_seconds = time.time() - last.time
            last.resumed_version = update.version
            display.say(
                f"the trainer resumed from its checkpoint of update {update.version}, "
                f"{last.recovery_seconds:.1f} s after the kill"
            )
        display.show(update, history)

    def _kill_what_is_due(self, display: Display) -> None:
        done = self._history.version / self._settings.num_updates
        if self._planned == ["server", "trainer"] and done >= KILL_SERVER_AFTER:
            self._kill_server(display)
        elif self._planned == ["trainer"] and done >= KILL_TRAINER_AFTER:
            self._kill_trainer(display)

    def _kill_server(self, display: Display) -> None:
        kill = self._note_kill("server")
        display.say("killing the server (SIGKILL); workers and trainer are not told")
        self._server.kill()
        self._server.start()
        kill.recovery_seconds = time.time() - kill.time
        display.say(f"serving again {kill.recovery_seconds:.1f} s after the kill")

    def _kill_trainer(self, display: Display) -> None:
        self._note_kill("trainer")
        display.say("killing the ranks of the trainer (SIGKILL); server and workers are not told")
        self._ranks.kill()
        self._ranks.start()

    def _note_kill(self, what: str) -> Kill:
        self._planned.remove(what)
        kill = Kill(what=what, time=time.time(), version=self._history.version)
        self._history.kills.append(kill)
        return kill

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
        (trainer,) = stats.consumers
        groups = trainer.num_ready_units + trainer.num_leased_units + trainer.num_held_units
        waiting = groups * self._settings.group_size
        self._history.depths.append(Depth(time.time(), waiting, trainer.num_retained_experiences))

    def _judge(self, stored: list[str]) -> Outcome:
        settings = self._settings
        torch.set_num_threads(1)
        policy = Policy()
        weights.load(policy, path=settings.weights_path)
        problems = task.held_out_problems(NUM_JUDGED, seed=settings.seed + 1)
        acked = [settings.acked_path(index) for index in range(settings.num_workers)]
        trained = [settings.trained_path(rank) for rank in range(settings.num_ranks)]
        return Outcome(
            accuracy=accuracy(policy, problems),
            audit=audit(acked, trained=trained, in_buffer=stored),
            history=self._history,
            target_accuracy=settings.target_accuracy,
        )


def buffer_config(settings: DemoSettings) -> BufferConfig:
    """Describe the buffer: whole groups for the trainer, GRPO, fresh tasks only, a bound."""
    # What waits for the trainer, and what is kept until its next checkpoint; twice that is never
    # reached.
    num_batches = settings.max_staleness + 1 + settings.checkpoint_every
    max_groups = 2 * num_batches * settings.groups_per_update
    return BufferConfig(
        BUFFER,
        group_by="task",
        group_size=settings.group_size,
        consumers=(
            ConsumerConfig(
                CONSUMER,
                unit="group",
                # The pacing keeps experiences fresher; what a crash delayed comes marked.
                staleness=Staleness(max_lag=2 * settings.max_staleness, on_stale="mark"),
            ),
        ),
        advantage=AdvantageConfig("grpo"),
        pacing=Pacing(
            consumer=CONSUMER,
            max_staleness=settings.max_staleness,
            batch_size=settings.groups_per_update,
        ),
        max_items=max_groups * settings.group_size,
    )
