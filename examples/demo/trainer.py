"""The training process: learns from what it streams, publishes policies, reports progress.

Everything it knows of the task comes in the experiences; held-out problems only measure it.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import fmean

import torch

from examples.demo import task, weights
from examples.demo.journal import Journal
from examples.demo.learner import Learner, collate
from examples.demo.model import accuracy
from examples.demo.settings import BUFFER, CONSUMER, DemoSettings
from experience_buffer import Batch, Client, LeaseNotFoundError

NUM_HELD_OUT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one policy update was made of."""

    version: int
    """The policy that came of it; 0: the untrained one."""
    time: float
    """Seconds since the Unix epoch."""
    accuracy: float | None
    """On held-out problems, 0 to 1; None where it wasn't measured."""
    reward: float | None = None
    """Mean over the experiences; None for the untrained policy, as below."""
    staleness: float | None = None
    """Mean number of versions by which the experiences were behind."""
    max_staleness: int | None = None
    entropy: float | None = None
    """Mean over response tokens, in nats."""
    num_redelivered: int = 0
    """Experiences that came again and were left out, so far."""


def run(settings: DemoSettings, reports: Connection) -> None:
    """Train until the updates or the time are used up; sends an `Update` after each.

    Args:
        settings: The run's. Version 0 of the policy is published there already.
        reports: Where the `Update`s go; closed at the end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with Client(settings.address) as client, Journal(settings.trained_path) as journal, reports:
        Trainer(settings, client, journal).train(reports)


class Trainer:
    """Turns delivered batches into policy versions, each experience at most once."""

    def __init__(self, settings: DemoSettings, client: Client, journal: Journal) -> None:
        self._settings = settings
        self._client = client
        self._journal = journal
        self._learner = Learner(num_updates=settings.num_updates, seed=settings.seed)
        self._held_out = task.held_out_problems(NUM_HELD_OUT, seed=settings.seed)
        self._version = 0
        self._trained: set[str] = set()
        self._num_redelivered = 0

    def train(self, reports: Connection) -> None:
        """Publish the untrained policy, then stream, learn, acknowledge and publish in turn."""
        settings = self._settings
        end_time = time.monotonic() + settings.max_seconds
        self._publish()
        reports.send(Update(version=0, time=time.time(), accuracy=self._accuracy()))
        with self._client.stream(
            settings.groups_per_update, buffer=BUFFER, consumer=CONSUMER, prefetch=1
        ) as batches:
            for batch in batches:
                update = self._learn(batch)
                if update is not None:
                    reports.send(update)
                if self._version == settings.num_updates or time.monotonic() > end_time:
                    return

    def _learn(self, batch: Batch) -> Update | None:
        """Make one update of what is new in a batch; None if nothing is.

        Delivery is at least once: when the server dies between an update and its
        acknowledgement, the same experiences come again.
        """
        rows = zip(batch.uids, batch.experiences, batch.staleness, strict=True)
        new = [row for row in rows if row[0] not in self._trained]
        self._num_redelivered += len(batch) - len(new)
        if not new:
            self._acknowledge(batch)
            return None
        experiences = [experience for _, experience, _ in new]
        version = self._version
        entropy = self._learner.update(collate(experiences))
        uids = [uid for uid, _, _ in new]
        self._trained.update(uids)
        self._journal.append(uids)
        self._acknowledge(batch)
        self._version = version + 1
        self._publish()
        # A batch that was read ahead has aged since the server said how stale it was.
        aged = version - (batch.policy_version or 0)
        staleness = [aged + age for _, _, age in new if age is not None]
        return Update(
            version=self._version,
            time=time.time(),
            accuracy=self._accuracy() if self._is_evaluated() else None,
            reward=fmean(experience.reward or 0.0 for experience in experiences),
            staleness=fmean(staleness),
            max_staleness=max(staleness),
            entropy=entropy,
            num_redelivered=self._num_redelivered,
        )

    def _acknowledge(self, batch: Batch) -> None:
        try:
            batch.ack()
        except LeaseNotFoundError:
            # The server offers the batch again; `_learn` recognises its uids.
            return

    def _publish(self) -> None:
        path = self._settings.weights_path
        weights.publish(self._learner.policy, version=self._version, path=path)
        self._client.publish_policy_version(self._version, buffer=BUFFER)

    def _is_evaluated(self) -> bool:
        last = self._version == self._settings.num_updates
        return last or self._version % self._settings.evaluate_every == 0

    def _accuracy(self) -> float:
        return accuracy(self._learner.policy, self._held_out)
