"""The training process, one per rank: learns from its part of what is streamed to all of them.

Together the ranks publish policies, save checkpoints, and go on from the last one when they are
started again. All they know of the task comes in the experiences; held-out problems only measure it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean

import torch

from examples.demo import task, weights
from examples.demo.journal import RESUMED, Journal
from examples.demo.learner import Learner, collate
from examples.demo.model import accuracy
from examples.demo.ranks import Ranks
from examples.demo.settings import BUFFER, CLIENT_OPTIONS, CONSUMER, DemoSettings
from experience_buffer import Batch, Client

NUM_HELD_OUT = 300
CALL_TIMEOUT_SECONDS = 60.0
"""For how long a call is repeated, and the first batch waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one policy update was made of; or that the trainer started, from a checkpoint or not."""

    version: int
    """The policy that came of it; 0: the untrained one."""
    time: float
    """Seconds since the Unix epoch."""
    accuracy: float | None
    """On held-out problems, 0 to 1; None where it wasn't measured."""
    reward: float | None = None
    """Mean over the experiences; None for a start, as below."""
    staleness: float | None = None
    """Mean number of versions by which the experiences were behind."""
    max_staleness: int | None = None
    num_stale: int = 0
    """Experiences that the server marked as too stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank says of its part of an update."""

    rewards: list[float]
    """Of each experience."""
    staleness: list[int]
    """By how many versions each was behind."""
    num_stale: int
    """Experiences that the server marked as too stale."""
    is_late: bool
    """Whether the time is used up."""


def run(settings: DemoSettings, rank: int, rendezvous: Path, reports: Connection | None) -> None:
    """Train until the updates or the time are used up; sends an `Update` at the start and after each.

    Args:
        settings: The run's.
        rank: Which rank this process is, from 0.
        rendezvous: File by which the ranks of this life find each other.
        reports: Where the first rank's `Update`s go; closed at the end. None for the others.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with (
        Client(settings.address, timeout=CALL_TIMEOUT_SECONDS, options=CLIENT_OPTIONS) as client,
        Journal(settings.trained_path(rank)) as journal,
        Ranks(rank, settings.num_ranks, rendezvous=rendezvous) as ranks,
    ):
        Trainer(settings, client, journal, ranks, reports).train()


class Trainer:
    """One rank that turns its parts of batches into policy versions, in step with the others."""

    def __init__(
        self,
        settings: DemoSettings,
        client: Client,
        journal: Journal,
        ranks: Ranks,
        reports: Connection | None,
    ) -> None:
        self._settings = settings
        self._client = client
        self._journal = journal
        self._ranks = ranks
        self._reports = reports
        self._learner = Learner(num_updates=settings.num_updates, seed=settings.seed)
        self._held_out = task.held_out_problems(NUM_HELD_OUT, seed=settings.seed)
        self._version = 0
        """Of the policy; also the training step that made it."""

    def train(self) -> None:
        """Go back to the last checkpoint, then stream, learn, acknowledge and publish in turn."""
        settings, ranks = self._settings, self._ranks
        end_time = time.monotonic() + settings.max_seconds
        self._resume()
        is_late = False
        with self._client.stream(
            settings.groups_per_update,
            buffer=BUFFER,
            consumer=CONSUMER,
            prefetch=1,
            rank=ranks.rank,
            world_size=ranks.world_size,
            format="packed",
            first_timeout=CALL_TIMEOUT_SECONDS,
        ) as batches:
            while self._version < settings.num_updates and not is_late:
                part = self._learn(next(batches), end_time=end_time)
                # All have acknowledged the batch now.
                parts = ranks.gather(part)
                is_late = any(part.is_late for part in parts)
                if ranks.is_first:
                    self._publish()
                    self._report(parts)
                    if self._version % settings.checkpoint_every == 0:
                        self._save()

    def _resume(self) -> None:
        """Load the last checkpoint, and make all that was learned after it come again."""
        state = self._client.state_dict(0, buffer=BUFFER, consumer=CONSUMER)
        checkpoint = weights.load_checkpoint(self._settings.checkpoint_path)
        if checkpoint is not None:
            self._learner.load_state_dict(checkpoint["learner"])
            state = checkpoint["client"]
        self._version = state["step"]
        self._journal.append([f"{self._version} {RESUMED}"])
        if self._ranks.is_first:
            self._client.load_state_dict(state)
            self._publish()
            self._report([])
        # No rank may sample before the buffer is rewound.
        self._ranks.meet()

    def _learn(self, batch: Batch, *, end_time: float) -> Part:
        """Make one update of this rank's part and the others', and acknowledge it."""
        packed, version = batch.packed, self._version
        self._learner.update(collate(packed), add_up=self._ranks.add_up)
        self._version = version + 1
        self._journal.append(f"{self._version} {uid}" for uid in packed.uids)
        batch.ack(self._version)
        # A batch that was read ahead has aged since the server said how stale it was.
        aged = version - (batch.policy_version or 0)
        return Part(
            rewards=packed.column("reward").tolist(),
            staleness=(packed.column("staleness") + aged).tolist(),
            num_stale=sum("stale" in flags for flags in packed.flags),
            is_late=time.monotonic() > end_time,
        )

    def _save(self) -> None:
        """Write a checkpoint; what led to it is then needed no more."""
        state = self._client.state_dict(self._version, buffer=BUFFER, consumer=CONSUMER)
        content = {"learner": self._learner.state_dict(), "client": state}
        weights.save_checkpoint(content, path=self._settings.checkpoint_path)
        self._client.declare_safe(self._version, buffer=BUFFER, consumer=CONSUMER)

    def _publish(self) -> None:
        path = self._settings.weights_path
        weights.publish(self._learner.policy, version=self._version, path=path)
        self._client.publish_policy_version(self._version, buffer=BUFFER)

    def _report(self, parts: Sequence[Part]) -> None:
        """Send an `Update`; without parts, of a start."""
        assert self._reports is not None
        rewards = [reward for part in parts for reward in part.rewards]
        staleness = [versions for part in parts for versions in part.staleness]
        self._reports.send(
            Update(
                version=self._version,
                time=time.time(),
                accuracy=self._accuracy() if self._is_evaluated() or not parts else None,
                reward=fmean(rewards) if parts else None,
                staleness=fmean(staleness) if parts else None,
                max_staleness=max(staleness) if parts else None,
                num_stale=sum(part.num_stale for part in parts),
            )
        )

    def _is_evaluated(self) -> bool:
        last = self._version == self._settings.num_updates
        return last or self._version % self._settings.evaluate_every == 0

    def _accuracy(self) -> float:
        return accuracy(self._learner.policy, self._held_out)
