"""Runs the whole demo: starts its processes, watches them, says when it is enough."""

from __future__ import annotations

import time
from dataclasses import dataclass

from examples.demo.display import Display
from examples.demo.history import Depth, History, Kill, Update, Verdict
from examples.demo.journal import Audit, audit
from examples.demo.processes import EXIT_TIMEOUT_SECONDS, DemoError, RankProcesses, WorkerProcesses
from examples.demo.server import Server
from examples.demo.settings import BUFFER, CONSUMER, DemoSettings
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
from experience_buffer.values import ConsumerStats

DEPTH_INTERVAL_SECONDS = 0.25
KILL_SERVER_AFTER, KILL_TRAINER_AFTER = 0.2, 0.45
"""Parts of the updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run went."""

    settings: DemoSettings
    audit: Audit
    history: History
    not_killed: tuple[str, ...] = ()
    """What was to be killed, and the training ended before."""


class Runner:
    """One run of the demo. To be used once, from the main thread.

    Args:
        settings: The run's.
        server: Not started yet; still serves after a run without errors.
        kills: Whether the server and, later, the trainer are killed on the way.
    """

    def __init__(self, settings: DemoSettings, server: Server, *, kills: bool) -> None:
        self._settings = settings
        self._server = server
        self._history = History()
        self._last_depth_time = 0.0
        self._num_stale_units = 0
        """That the server has counted in this life of it."""
        self._ranks = RankProcesses(settings)
        self._workers = WorkerProcesses(settings)
        self._planned = ["server", "trainer"] if kills else []
        """What is still to be killed, in order."""
        self._is_ending = False

    def run(self, display: Display) -> Outcome:
        """Run to the end; leaves no worker and no rank behind, whatever happens.

        Raises:
            DemoError: A process died, or one is stuck.
            ServerError: The server doesn't start.
        """
        settings = self._settings
        try:
            with (
                Client(settings.address) as client,
                # Short-tempered, so that a killed server doesn't hold up the watch.
                Client(settings.address, timeout=1.0) as observer,
            ):
                seconds = self._server.start()
                display.say(f"server: serves on {settings.address} after {seconds:.1f} s")
                client.create_buffer(buffer_config(settings))
                display.say(
                    f"starting {settings.num_workers} rollout workers and a trainer of "
                    f"{settings.num_ranks} ranks; the first update follows within seconds"
                )
                display.say("")
                self._ranks.start()
                self._workers.start()
                display.explain()
                self._watch(display, client, observer)
                self._ranks.join()
                self._workers.join()
                display.finish(self._history)
                self._note_stats(client)
                stored = [summary.uid for summary in client.list(buffer=BUFFER, page_size=1000)]
        finally:
            # Nothing runs any more after a run without errors.
            self._ranks.kill()
            self._workers.kill()
        return self._outcome(stored)

    def _watch(self, display: Display, client: Client, observer: Client) -> None:
        """Follow the training until the trainer ends."""
        begin_time = time.monotonic()
        while True:
            try:
                news = self._ranks.receive(DEPTH_INTERVAL_SECONDS / 2)
            except EOFError:
                return
            if isinstance(news, Verdict):
                self._history.verdict = news
            elif news is not None:
                self._note_update(news, display)
            self._kill_what_is_due(display, client)
            self._note_depth(observer)
            self._ranks.check()
            self._workers.check()
            if fate := self._server.fate:
                raise DemoError(fate)
            self._end_when_enough(time.monotonic() - begin_time, display)

    def _end_when_enough(self, seconds: float, display: Display) -> None:
        settings, history = self._settings, self._history
        if seconds > settings.max_seconds + EXIT_TIMEOUT_SECONDS:
            raise DemoError("the training is stuck")
        if self._is_ending:
            return
        has_recovered = all(kill.recovery_seconds is not None for kill in history.kills)
        has_held = history.has_held(settings.target_accuracy, num_held=settings.num_held)
        if has_held and has_recovered and not self._planned:
            display.say(
                f"enough: at least {settings.target_accuracy:.0%} solved in {settings.num_held} "
                "measurements in a row"
            )
        elif seconds > settings.max_seconds:
            display.say(f"time is up: {settings.max_seconds:.0f} s")
        else:
            return
        self._is_ending = True
        self._ranks.end()

    def _note_update(self, update: Update, display: Display) -> None:
        history = self._history
        history.updates.append(update)
        last = history.kills[-1] if history.kills else None
        if last is not None and last.recovery_seconds is None:
            last.recovery_seconds = time.time() - last.time
            last.resumed_version = update.version
            display.say(
                f"trainer: resumed from its checkpoint of update {update.version}, "
                f"{last.recovery_seconds:.1f} s after the kill"
            )
        display.show(update, history)

    def _kill_what_is_due(self, display: Display, client: Client) -> None:
        done = self._history.version / self._settings.num_updates
        if self._history.verdict is not None:
            return
        if self._planned == ["server", "trainer"] and done >= KILL_SERVER_AFTER:
            self._kill_server(display, client)
        elif self._planned == ["trainer"] and done >= KILL_TRAINER_AFTER:
            self._kill_trainer(display)

    def _kill_server(self, display: Display, client: Client) -> None:
        display.say("server: killed (SIGKILL); workers and trainer are not told")
        self._note_stats(client)
        self._server.kill()
        kill = self._note_kill("server")
        self._num_stale_units = 0
        self._server.start()
        kill.recovery_seconds = time.time() - kill.time
        display.say(f"server: serves again, {kill.recovery_seconds:.1f} s after the kill")

    def _kill_trainer(self, display: Display) -> None:
        display.say("trainer: both ranks killed (SIGKILL); server and workers are not told")
        self._ranks.kill()
        self._note_kill("trainer")
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
            trainer = self._note_stats(observer)
        except (UnavailableError, DeadlineExceededError):
            # A gap in the curve, no more.
            return
        groups = trainer.num_ready_units + trainer.num_leased_units + trainer.num_held_units
        waiting = groups * self._settings.group_size
        self._history.depths.append(Depth(time.time(), waiting, trainer.num_retained_experiences))

    def _note_stats(self, client: Client) -> ConsumerStats:
        """What the server says of the trainer, with what it left out since it was asked last."""
        (stats,) = client.get_stats(BUFFER).buffers
        (trainer,) = stats.consumers
        new = trainer.num_stale_units - self._num_stale_units
        self._num_stale_units = trainer.num_stale_units
        self._history.num_stale += new * self._settings.group_size
        return trainer

    def _outcome(self, stored: list[str]) -> Outcome:
        settings = self._settings
        acked = [settings.acked_path(index) for index in range(settings.num_workers)]
        trained = [settings.trained_path(rank) for rank in range(settings.num_ranks)]
        return Outcome(
            settings=settings,
            audit=audit(acked, trained=trained, in_buffer=stored),
            history=self._history,
            not_killed=tuple(self._planned),
        )


def buffer_config(settings: DemoSettings) -> BufferConfig:
    """Describe the buffer: whole groups for the trainer, GRPO, fresh ones only, a bound."""
    # What waits for the trainer, and what is kept until its next checkpoint; twice that is never
    # reached.
    num_batches = settings.max_staleness + 1 + settings.checkpoint_every
    max_groups = 2 * num_batches * settings.groups_per_update
    # Freshness is judged when a batch is sent.
    max_lag = settings.max_staleness - settings.prefetch
    return BufferConfig(
        BUFFER,
        group_by="task",
        group_size=settings.group_size,
        consumers=(
            ConsumerConfig(
                CONSUMER, unit="group", staleness=Staleness(max_lag=max_lag, on_stale="drop")
            ),
        ),
        advantage=AdvantageConfig("grpo"),
        # So that nothing is dropped, workers begin no more than can be used in time.
        pacing=Pacing(
            consumer=CONSUMER, max_staleness=max_lag, batch_size=settings.groups_per_update
        ),
        max_items=max_groups * settings.group_size,
    )
